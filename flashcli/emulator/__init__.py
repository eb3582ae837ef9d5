"""CUDA on a CPU, slowly: sources made C++, threads fibers, instructions functions, and findings told."""
