"""Kernels as data: the ladder of each operation, the choice among them, their tiles, launches and scratch."""
