#!/usr/bin/env bash
# Every kernel under every tool of compute-sanitizer, on small ragged shapes, from files, on arrays and of paged decode;
# prints what is not clean and fails then; and what is, on the standard error output.
# Usage: tests/sanitize.sh [PYTHON [files|arrays|decode]]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHON=${1:-python3} WORK PYTHONPATH=tests${PYTHONPATH:+:$PYTHONPATH}
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit." >&2; exit 69; }
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export NVCC_APPEND_FLAGS=-lineinfo FLASHCLI_CACHE_DIR=$WORK/cache # so that the tools name lines
tools=(memcheck racecheck synccheck initcheck)

gpu_kernels() { # B,N,D: those that take such heads
	"$PYTHON" -c '
import sys
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
_, N, d = map(int, sys.argv[1].split(","))
print(*(name for name, kernel in KERNELS.items() if not kernel.on_host and not kernel.refuses(Problem(1, N, N, d))))' "$1"
}
runs=("2,200,64" "3,129,32" "2,70,128" "1,65,40 --causal" "1,40,256 --causal")

# What is to be run under a tool, a line each; compiled here, not there.
files() {
	for run in "${runs[@]}"; do
		read -r shape option <<<"$run"
		input=$WORK/$shape.in
		"$PYTHON" -m flashcli generate "$input" --force --shape "$shape" >/dev/null || return
		for kernel in $(gpu_kernels "$shape"); do
			"$PYTHON" -m flashcli run --backend cuda --kernel "$kernel" $option "$input" "$WORK/out" >/dev/null || return
			for tool in "${tools[@]}"; do
				echo "$tool -m flashcli run --backend cuda --kernel $kernel $option $input $WORK/$tool.$kernel.$shape.out"
			done
		done
	done
}

arrays() {
	"$PYTHON" -m sanitize_arrays >/dev/null || (($? == 1)) || return # answers that are wrong will be so under the tools
	"$PYTHON" -m sanitize_backward >/dev/null || (($? == 1)) || return
	"$PYTHON" -m sanitize_tangents >/dev/null || (($? == 1)) || return
	"$PYTHON" -m sanitize_sight >/dev/null || (($? == 1)) || return
	for kernel in wgmma mma wgmma_short mma_short register_tiled; do
		for tool in "${tools[@]}"; do echo "$tool -m sanitize_arrays $kernel"; done
	done
	for kernel in wgmma wgmma_short wgmma_whole mma_short mma register_tiled plain; do
		for tool in "${tools[@]}"; do echo "$tool -m sanitize_backward $kernel"; done
		for tool in "${tools[@]}"; do echo "$tool -m sanitize_sight $kernel"; done
	done
	for tool in "${tools[@]}"; do echo "$tool -m sanitize_tangents"; done
}

decode() {
	"$PYTHON" -m sanitize_decode >/dev/null || (($? == 1)) || return
	for kernel in paged_v1 paged_v2 grouped split tensor prompt gather read write_kv merge_answers; do
		for tool in "${tools[@]}"; do echo "$tool -m sanitize_decode $kernel"; done
	done
}

check() { # TOOL and what Python is told
	local log=$WORK/$BASHPID.log
	local -A more=([memcheck]="--report-api-errors no") # cuda-bindings asks a driver for functions that it may not have
	# shellcheck disable=SC2086
	compute-sanitizer --tool "$1" ${more[$1]:-} --error-exitcode 9 "$PYTHON" "${@:2}" >"$log" 2>&1 && {
		echo "$SECONDS s: clean: $*" >&2
		return
	}
	echo "NOT CLEAN: $*"
	grep -m 3 -B 1 -A 6 "^========= \([^CE]\|Er\)\|^WRONG" "$log" | cut -c -300 # the first that it found
	tail -3 "$log" | cut -c -300
	return 1
}
export -f check

for what in ${2:-arrays decode files}; do "$what" || exit; done |
	xargs -r -P "$(($(nproc) * 3 / 4 + 1))" -L 1 bash -c 'check "$@"' _ && echo "all clean"
