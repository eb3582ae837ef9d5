"""The way of a file: from an input to an output, in chunks, on several devices or processes, and the report of it."""
