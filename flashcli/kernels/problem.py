"""The problem that an attention kernel is built for: sizes, types and options."""

from __future__ import annotations

from typing import NamedTuple

from flashcli.asked.how import PRECISIONS

BIAS_NUMBERS = {"": 0, "float32": 1, "bool": 2}  # the macro BIAS, by what is added to scores: numbers, or a mask


class Problem(NamedTuple):
    """Attention of Q (B, M, d), K and V (B / group, N, d), causal or not, on ``sms`` multiprocessors.

    B counts all heads of all batches, of which ``group`` share one head of K and V. The build is right for any other B,
    M and N too; they only decide which tiles are fastest.

    ``in_place``: for arrays with any strides and with heads, right for NaN and Inf, and able to give the ``lse``.
    ``dense``: whether the rows of each head follow one another; ``aligned``: whether all rows start on 16 bytes.
    ``bias`` is a key of `BIAS_NUMBERS`, ``bias_contiguous`` whether those of neighbouring keys
    are neighbours. Where it is to be ``batch_invariant``, Bc does not depend on B and ``sms``, so that a row's bytes
    follow from its own data and (M, N, d, causal, precision, bias) alone.
    """

    B: int
    M: int
    N: int
    d: int
    causal: bool = False
    precision: str = "fp32"
    sms: int = 132
    in_place: bool = False
    lse: bool = False
    dense: bool = True
    bias: str = ""
    bias_contiguous: bool = True
    aligned: bool = True
    batch_invariant: bool = False
    group: int = 1

    @property
    def products(self) -> int:
        return PRECISIONS[self.precision]
