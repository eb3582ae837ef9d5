#!/usr/bin/env bash
# Every kernel under every tool of compute-sanitizer, on small ragged shapes; prints what is not clean and fails then.
# Usage: tests/sanitize.sh [PYTHON]
set -uo pipefail
export PYTHON=${1:-python3} WORK
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit." >&2; exit 69; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

gpu_kernels() { # D: those that take heads of so many numbers
	"$PYTHON" -c '
import sys
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.types import Problem
d = int(sys.argv[1])
print(*(name for name, kernel in KERNELS.items() if not kernel.on_host and not kernel.refuses(Problem(1, 1, 1, d))))' "$1"
}
runs=("2,200,64" "3,129,32" "2,70,128" "1,65,40 --causal" "1,40,256 --causal")

check() { # TOOL KERNEL INPUT [--causal]
	local log=$WORK/$1.$2.$(basename "$3").log
	compute-sanitizer --tool "$1" --error-exitcode 9 \
		"$PYTHON" -m flashcli run --backend cuda --kernel "$2" ${4:-} "$3" "$log.out" >"$log" 2>&1 && return
	echo "NOT CLEAN: $*"
	tail -5 "$log"
	return 1
}
export -f check

for run in "${runs[@]}"; do
	read -r shape option <<<"$run"
	input=$WORK/$shape.in
	"$PYTHON" -m flashcli generate "$input" --force --shape "$shape" >/dev/null || exit
	for kernel in $(gpu_kernels "${shape##*,}"); do # compiled here, not under the tool
		"$PYTHON" -m flashcli run --backend cuda --kernel "$kernel" $option "$input" "$WORK/out" >/dev/null || exit
		for tool in memcheck racecheck synccheck initcheck; do echo "$tool $kernel $input${option:+ $option}"; done
	done
done | xargs -P "$(($(nproc) * 3 / 4 + 1))" -L 1 bash -c 'check "$@"' _ && echo "all clean"
