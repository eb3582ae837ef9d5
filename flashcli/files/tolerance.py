"""How far an output may be from the right one, if nobody says otherwise."""

# An fp32 implementation of attention is off by some 1e-6; half precision by 1e-3; a wrong one by 1. Outputs are of
# order one for the course's inputs, so this lets every honest fp32 order of summation pass and nothing less accurate.
TOLERANCE = 1e-4  # of |got - want|, absolute plus relative to |want|
