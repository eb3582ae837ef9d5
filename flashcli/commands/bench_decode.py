"""`flashcli bench --decode`: what goes with it, and what is timed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flashcli.asked.decode import LAYOUTS
from flashcli.commands.decode_options import What
from flashcli.kernels.decode import CEILING, DEFAULTS, KERNELS
from flashcli.terminal import parameters

if TYPE_CHECKING:
    from flashcli.asked.decode import Decode
    from flashcli.measure.decode_shapes import TimedShape
    from flashcli.measure.records import Record
    from flashcli.measure.rows import Row

OF_ATTENTION = ("--case", "--shape", "--precision", "--causal", "--heads", "--kv-heads", "--queries")
OF_SHAPES = ("--lengths", "--page", "--type", "--fp8")
ON_GPUS = ("--kernel", "--ladder", "--against")
ON_CPU = "1x4096 32/8"  # of the record's shapes: the others take long there


class Asked(NamedTuple):
    """The options of that name."""

    what: What
    layout: str
    kernels: tuple[str, ...]
    ladder: bool
    against: tuple[str, ...]
    runs: int
    seed: int
    threads: int | None

    @property
    def path(self) -> str:
        """The name of a file; empty for shapes."""
        return self.what.what if isinstance(self.what.what, str) else ""


def check_options(given: set[str], asked: Asked, backend: str) -> None:
    """Refuse what has no meaning with --decode, or with what else is asked for."""
    from flashcli.errors import UsageError

    for name in sorted(given.intersection(OF_ATTENTION)):
        raise UsageError(f"{name} has no meaning with --decode.", f"leave out {name}, or --decode.")
    for name in sorted(given.intersection(OF_SHAPES)) if isinstance(asked.what.what, str) else ():
        raise UsageError(f"{name} goes with a shape.", "name one: --decode S,H,Hkv,D.")
    if "--layout" in given and (asked.path or asked.layout not in LAYOUTS):
        hint = "leave it out: the file says it." if asked.path else f"choose one of {', '.join(LAYOUTS)}."
        raise UsageError(f"--layout {asked.layout} has no meaning here.", hint)
    for name in sorted({*asked.kernels} - {*KERNELS, parameters.ALL}):
        raise UsageError(f"kernel {name} is none of paged decode.", f"choose one of {', '.join(KERNELS)}.")
    if "triton" in asked.against:
        raise UsageError("Triton has no kernel of paged decode here.", "leave out --against triton.")
    if "--plot" in given and not asked.ladder:
        raise UsageError("--plot draws the ladder.", "add --ladder.")
    for name in sorted(given.intersection(ON_GPUS) if backend == "cpu" else given & {"--threads"}):
        of = "GPUs, not for the cpu backend" if backend == "cpu" else "the cpu backend"
        raise UsageError(f"{name} is for {of}.", f"leave out {name}, or change --backend.")


def on_gpu(record: Record, asked: Asked) -> Iterator[Row]:
    """The floor, the kernels, and PyTorch's attention if that is wanted."""
    from flashcli.measure import machine, peers
    from flashcli.measure.decode_times import Contender, times, times_of

    peers.check_installed("torch", gpu=True)
    record.circumstances |= machine.gpu_circumstances()
    everything = parameters.ALL in asked.kernels or (asked.ladder and not asked.kernels)
    names = [name for name in KERNELS if everything or name in (asked.kernels or DEFAULTS)]
    contenders = [Contender(CEILING), *(Contender(KERNELS[name]) for name in names)]
    if asked.path:
        from flashcli.measure.decode_arrays import Given

        return times_of(Given(*_file(asked.path)), contenders, bool(asked.against), asked.runs)
    return times(contenders, _shapes(asked.what), [asked.layout], bool(asked.against), asked.runs, asked.seed)


def on_cpu(record: Record, asked: Asked) -> Iterator[Row]:
    """The CPU backend."""
    from flashcli.cpu.cores import usable_cores
    from flashcli.files.decode.cases import Case, make
    from flashcli.measure import machine
    from flashcli.measure.decode_times import on_cpu as timed

    threads = asked.threads or len(usable_cores())
    record.circumstances |= machine.cpu_circumstances(threads)
    if asked.path:
        yield timed(*_file(asked.path), threads, asked.runs)
        return
    for shape in _shapes(asked.what):
        if asked.what.what or shape.name == ON_CPU:
            case = Case(
                *shape[1:6], page=shape.page, layout=asked.layout, query_type=shape.query_type,
                cache_type=shape.cache_type, seed=asked.seed,
            )  # fmt: skip
            yield timed(shape.name, make(case), threads, asked.runs)


def _file(path: str) -> tuple[str, Decode]:
    from flashcli.files.decode.tensors import read_decode

    return os.path.basename(path), read_decode(path)[0]


def _shapes(what: What) -> tuple[TimedShape, ...]:
    from flashcli.measure.decode_shapes import SHAPES, TimedShape

    if isinstance(what.what, str):
        return SHAPES
    S, H, Hkv, D = what.what
    name = f"{S}x({what.lengths}) {H}/{Hkv} D={D}"
    return (TimedShape(name, S, H, Hkv, D, what.lengths, what.query_type, what.cache_type, what.page),)
