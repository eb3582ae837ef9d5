"""A GPU in this process: the driver, the context, programs, memory."""
