"""Arrays of paged decode on a GPU, as PyTorch tensors: random numbers, or those of a file."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from flashcli.asked.decode import ARRAYS, FACTORS
from flashcli.asked.shape import ceil_div
from flashcli.cpu.decode import attend_group
from flashcli.cpu.pages import DecodeArrays
from flashcli.files.decode.cases import Case, outlined
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared
from flashcli.kernels import decode
from flashcli.kernels.operation import Build

MOST_COMPARED = 32  # query tokens of a sequence


class OnDevice:
    """A problem and its tensors on the GPU, with room for an answer, and how far that is from one in float64."""

    def __init__(self, name: str, asked: DecodeArrays, **drawn: Any) -> None:
        """Have a problem's arrays copied there, but for those that are ``drawn`` there."""
        import torch

        arrays = {argument: getattr(asked, argument) for argument in ARRAYS if argument not in drawn}
        if asked.is_scaled:
            arrays |= {factor: np.array([getattr(asked, factor)], np.float32) for factor in FACTORS}
        given = {argument: _copied(array) for argument, array in arrays.items() if array is not None}
        query = given["query"]
        answer = {"out": torch.zeros_like(query), "lse": torch.zeros(query.shape[:-1], device="cuda")}
        self.name, self.asked, self.tensors = name, asked, given | drawn | answer
        self._wanted: dict[int, Any] = {}

    def prepared(self, build: Build) -> Prepared:
        """The build's launches for these tensors' sizes, where they are."""
        place = place_of_device(self.tensors["query"].device.index)
        return Prepared(place, decode.DECODE, decode.plan_of(build, self.asked.outline))

    def addresses(self, workspace: int) -> list[int]:
        """The addresses that the launches are given."""
        known = {name: tensor.data_ptr() for name, tensor in self.tensors.items()} | {"workspace": workspace}
        return [known.get(name, 0) for name in decode.POINTERS]

    def wanted(self, s: int) -> Any:
        """The answer of some query tokens of sequence s, `tokens_of`, as a float64 tensor [n, H, D]."""
        raise NotImplementedError

    def error(self, out: Any = None) -> float:
        """Relative L2 of an answer, ``out`` of the tensors if none is given, against float64, over some sequences."""
        off = size = 0.0
        flat = (self.tensors["out"] if out is None else out).reshape(-1, self.asked.H, self.asked.D)
        for s in sampled(self.asked):
            if s not in self._wanted:
                self._wanted[s] = self.wanted(s)
            got = flat[(self.asked.starts[s] + tokens_of(self.asked, s)).tolist()]
            off += float(((got.double() - self._wanted[s]) ** 2).sum())
            size += float((self._wanted[s] ** 2).sum())
        return (off / size) ** 0.5 if size else off**0.5

    def rows(self, s: int) -> tuple[Any, Any]:
        """Keys and values of a sequence, without their scales, as float64 tensors [Hkv, tokens, D]."""
        import torch

        asked, length = self.asked, int(self.asked.seq_lens[s])
        pages = self.tensors["block_tables"][s, : ceil_div(length, asked.page)].long()

        def gathered(cache: Any) -> Any:  # PyTorch does not index fp8
            return (cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages]).double()

        K, V = gathered(self.tensors["key_cache"]), gathered(self.tensors["value_cache"])
        if asked.layout == "vllm":
            K, V = K.permute(1, 0, 3, 2, 4), V.permute(1, 0, 3, 2)
        else:
            order = (2, 0, 1, 3) if asked.layout == "nhd" else (1, 0, 2, 3)
            K, V = K.permute(order), V.permute(order)
        K, V = (x.reshape(asked.Hkv, -1, asked.D)[:, :length] for x in (K, V))
        return K, V

    def without_pages(self) -> tuple[Any, Any, Any] | None:
        """Queries, keys and values [S, heads, tokens, D] of all sequences; None if PyTorch's attention is another."""
        import torch

        asked = self.asked
        more = asked.T > 1 or asked.is_ragged or asked.window or asked.sparse or asked.softcap
        more = more or asked.alibi_slopes is not None or asked.sinks is not None
        if more or len(set(asked.seq_lens.tolist())) > 1 or self.tensors["key_cache"].itemsize == 1:
            return None
        kind = self.tensors["query"].dtype
        keys, values = zip(*(self.rows(s) for s in range(asked.S)), strict=True)
        K, V = (torch.stack([x.to(kind) for x in some]) for some in (keys, values))
        return self.tensors["query"].transpose(1, 2), K, V


