#!/usr/bin/env bash
# A session on a machine with a GPU and its driver, as if there were no CUDA toolkit and no PyCUDA: files and arrays are
# computed on the GPU through NVIDIA's bindings, kernels are compiled by NVRTC. Prints each command and what it says.
# Usage: tests/without_toolkit.sh [PYTHON, by its whole path]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir "$WORK/pycuda"
echo 'raise ModuleNotFoundError("No module named pycuda", name="pycuda")' >"$WORK/pycuda/__init__.py"
export PYTHONPATH=$WORK:$PWD NVCC=nvrtc FLASHCLI_CACHE_DIR=$WORK/cache CUDA_CACHE_DISABLE=1
unset CUDA_HOME CUDA_PATH # NVCC says that no nvcc is to be looked for
cd "$WORK"

say() {
	echo "\$ $*"
	"$@" 2>&1
	echo
}
flashcli() { "$python" -m flashcli "$@"; }

say flashcli doctor
say flashcli generate case.in --shape 16,2048,64
say flashcli run case.in case.out
say flashcli run case.in again.out
say cmp case.out again.out
say flashcli run --backend cpu case.in cpu.out
say flashcli compare case.out cpu.out
say flashcli warm run --d 32 --d 64
say "$python" -c 'import numpy, flashcli; q = numpy.ones((2, 64, 32), "f"); print(flashcli.attention(q, q, q, backend="cuda")[0, 0, :3])'
