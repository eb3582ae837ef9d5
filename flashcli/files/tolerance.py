"""How far an output may be from the right one, if nobody says otherwise."""

# An fp32 implementation of attention is off by some 1e-6; half precision by 1e-3; a wrong one by 1. Outputs are of
# order one for the course's inputs, so this lets every honest fp32 order of summation pass and nothing less accurate.
TOLERANCE = 1e-4  # of |got - want|, absolute plus relative to |want|

# From 1 to the next number of a short type. Weights rounded to it, and the answer, are off by half of that each, the
# weights' share by the size of the row's other numbers: a wrong answer is off by as much as they are large.
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
