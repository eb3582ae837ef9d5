"""Paged decode on a GPU: every kernel judged against float64 first, then timed beside its peers.

``python -m flashcli.measure.decode [--check-only | --times-only] [--kernel NAME]... [--json FILE]``. Times are medians
by CUDA events, with the second-level cache flushed before each run and every page used once, in random order. Needs
PyTorch and PyCUDA.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import click
import numpy as np

from flashcli import as_json
from flashcli.backends.cores import usable_cores
from flashcli.backends.decode_cuda import DecodeCuda
from flashcli.errors import MISMATCH, FlashError, UsageError
from flashcli.files import decode_cases
from flashcli.files.decode_cases import Case, make
from flashcli.gpu.session import devices
from flashcli.kernels import compiler, decode
from flashcli.kernels.decode import CEILING, KERNELS, POINTERS
from flashcli.measure import machine, scripts
from flashcli.measure.decode_judge import Answer, Judge
from flashcli.measure.peers import event_seconds
from flashcli.measure.rows import Decoded, Failure, Row, Skipped, over_all
from flashcli.paged import LAYOUTS, BlockSparse, cache_shapes
from flashcli.shape import ceil_div

RUNS = 20
CACHE_FLUSH = 2**30  # bytes read between two runs: longer than the host takes to queue what is timed
READ_RATE = 4.2e12  # bytes a second that an H200's memory gives
WRONG = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # a relative L2 that no right answer comes near

# ---- is it right?

SMALL = Case(3, 8, 2, 128, "320,64,77", sharpness=4.0)


def grid() -> Iterator[Case]:
    """Cases over all that may be asked for."""
    types = [
        ("float32", ""), ("float16", ""), ("bfloat16", ""), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"),
        ("float32", "float8_e4m3fn"),
    ]  # fmt: skip
    for (query, cache), layout in itertools.product(types, LAYOUTS):
        small = dataclasses.replace(SMALL, query_type=query, cache_type=cache, layout=layout)
        yield small
        for D, page in itertools.product((32, 64, 80, 96, 112, 128, 192, 256), (8, 16, 32)):
            if D != 112 or page == 16:
                yield dataclasses.replace(small, D=D, page=page, alibi=(D // 16 + page // 8) % 2 == 0)
        for page in (1, 2, 64, 256):
            yield dataclasses.replace(small, page=page, lengths="512,256,77")
        for H, Hkv in ((8, 8), (5, 1), (6, 1), (7, 1), (16, 1), (71, 1), (24, 2)):
            yield dataclasses.replace(small, H=H, Hkv=Hkv)
        for T in (2, 5, 8):
            yield dataclasses.replace(small, T=T, alibi=T == 5)
        yield dataclasses.replace(small, window=50)
        yield dataclasses.replace(small, window=33, T=4)
        yield dataclasses.replace(small, lengths="3008,0,1024", H=4)
        yield dataclasses.replace(small, lengths="16,1,16")
        yield dataclasses.replace(small, S=5, lengths="1,0,64,64,1500", pages="reversed")
        yield dataclasses.replace(small, lengths="320,320,320", pages="shared")
        yield dataclasses.replace(small, value_scale=100.0)
        yield dataclasses.replace(small, sharpness=20.0)
        for step in (0, 1, -1):
            yield dataclasses.replace(small, sparse=BlockSparse(3, 32, 1, step, 1), lengths="640,64,77")
    yield dataclasses.replace(SMALL, D=120, layout="hnd", cache_type="float8_e4m3fn")
    yield dataclasses.replace(SMALL, D=56, layout="nhd")


def described(case: Case) -> str:
    """How a case differs from the first one."""
    changes = {name: value for name, value in vars(case).items() if value != getattr(SMALL, name)}
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plain case"


class Found(NamedTuple):
    """What checking found: cases that count, void ones, and what was wrong, in words."""

    counted: int
    void: int
    wrong: list[str]


def check(names: list[str], every: int = 1) -> Found:
    """Each kernel on each ``every``-th case of the grid; batches in other company must give the same bytes."""
    counted, void, wrong = 0, 0, []
    cases = list(itertools.islice(grid(), 0, None, every))
    _compile(names, cases)
    for case in cases:
        asked = make(case)
        judge = Judge(asked)
        if passed := judge.void():
            void += 1
            click.echo(f"void, for {passed} would pass: {described(case)}", err=True)
        counted += 1
        for name in names:
            if KERNELS[name].refuses(decode.problem_of(KERNELS[name], asked)):
                continue
            try:
                with DecodeCuda(name) as backend:
                    got = Answer(*backend.decode(asked, range(asked.S)))
                    alone = [backend.decode(asked, range(s, s + 1)) for s in range(asked.S)]
            except FlashError as error:
                wrong.append(f"{name}: {described(case)}: {error}")
                continue
            if told := judge.problem(got):
                wrong.append(f"{name}: {described(case)}: {told}")
            if np.concatenate([out for out, _ in alone]).tobytes() != got.out.tobytes():
                wrong.append(f"{name}: {described(case)}: a sequence alone has other bytes than in the batch")
    return Found(counted, void, wrong)


def _compile(names: list[str], cases: list[Case]) -> None:
    """All that is needed for some cases, their builds side by side."""
    smallest = [make(dataclasses.replace(case, S=1, lengths="1")) for case in cases]
    problems = itertools.product([KERNELS[name] for name in names], smallest)
    _compile_all({(kernel, decode.problem_of(kernel, asked)) for kernel, asked in problems})


def _compile_all(wanted: set[tuple[decode.Kernel, decode.Problem]]) -> None:
    """In threads: one nvcc after the other would take most of the time."""
    builds = [decode.Build(kernel, problem) for kernel, problem in wanted if not kernel.refuses(problem)]
    arch = compiler.architecture(devices()[0].capability)
    with ThreadPoolExecutor(len(usable_cores())) as pool:
        list(pool.map(lambda build: compiler.cubin(build, arch), builds))


# ---- how fast is it?


class TimedShape(NamedTuple):
    """A shape to time: the lengths as `decode_cases.lengths` takes them."""

    name: str
    S: int
    H: int
    Hkv: int
    D: int
    lengths: str
    query_type: str = "float16"
    cache_type: str = "float16"


SHAPES = (
    TimedShape("8x4096 64/8", 8, 64, 8, 128, "4096"),
    TimedShape("1x4096 32/8", 1, 32, 8, 128, "4096"),
    TimedShape("1x32768 32/8", 1, 32, 8, 128, "32768"),
    TimedShape("32x4096 32/8", 32, 32, 8, 128, "4096"),
    TimedShape("64x1024 32/32", 64, 32, 32, 128, "1024"),
    TimedShape("128x2048 32/4", 128, 32, 4, 128, "2048"),
    TimedShape("256x512 32/8", 256, 32, 8, 128, "512"),
    TimedShape("16x8192 32/8 D=64", 16, 32, 8, 64, "8192"),
    TimedShape("131072 + 255x64", 256, 32, 8, 128, "131072,64x255"),
    TimedShape("fp8 8x4096 64/8", 8, 64, 8, 128, "4096", cache_type="float8_e4m3fn"),
    TimedShape("fp8 32x4096 32/8", 32, 32, 8, 128, "4096", cache_type="float8_e4m3fn"),
    TimedShape("16x(1..2000) 32/8", 16, 32, 8, 128, "uniform:2000"),
    TimedShape("fp32 8x4096 64/8", 8, 64, 8, 128, "4096", "float32", "float32"),
    TimedShape("fp32 1x32768 32/8", 1, 32, 8, 128, "32768", "float32", "float32"),
)


PAGE = 16  # tokens


def problem_of(shape: TimedShape, layout: str, kernel: decode.Kernel) -> decode.Problem:
    """What a kernel is compiled for to compute a shape."""
    rows = kernel.rows(shape.H // shape.Hkv, shape.D)
    return decode.Problem(shape.D, PAGE, shape.query_type, shape.cache_type, layout == "vllm", rows)


class Contender(NamedTuple):
    """A kernel, and what it is tuned to where that is not its own choice."""

    kernel: decode.Kernel
    tuning: decode.Tuning = decode.Tuning()
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or self.kernel.name

    def problem(self, shape: TimedShape, layout: str) -> decode.Problem:
        return problem_of(shape, layout, self.kernel)._replace(tuning=self.tuning)


def variants(text: str) -> list[Contender]:
    """``tensor:blocks=2/3,piece=65536`` is a kernel with each combination of such fields of `Tuning`."""
    name, _, given = text.partition(":")
    chosen = [part.partition("=") for part in given.split(",") if part]
    unknown = [field for field, _, _ in chosen if field not in decode.Tuning._fields]
    numbers = [values.split("/") for _, _, values in chosen]
    if unknown or not all(number.isdecimal() for some in numbers for number in some):
        hint = f"write it as tensor:blocks=2/3,threads=64; there are {', '.join(decode.Tuning._fields)}."
        raise UsageError(f"--variant {text}: that is no kernel with numbers to try.", hint)
    kernel = CEILING if name == CEILING.name else decode.named(name)
    found = []
    for tried in itertools.product(*numbers):
        with_names = dict(zip((field for field, _, _ in chosen), map(int, tried), strict=True))
        label = " ".join([name, *(f"{field}={number}" for field, number in with_names.items())])
        found.append(Contender(kernel, decode.Tuning(**with_names), label))
    return found


class OnDevice:
    """A shape's arrays as PyTorch tensors, made on the GPU, and the argument of the kernels for them."""

    def __init__(self, shape: TimedShape, layout: str) -> None:
        import torch

        self.shape, self.layout, self.page = shape, layout, PAGE
        S, H, Hkv, D = shape.S, shape.H, shape.Hkv, shape.D
        self.lengths = decode_cases.lengths(shape.lengths, S, 0)
        counts = ceil_div(self.lengths.astype(np.int64), PAGE)
        pages, width = int(counts.sum()), int(counts.max())
        tables = np.full((S, width), -1, np.int32)
        tables[np.arange(width) < counts[:, None]] = np.random.default_rng(0).permutation(pages)
        generator, stored = torch.Generator("cuda").manual_seed(0), shape.cache_type
        size = getattr(torch, stored).itemsize
        shapes = cache_shapes(layout, pages, Hkv, PAGE, D, size)

        def drawn(of: tuple[int, ...], kind: str, factor: float = 1.0) -> Any:
            tensor = torch.empty(of, dtype=getattr(torch, kind), device="cuda")
            flat, step = tensor.view(-1), 2**26
            for first in range(0, flat.numel(), step):
                some = flat[first : first + step]
                some.copy_(torch.randn(some.shape, generator=generator, device="cuda") * factor)
            return tensor

        self.tensors = {
            "query": drawn((S, 1, H, D), shape.query_type, 3.0), "key_cache": drawn(shapes[0], stored),
            "value_cache": drawn(shapes[1], stored), "block_tables": torch.from_numpy(tables).cuda(),
            "seq_lens": torch.from_numpy(self.lengths).cuda(),
            "out": torch.zeros((S, 1, H, D), dtype=getattr(torch, shape.query_type), device="cuda"),
            "lse": torch.zeros((S, 1, H), device="cuda"),
        }  # fmt: skip
        self.sizes = decode.Sizes(S, 1, H, Hkv, width, PAGE)
        self.bytes = 2 * int(self.lengths.sum()) * Hkv * D * size
        self._wanted: dict[int, Any] = {}

    def argument(self, workspace: int) -> decode.Argument:
        shape = self.shape
        pointers = {name: tensor.data_ptr() for name, tensor in self.tensors.items()} | {"workspace": workspace}
        return decode.Argument(
            query_sequence=shape.H * shape.D, query_token=shape.H * shape.D, table_row=self.sizes.table_width,
            **decode.cache_strides(self.layout, shape.Hkv, self.page, shape.D, self.tensors["key_cache"].itemsize),
            sequences=shape.S, tokens=1, heads=shape.H, kv_heads=shape.Hkv,
            group=shape.H // shape.Hkv, pages=self.tensors["key_cache"].shape[0],
            table_width=self.sizes.table_width, scale=shape.D**-0.5,
            **{name: pointers.get(name) for name in POINTERS},
        )  # fmt: skip

    def rows(self, s: int) -> tuple[Any, ...]:
        """Keys and values of a sequence as float64 tensors [Hkv, tokens, D]."""
        import torch

        length = int(self.lengths[s])
        pages = self.tensors["block_tables"][s, : ceil_div(length, self.page)].long()
        K, V = (self.tensors[name].view(torch.uint8) if self.tensors[name].itemsize == 1 else self.tensors[name]
                for name in ("key_cache", "value_cache"))  # fmt: skip
        K, V = K[pages].view(self.tensors["key_cache"].dtype), V[pages].view(self.tensors["key_cache"].dtype)
        Hkv, D = self.shape.Hkv, self.shape.D
        if self.layout == "vllm":
            K, V = K.permute(1, 0, 3, 2, 4), V.permute(1, 0, 3, 2)
        else:
            order = (2, 0, 1, 3) if self.layout == "nhd" else (1, 0, 2, 3)
            K, V = K.permute(order), V.permute(order)
        return tuple(x.float().double().reshape(Hkv, -1, D)[:, :length] for x in (K, V))

    def error(self) -> float:
        """Relative L2 of `out` against float64, over some sequences; the longest and the last are among them."""
        import torch

        if not self._wanted:
            for s in sorted({0, self.shape.S // 2, self.shape.S - 1, int(self.lengths.argmax())}):
                K, V = self.rows(s)
                q = self.tensors["query"][s, 0].double().reshape(self.shape.Hkv, -1, self.shape.D)
                P = torch.softmax(q @ K.transpose(1, 2) * self.shape.D**-0.5, dim=2)
                self._wanted[s] = (P @ V).reshape(self.shape.H, self.shape.D)
        off = size = 0.0
        for s, want in self._wanted.items():
            off += float(((self.tensors["out"][s, 0].double() - want) ** 2).sum())
            size += float((want**2).sum())
        return (off / size) ** 0.5

    def contiguous(self) -> tuple[Any, ...] | None:
        """Queries, keys and values [S, heads, tokens, D] of all sequences, where they are of one length; else None."""
        import torch

        if len(set(self.lengths.tolist())) > 1 or self.tensors["key_cache"].itemsize == 1:
            return None
        keys, values = zip(*(self.rows(s) for s in range(self.shape.S)), strict=True)
        kind = getattr(torch, self.shape.query_type)
        return (
            self.tensors["query"].transpose(1, 2),
            *(torch.stack([x.to(kind) for x in some]) for some in (keys, values)),
        )


def seconds(work: Callable[[], object], runs: int = RUNS) -> list[float]:
    """Of each of so many runs, each with cold caches, after two that are not timed.

    The second-level cache is filled by reading: had it been written to, what is timed would wait for that to be stored.
    """
    import torch

    flush = torch.zeros(CACHE_FLUSH // 4, device="cuda")
    return [event_seconds(flush.sum, work)[0] for _ in range(runs + 2)][2:]


def times(
    contenders: list[Contender], shapes: tuple[TimedShape, ...], layouts: tuple[str, ...], peers: bool
) -> Iterator[Row]:
    """A row for each shape, layout and contender."""
    import torch

    torch.zeros(1, device="cuda")  # its context is the one that is used here
    asked = itertools.product(contenders, shapes, layouts)
    _compile_all({(contender.kernel, contender.problem(shape, layout)) for contender, shape, layout in asked})
    for shape, layout in itertools.product(shapes, layouts):
        with DecodeCuda() as backend:
            given = OnDevice(shape, layout)
            for contender in contenders:
                yield _of_ours(contender, given, backend)
            if peers and layout == layouts[0] and (arrays := given.contiguous()):
                yield from _of_torch(arrays, given)
                del arrays
        del given
        torch.cuda.empty_cache()


def _row(given: OnDevice, contender: str, seconds: list[float], error: float | None = None) -> Row:
    figures = over_all(seconds) | {"bytes": given.bytes, "relative_l2": error}
    return Decoded(**_about(given, contender), layout=given.layout, **figures)


def _about(given: OnDevice, contender: str) -> dict[str, Any]:
    shape = given.shape
    return {
        "case": shape.name, "B": shape.S, "N": int(given.lengths.max()), "d": shape.D, "contender": contender,
    }  # fmt: skip


def _of_ours(contender: Contender, given: OnDevice, backend: DecodeCuda) -> Row:
    """What is found of a kernel: its seconds and its error, or why it was skipped."""
    import torch

    kernel, problem = contender.kernel, contender.problem(given.shape, given.layout)
    about = _about(given, contender.label)
    if reason := kernel.refuses(problem):
        return Skipped(**about, skipped=reason)
    workspace = torch.zeros(kernel.workspace(given.sizes, problem) + 16, dtype=torch.uint8, device="cuda")
    argument = given.argument(workspace.data_ptr())
    given.tensors["out"].fill_(float("nan"))
    try:
        launch = backend.launcher(decode.Build(kernel, problem), given.sizes)
        found = seconds(lambda: launch(argument))
    except FlashError as error:
        return Skipped(**about, skipped=str(error))
    off = None if kernel is CEILING else given.error()
    if off is not None and not off < WRONG[given.shape.query_type]:
        return Failure(**about, relative_l2=off, error="the answer is wrong")
    return _row(given, contender.label, found, off)


def _of_torch(arrays: tuple[Any, ...], given: OnDevice) -> Iterator[Row]:
    """PyTorch's attention on the same keys and values without pages: what paging costs is not in it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, keys, values = arrays
    ways = {"PyTorch cuDNN": SDPBackend.CUDNN_ATTENTION, "PyTorch flash": SDPBackend.FLASH_ATTENTION}
    for name, way in ways.items():

        def attend(way: Any = way) -> Any:
            with sdpa_kernel(way):
                return torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

        try:
            yield _row(given, name, seconds(attend))
        except RuntimeError as error:
            yield Skipped(**_about(given, name), skipped=str(error).splitlines()[0][:80])


def told(row: Row) -> str:
    start = f"{row.case:>20} {row.contender:14}"
    if isinstance(row, Skipped):
        return f"{start} skipped: {row.skipped}"
    if isinstance(row, Failure):
        return f"{start} {row.error}: relative L2 {row.relative_l2:.1e}"
    assert isinstance(row, Decoded)
    error = "" if row.relative_l2 is None else f", relative L2 {row.relative_l2:.1e}"
    rate = row.bytes / row.seconds
    figures = f"{row.seconds * 1e6:8.1f} us (least {row.min * 1e6:.1f}), {rate / 1e9:5.0f} GB/s"
    return f"{start} {row.layout:4} {figures}, {rate / READ_RATE:4.0%} of the memory's rate{error}"


@click.command()
@click.option(
    "--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="All by default; repeatable."
)
@click.option("--check-only", is_flag=True, help="Judge, but do not time.")
@click.option("--times-only", is_flag=True, help="Time, but do not judge.")
@click.option("--every", default=1, show_default=True, help="Judge on each so many-th case only.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=("hnd",), show_default=True)
@click.option("--shape", "chosen", multiple=True, help="Shapes whose names hold this text; all by default.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="PyTorch's attention on gathered pages, too.")
@click.option("--variant", "tried", multiple=True, metavar="KERNEL:FIELD=N/N,..", help="Time these instead of kernels.")
@as_json.json_option
def main(
    kernels: tuple[str, ...],
    check_only: bool,
    times_only: bool,
    every: int,
    layouts: tuple[str, ...],
    chosen: tuple[str, ...],
    peers: bool,
    tried: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Judge and time the kernels of paged decode on this machine's first GPU."""
    names = list(kernels or KERNELS)
    contenders = [Contender(CEILING), *itertools.chain.from_iterable(map(variants, tried or names))]
    wrong: list[str] = []
    aside = json_path == as_json.PRINT
    if not times_only:
        counted, void, wrong = check(names, every)
        click.echo(f"{counted} cases, {void} of them void, {len(names)} kernels: {len(wrong)} wrong", err=aside)
        for line in wrong[:40]:
            click.echo(f"  {line}", err=aside)
    rows: list[Row] = []
    if not check_only:
        shapes = tuple(shape for shape in SHAPES if not chosen or any(text in shape.name for text in chosen))
        for row in times(contenders, shapes, layouts, peers):
            rows.append(row)
            click.echo(told(row), err=True)
    if rows:
        scripts.publish("decode", machine.gpu_circumstances(), rows, json_path)
    if wrong:
        raise SystemExit(MISMATCH)


if __name__ == "__main__":
    scripts.run(main)