def _copied(array: np.ndarray) -> Any:
    """A tensor on the GPU with an array's numbers, whatever their type: bits are copied."""
    import torch

    bits = torch.from_numpy(np.array(array).reshape(-1).view(np.uint8)).cuda()
    return bits.view(getattr(torch, array.dtype.name)).view(array.shape)


def sampled(asked: DecodeArrays) -> list[int]:
    """The first sequence, the one in the middle, the last, and the longest."""
    return sorted({0, asked.S // 2, asked.S - 1, int(asked.seq_lens.argmax())})


def tokens_of(asked: DecodeArrays, s: int) -> np.ndarray:
    """The query tokens of sequence s that are compared: all of them, or some over all of their range."""
    count = int(asked.counts[s])
    return np.unique(np.linspace(0, count - 1, min(count, MOST_COMPARED)).astype(np.int64))


def wanted_of(asked: DecodeArrays, s: int) -> np.ndarray:
    """The answer of `tokens_of` sequence s [n, H, D] in float64, on the CPU."""
    tokens = tokens_of(asked, s)
    out, lse = np.zeros((len(tokens), asked.H, asked.D)), np.zeros((len(tokens), asked.H))
    for (i, t), kv_head in itertools.product(enumerate(tokens), range(asked.Hkv)):
        attend_group(asked.token(s, int(t)), 0, kv_head, out[i : i + 1], lse[i : i + 1], np.float64)
    return out


class Drawn(OnDevice):
    """A case whose cache is seeded normal numbers that are drawn on the GPU, without scales."""

    def __init__(self, name: str, case: Case) -> None:
        import torch

        asked = replace(outlined(case), k_scale=1.0, v_scale=1.0)
        generator = torch.Generator("cuda").manual_seed(case.seed)

        def drawn(cache: np.ndarray) -> Any:
            tensor = torch.empty(cache.shape, dtype=getattr(torch, cache.dtype.name), device="cuda")
            for some in tensor.view(-1).split(2**26):
                some.copy_(torch.randn(some.shape, generator=generator, device="cuda"))
            return tensor

        super().__init__(name, asked, key_cache=drawn(asked.key_cache), value_cache=drawn(asked.value_cache))

    def wanted(self, s: int) -> Any:
        import torch

        asked, tokens, (K, V) = self.asked, tokens_of(self.asked, s), self.rows(s)
        rows = (asked.starts[s] + tokens).tolist()
        q = self.tensors["query"].reshape(-1, asked.Hkv, asked.group, asked.D)[rows].double().transpose(0, 1)
        scores = (
            q.reshape(asked.Hkv, -1, asked.D) @ K.transpose(1, 2) * asked.scale
        )  # of a token's heads, then the next
        places = torch.tensor([asked.position(s, t) for t in tokens.tolist()], device="cuda")
        unseen = torch.arange(K.shape[1], device="cuda") > places.repeat_interleave(asked.group)[:, None]
        O = torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=2) @ V
        return O.reshape(asked.Hkv, -1, asked.group, asked.D).transpose(0, 1).reshape(-1, asked.H, asked.D)


class Given(OnDevice):
    """The arrays of a file."""

    def wanted(self, s: int) -> Any:
        import torch

        return torch.from_numpy(wanted_of(self.asked, s)).cuda()
