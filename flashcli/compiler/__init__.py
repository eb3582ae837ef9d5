"""Compilation of a kernel's source to machine code: nvcc, NVRTC, the host's C compiler, and the cache."""
