"""The algorithms in NumPy, in their readable statement."""
