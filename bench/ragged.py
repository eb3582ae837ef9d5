"""Ragged queries on a GPU, drafts to be verified, prompts, chunks, whole steps of a server, beside PyTorch's attention.

``python -m bench.ragged [--shape TEXT].. [--json FILE]``. What is timed is the public call, by CUDA events, with the
second-level cache flushed before each run; each answer is compared with float64 first. PyTorch's attention has keys and
values without pages: "flash" is its varlen function, "cuDNN" takes sequences of one length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click

from bench import scripts
from bench.decode import told
from bench.rows import Ragged
from flashcli.files.decode.cases import Case
from flashcli.kernels.decode import CEILING
from flashcli.measure import machine
from flashcli.measure.decode_arrays import Drawn
from flashcli.measure.decode_times import RUNS, WRONG, about, seconds, timed, times_of, ways
from flashcli.measure.rows import Failure, Row, Skipped
from flashcli.terminal import as_json

OURS = "flashcli"
DRAFTED = (("8x4096 64/8", 8, 64), ("32x4096 32/8", 32, 32))  # sequences of 4096 tokens, heads
SHAPES = {
    f"{name}, T = {T}": Case(S, H, 8, 128, "4096", queries=f"{T}x{S}") for name, S, H in DRAFTED for T in (1, 2, 4, 8)
} | {
    "prompt of 8192": Case(1, 32, 8, 128, "8192", queries="8192"),
    "16 prompts of 2000": Case(16, 32, 8, 128, "2000", queries="2000x16"),
    "16 prompts of 1 to 4000": Case(16, 32, 8, 128, "uniform:4000", queries="uniform:4000"),
    "128 tokens after 2048": Case(128, 32, 8, 128, "2048", queries="1x128"),
    "2 chunks of 2048 after 2048": Case(2, 32, 8, 128, "4096", queries="2048x2"),
    "both together": Case(130, 32, 8, 128, "2048x128,4096x2", queries="1x128,2048x2"),
    "fp32 prompt of 8192": Case(1, 32, 8, 128, "8192", query_type="float32", queries="8192"),
    "64 sequences, 8192 shared": Case(64, 32, 8, 128, str(8192 + 512), queries="1x64"),
}
SHARED = {"64 sequences, 8192 shared": 8192}  # tokens at the beginning of all sequences


def operations(given: Drawn) -> float:
    """The operations of both products: four for each number of a key, query head, and pair of tokens that meet."""
    asked = given.asked
    counts, lengths = asked.counts.astype(float), asked.seq_lens.astype(float)
    return float((counts * (lengths - (counts - 1) / 2)).sum()) * 4 * asked.H * asked.D


def ours(given: Drawn, **changes: Any) -> Callable[[], Any]:
    """A call of `flashcli.decode` with these tensors, some of them exchanged."""
    from flashcli.api import decode

    names = "key_cache", "value_cache", "block_tables", "seq_lens", "query_starts"
    arrays = {name: given.tensors[name] for name in names} | {"query": given.tensors["query"][:, 0]}
    options = {"layout": given.asked.layout, "max_query_len": int(given.asked.counts.max())}
    return functools.partial(decode, **(arrays | options | changes))


def together(given: Drawn) -> Callable[[], Any]:
    """A call with the same number of query tokens of each sequence, [S, T, H, D]."""
    asked = given.asked
    query = given.tensors["query"].reshape(asked.S, -1, asked.H, asked.D)
    return ours(given, query=query, query_starts=None)


def sharing(given: Drawn, shared: int) -> Callable[[], Any]:
    """The prefix as one sequence of all query tokens, each sequence's own tokens, and a merge."""
    import torch

    from flashcli.api import merge

    tables, lengths = given.tensors["block_tables"], given.tensors["seq_lens"]
    starts = torch.tensor([0, given.asked.total], dtype=torch.int32, device="cuda")
    prefix = ours(
        given, block_tables=tables[:1, : shared // given.asked.page], seq_lens=torch.full_like(lengths[:1], shared),
        query_starts=starts, causal=False, max_query_len=given.asked.total, return_lse=True,
    )  # fmt: skip
    own = ours(given, block_tables=tables[:, shared // given.asked.page :], seq_lens=lengths - shared, return_lse=True)

    def both() -> Any:
        return merge(*zip(prefix(), own(), strict=True))[0]

    return both


def peers(given: Drawn) -> Iterator[tuple[str, Callable[[], Any]]]:
    """PyTorch's attention by name, on the same keys and values without pages."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    asked, kind = given.asked, given.tensors["query"].dtype
    q = given.tensors["query"][:, 0].contiguous()
    some = [[x.transpose(0, 1).to(kind) for x in given.rows(s)] for s in range(asked.S)]
    K, V = (torch.cat(x).contiguous() for x in zip(*some, strict=True))  # [tokens, Hkv, D]
    del some
    lengths, counts = (torch.from_numpy(x.astype("int64")).cuda() for x in (asked.seq_lens, asked.counts))
    if kind != torch.float32:
        ends = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (counts, lengths)]
        most = int(counts.max()), int(lengths.max())
        yield (
            "PyTorch flash",
            lambda: torch.ops.aten._flash_attention_forward(q, K, V, *ends, *most, 0.0, True, False, scale=asked.scale)[
                0
            ],
        )
    if len(set(asked.seq_lens.tolist())) > 1 or len(set(asked.counts.tolist())) > 1:
        return
    T, N = int(counts[0]), int(lengths[0])
    query = q.reshape(asked.S, T, asked.H, asked.D).transpose(1, 2)
    keys, values = (x.reshape(asked.S, N, asked.Hkv, asked.D).transpose(1, 2) for x in (K, V))
    if kind == torch.float32:
        from flashcli.api import attention

        yield "attention, dense", lambda: attention(query, keys, values, causal=True, q_start=N - T).transpose(1, 2)
        return
    mask = None
    if 1 < T < N:
        mask = torch.zeros(1, 1, T, N, dtype=kind, device="cuda")
        mask.masked_fill_(torch.ones(T, N, device="cuda").tril(N - T) == 0, -torch.inf)

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                query, keys, values, mask, is_causal=T == N > 1, scale=asked.scale, enable_gqa=True
            ).transpose(1, 2)

    yield "PyTorch cuDNN", cudnn


def row(given: Drawn, name: str, work: Callable[[], Any]) -> Row:
    """The row of a contender, which is timed once its answer has been found right."""
    start = about(given.name, given.asked, name)
    try:
        off = given.error(work())
        if not off < WRONG[given.asked.query.dtype.name]:
            return Failure(**start, relative_l2=off, error=f"the answer is wrong: relative L2 {off:.1e}")
        found = seconds(work, RUNS)
    except RuntimeError as error:
        return Skipped(**start, skipped=str(error).splitlines()[0][:80])
    return Ragged(**vars(timed(given.name, given.asked, name, found, off)), operations=operations(given))


def rows_of(name: str, case: Case) -> Iterator[Row]:
    """The rows of a shape: the floor where reading is most of the work, our calls, and PyTorch's."""
    case = replace(case, layout="nhd")
    given = Drawn(name, case)
    if name.split(",")[0] in [drafted for drafted, *_ in DRAFTED]:
        yield from times_of(Drawn(name, replace(case, queries="")), ways([CEILING]), peers=False)
        yield row(given, "[S, T, H, D]", together(given))
    if shared := SHARED.get(name, 0):
        tables = given.tensors["block_tables"][:, : shared // case.page]
        tables.copy_(tables[:1].clone().expand_as(tables))
    yield row(given, OURS, ours(given))
    if shared:
        yield row(given, "prefix once", sharing(given, shared))
        return
    for peer, work in peers(given):
        yield row(given, peer, work)


@click.command()
@click.option("--shape", "chosen", multiple=True, help="Shapes whose names hold this text; all by default.")
@as_json.json_option
def main(chosen: tuple[str, ...], json_path: str | None) -> None:
    """Time ragged queries on this machine's first GPU."""
    import torch

    rows: list[Row] = []
    for name, case in SHAPES.items():
        if not chosen or any(text in name for text in chosen):
            rows += scripts.told(rows_of(name, case), told)
            torch.cuda.empty_cache()
    scripts.publish("ragged", machine.gpu_circumstances(), rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
