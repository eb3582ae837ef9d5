"""Seconds of first calls on PyTorch's tensors, each in a process of its own: ``python -m bench.forked_calls D ...``.

Processes are forked off this one, which has imported PyTorch and nothing of flashcli. So a call's time has the import
of flashcli's modules in it, but neither that of PyTorch nor the start of its context. A line each is printed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

B, H, N = 2, 8, 2048  # of attention
S, PAGES = 8, 1024  # sequences of decode, pages of 16 tokens of its cache
CALLS = (("attention", False), ("attention", True), ("backward", False), ("backward", True), ("decode", False))


def prepared(operation: str, d: int, causal: bool) -> Callable[[], object]:
    """The call, whose tensors are there already; it imports what it calls."""
    import torch

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def decode() -> object:
        from flashcli.api import decode

        return decode(query, keys, values, tables, lengths)

    def attention() -> object:
        from flashcli.api import attention

        return attention(q, q, q, causal=causal)

    def backward() -> object:
        from flashcli.api import attention_backward

        return attention_backward(o, q, q, q, causal=causal, o=o, lse=lse)

    if operation == "decode":
        half = torch.float16
        query, keys = random(S, 32, d, dtype=half), random(PAGES, 8, d // 8, 16, 8, dtype=half)
        values = random(PAGES, 8, d, 16, dtype=half)
        tables = torch.arange(PAGES, device="cuda", dtype=torch.int32).reshape(S, -1)
        lengths = torch.full((S,), 2000, device="cuda", dtype=torch.int32)
        return decode
    q = random(B, H, N, d)
    if operation == "attention":
        return attention
    o, lse = random(B, H, N, d), random(B, H, N)  # no answer of attention's, but gradients take as long
    return backward


def seconds(call: Callable[[], object]) -> float:
    """The time of a call, until its answer is there."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main(heads: Sequence[int]) -> None:
    import torch  # noqa: F401  for all that are forked

    for d, (operation, causal) in itertools.product(heads, CALLS):
        process = os.fork()
        if not process:
            print(json.dumps(seconds(prepared(operation, d, causal))), flush=True)
            os._exit(0)
        if os.waitpid(process, 0)[1]:
            sys.exit(f"{operation} has failed")


if __name__ == "__main__":
    main([int(d) for d in sys.argv[1:]])
