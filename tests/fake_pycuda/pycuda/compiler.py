"""Runs whatever nvcc is named, and gives the options as the machine code."""

import subprocess

from pycuda.driver import CompileError


def compile(source, nvcc, options, no_extern_c, arch, cache_dir, include_dirs):
    done = subprocess.run([nvcc, *options, f"-arch={arch}"], capture_output=True, text=True)
    if done.returncode:
        raise CompileError("nvcc compilation failed", done.stderr)
    return " ".join(options).encode()
