"""Enough of PyCUDA to run flashcli's CUDA backend without a GPU; see driver.py."""
