"""Where attention is computed.

A backend is opened by making it and closed by leaving its ``with`` block. It has

``forward(qkv, out)``
    Attention of ``qkv``, float32 [batches, 3, N, d], into ``out``, float32 [batches, N, d]. Any number of calls, any N.
``description``
    One line for people: the device, the kernel, its tiles.
``details()``
    What it measured, as a flat dict of numbers and strings.
"""
