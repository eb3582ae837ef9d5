"""Arrays of NumPy, CuPy and others: where they lie, and what is computed of them."""
