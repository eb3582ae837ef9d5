"""One module a command: parse, call, print. No maths, no CUDA; nothing slow is imported before the command runs."""
