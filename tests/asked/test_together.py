"""How many biases, and numbers of a mask, are read together, and for how many queries."""

from __future__ import annotations

import pytest

from flashcli.asked.attention import Operand, call


def dense(*shape: int, kind: str = "float32") -> Operand:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return Operand(shape, tuple(strides), kind)


@pytest.mark.parametrize(
    ("N", "row", "of_bias", "of_mask", "together"),
    [
        (8, 8, 0, 0, 4), (8, 8, 16, 4, 4), (8, 12, 0, 0, 4),
        (8, 8, 8, 0, 2), (8, 8, 0, 2, 2), (10, 12, 0, 0, 2), (8, 10, 0, 0, 2),
        (8, 2**29, 0, 0, 1), (8, 2**29 - 4, 0, 0, 4),
        (8, 8, 4, 0, 1), (8, 8, 0, 1, 1), (9, 12, 0, 0, 1), (8, 9, 0, 0, 1),
    ],
)  # fmt: skip
def test_as_many_are_read_together_as_sizes_strides_and_addresses_are_multiples_of(N, row, of_bias, of_mask, together):
    q, k = dense(2, 3, 5, 8), dense(2, 3, N, 8)
    bias = Operand((5, N), (row, 1), "float32")
    asked = call(q, k, k, bias, mask=dense(2, 1, 1, N, kind="bool"))
    assert asked.at(0, of_bias, of_mask).together == together
    by_columns = call(q, k, k, Operand((5, N), (1, 8), "float32"), mask=dense(2, 1, 1, N, kind="bool"))
    assert by_columns.at(0, of_bias, of_mask).together == 1


@pytest.mark.parametrize(
    ("mask", "of_keys"),
    [(None, False), ((2, 1, 1, 8), True), ((8,), True), ((2, 1, 5, 8), False), ((2, 3, 5, 1), False)],
)
def test_a_mask_without_rows_is_of_keys(mask, of_keys):
    q, k = dense(2, 3, 5, 8), dense(2, 3, 8, 8)
    asked = call(q, k, k, dense(5, 8), mask=None if mask is None else dense(*mask, kind="bool"))
    assert asked.mask_of_keys == of_keys
    assert not call(q, k, k, dense(1, 1, 1, 8)).mask_of_keys  # biases are none
