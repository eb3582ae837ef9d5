"""`flashcli.merge` for PyTorch's tensors: on a GPU where they lie, on the CPU as NumPy's arrays of the same memory."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

import torch

from flashcli.arrays.numpys import merge as merge_numpy
from flashcli.asked.merge import MOST_PARTS, VECTOR, ask
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared, prepare
from flashcli.kernels.merge import MERGE
from flashcli.torch import private
from flashcli.torch.in_place import remember
from flashcli.torch.paged_tensors import described, numbers, refuse, tensor, uncompiled
from flashcli.torch.sight import operand

_ready: dict[tuple, Prepared] = {}


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashcli.merge` of PyTorch's tensors, with its parameters, answer and errors; without gradients."""
    outs, lses = tuple(outs), tuple(lses)
    if torch.compiler.is_compiling():
        return _uncompiled(outs, lses)
    refuse({f"{name}[{i}]": x for name, some in (("outs", outs), ("lses", lses)) for i, x in enumerate(some)})
    if not outs[0].is_cuda:
        found, found_lse = merge_numpy(*([numbers(x) for x in some] for some in (outs, lses)))
        return tensor(found, outs[0].dtype), torch.from_numpy(found_lse)
    lowest = functools.reduce(operator.or_, (x.data_ptr() for x in outs)) % VECTOR
    key = (*map(described, (*outs, *lses)), len(outs))
    prepared = _ready.get(key)
    if prepared is None or lowest:
        asked = ask(*(tuple(operand(x) for x in some) for some in (outs, lses)))
        prepared = prepare(place_of_device(outs[0].get_device()), MERGE, asked.at(lowest))
        remember(_ready, key, prepared)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    none = (0,) * (MOST_PARTS - len(outs))
    addresses = (x.data_ptr() for x in outs), none, (x.data_ptr() for x in lses), none
    stream = private.current_stream(prepared.place.device)
    prepared.launch(stream, out.data_ptr(), lse.data_ptr(), *itertools.chain(*addresses))
    return out, lse


_uncompiled = uncompiled(merge)
