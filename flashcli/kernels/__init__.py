"""What is launched, as data: the ladder of kernels, which of them computes, and how machine code is made of them."""
