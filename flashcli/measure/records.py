"""Records of measurements, and views of them: tables for a terminal, in Markdown, as CSV, in the documents."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from flashcli.files.outputs import write_whole
from flashcli.kernels.attention import KERNELS
from flashcli.measure import rows as kinds
from flashcli.measure.rows import (
    Decoded,
    Emulated,
    Failure,
    Forward,
    Generated,
    Gradients,
    Gridded,
    InPlace,
    PlainFiles,
    Profiled,
    Row,
    Rung,
    Scaled,
    Skipped,
    Timed,
    Trained,
    WholeCommand,
)
from flashcli.measure.targets import BACKWARD, grid_target_lines, target_lines
from flashcli.measure.tensors import Problem
from flashcli.terminal import tables

Kind = TypeVar("Kind", bound=Row)
Titled = Iterable[tuple[str, tables.Lines]]  # tables, each with its title


@dataclass
class Record:
    """What was measured, and under which circumstances."""

    circumstances: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] | None = None  # what `peers.ceilings` measured; None in records that have no such thing

    def written(self) -> dict[str, object]:
        """The record as it stands in its file."""
        ceilings = {} if self.ceilings is None else {"ceilings": self.ceilings}
        return {"circumstances": self.circumstances, **ceilings, "rows": [row.written() for row in self.rows]}


def read(text: str | bytes) -> Record:
    """A record from its file. ValueError if it is none."""
    found = json.loads(text)
    try:
        return Record(found["circumstances"], [kinds.read(row) for row in found["rows"]], found.get("ceilings"))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a record: {error!r}") from error


def of_kind(kind: type[Kind], rows: Iterable[Row]) -> list[Kind]:
    return [row for row in rows if isinstance(row, kind)]


def by_case(rows: Iterable[Kind]) -> dict[str, list[Kind]]:
    """The rows of each case, under its name."""
    cases: dict[str, list[Kind]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    return cases


def outcome(row: Row) -> str:
    """What came of a contender, in a word."""
    match row:
        case Failure():
            return row.error
        case Skipped():
            return f"skipped: {row.skipped}"
        case Timed():
            return f"{row.seconds * 1e3:.3f} ms"
        case Decoded():
            return f"{row.seconds * 1e6:.1f} us"
    return ""


def csv_text(rows: Sequence[Row]) -> str:
    written = [row.written() for row in rows]
    names = list(dict.fromkeys(name for row in written for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(written)
    return buffer.getvalue()


# ---- flashcli bench

CONTENDERS = ("case", "(B, N, d)", "contender", "median", "min to max", "TFLOP/s", "of floor", "relative L2", "max abs")
FP32_PEERS = ("PyTorch efficient", "PyTorch math", "Triton tf32x3", "Triton bf16x6")


def contender_lines(rows: Sequence[Row]) -> tables.Lines:
    return [CONTENDERS, *map(_contender, rows)]


def _contender(row: Row) -> list[str]:
    """Milliseconds, and the floor (by bytes or operations, the larger) over the median; or why there are none."""
    start = [*_case_cells(row), row.contender]
    if not isinstance(row, Timed):
        return [*start, outcome(row), *[""] * (len(CONTENDERS) - 4)]
    share = ""
    if row.floor_operations is not None:
        share = f"{100 * max(row.floor_bytes or 0, row.floor_operations) / row.seconds:.0f} %"
    low, median, high = (seconds * 1e3 for seconds in (row.min, row.seconds, row.max))
    return [
        *start, f"{median:.3f} ms", f"{low:.3f} to {high:.3f}", f"{row.tflops:.3g}", share,
        f"{row.relative_l2:.1e}", "" if row.max_abs is None else f"{row.max_abs:.1e}",
    ]  # fmt: skip


def _case_cells(row: Row) -> list[str]:
    return [row.case if row.is_named else "", str(row.shape)]


def fastest_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case the fastest of ours in fp32, and its fp32 peers in the same run: how many times slower they are."""
    peers = [name for name in FP32_PEERS if any(row.contender == name for row in rows)]
    lines = [["case", "(B, N, d)", "flashcli", "TFLOP/s", "relative L2", *peers]]
    for some in by_case(of_kind(Timed, rows)).values():
        timed = {row.contender: row for row in some}
        ours = min((timed[name] for name in KERNELS if name in timed), key=lambda row: row.seconds)
        theirs = (
            f"{_ms(timed[peer].seconds)} ms, {timed[peer].seconds / ours.seconds:.1f}x" if peer in timed else ""
            for peer in peers
        )
        own = [f"{ours.contender} {_ms(ours.seconds)} ms", f"{ours.tflops:.0f}", f"{ours.relative_l2:.1e}"]
        lines.append([*_case_cells(ours), *own, *theirs])
    return lines


# ---- flashcli bench --ladder

RUNGS = (
    "rung", "kernel", "min to max", "TFLOP/s", "over the one before", "over the first",
    "total", "input", "computing", "output",
)  # fmt: skip


def ladder_tables(rows: Sequence[Row]) -> Titled:
    """For each case: the kernel of each rung, how it compares with others on the case, the seconds of the command."""
    for some in by_case(rows).values():
        yield some[0].title, [RUNGS, *_rungs(some)]


def _rungs(rows: list[Row]) -> Iterator[list[str]]:
    """Neighbours that were skipped for the same reason share a line."""
    for remark, some in itertools.groupby(rows, key=lambda row: "" if isinstance(row, Rung) else outcome(row)):
        if remark:
            yield [", ".join(row.contender for row in some), remark, *[""] * (len(RUNGS) - 2)]
        else:
            yield from map(_rung, of_kind(Rung, some))


def _rung(row: Rung) -> list[str]:
    return [
        row.contender, f"{_ms(row.seconds)} ms", f"{_ms(row.min)} to {_ms(row.max)}", f"{row.tflops:.3g}",
        _times(row.over_previous), _times(row.over_first),
        *(f"{seconds:.3f} s" for seconds in (row.total, row.input, row.computation, row.output)),
    ]  # fmt: skip


def _times(factor: float | None) -> str:
    if factor is None:
        return ""
    return f"{factor:.0f}x" if factor >= 100 else f"{factor:.3g}x"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{3 if seconds < 0.1 else 0}f}"


# ---- flashcli profile

# The head of each column, and the text of its cell; a column that no row has anything for is left out.
PROFILE: dict[str, Callable[[Any], str]] = {
    "rung": lambda row: row.contender,
    "function": lambda row: row.function,
    "time": lambda row: f"{_ms(row.seconds)} ms",
    "occupancy (possible)": lambda row: f"{row.occupancy:.0f} % ({row.possible_occupancy:.0f} %)",
    "possible occupancy": lambda row: f"{row.possible_occupancy:.0f} %" if row.occupancy is None else "",
    "limited by": lambda row: row.limited_by or "",
    "SM efficiency": lambda row: f"{row.sm_efficiency:.0f} %",
    "tensor pipe": lambda row: f"{row.tensor_pipe:.0f} %",
    "shared load / store, GB/s": lambda row: f"{row.shared_load / 1e9:.0f} / {row.shared_store / 1e9:.0f}",
    "global load / store, GB/s": lambda row: f"{row.global_load / 1e9:.0f} / {row.global_store / 1e9:.0f}",
    "bank conflicts load / store": lambda row: f"{row.load_conflicts:.0f} / {row.store_conflicts:.0f}",
    "excess wavefronts": lambda row: f"{row.excess_wavefronts:.0f}",
    "registers": lambda row: f"{row.registers:.0f}",
    "spilled": lambda row: "" if row.spilled is None else f"{row.spilled} B",
    "local memory": lambda row: f"{row.local_bytes:.0f} B",
    "shared memory": lambda row: f"{row.shared / 1024:.1f} KiB",
}


def profile_tables(rows: Sequence[Row]) -> Titled:
    """For each case a line for each function of each rung."""
    for some in by_case(rows).values():
        lines = [_profile(row) for row in some]
        kept = [index for index in range(len(PROFILE)) if any(line[index] for line in lines)]
        yield some[0].title, [[line[index] for index in kept] for line in [list(PROFILE), *lines]]


def _profile(row: Row) -> list[str]:
    if isinstance(row, Profiled):
        return [_cell(row, text) for text in PROFILE.values()]
    return [row.contender, outcome(row), *[""] * (len(PROFILE) - 2)]


def _cell(row: Profiled, text: Callable[[Profiled], str]) -> str:
    try:
        return text(row)
    except TypeError:  # None, which has no format: it was not counted
        return ""


# ---- The scripts


def command_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case the median seconds of each whole command, and how the first compares with the last."""
    timed = of_kind(WholeCommand, rows)
    names = list(dict.fromkeys(row.contender for row in timed))
    ratio = f"{names[0]} over {names[-1]}"
    lines = [["case", "(B, N, d)", *(f"{name}, s" for name in names), ratio, "peak memory, MiB", "of the GPU's"]]
    for case, some in by_case(timed).items():
        by_name = {row.contender: row for row in some}
        first, last = by_name[names[0]], by_name.get(names[-1])
        spread = {name: f"{row.seconds:.2f} ({row.min:.2f} to {row.max:.2f})" for name, row in by_name.items()}
        lines.append([
            case, str(first.shape),
            *(spread.get(name, "") for name in names),
            f"{first.seconds / last.seconds:.2f}x" if last else "",
            " / ".join(f"{row.peak_mib:.0f}" for row in some),
            "" if first.device_mib is None else f"{first.device_mib:.0f}",
        ])  # fmt: skip
    return lines


def scaling_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each way to use several GPUs: the kernel on the slowest of them, the pipeline, the whole command, and how
    many times as fast each is as on one; and the rates of reading and writing, while that went on."""
    lines = [["(B, N, d)", "", "GPUs", "kernel, s", "pipeline, s", "command, s", "reads, GB/s", "writes, GB/s"]]
    for some in by_case(of_kind(PlainFiles, rows)).values():
        [one, *_] = of_kind(Scaled, some)
        for row in some:
            times = ["", "", ""]
            if isinstance(row, Scaled):
                pairs = ((row.busy, one.busy), (row.pipeline, one.pipeline), (row.seconds, one.seconds))
                times = [f"{seconds:.3f} ({alone / seconds:.2f}x)" for seconds, alone in pairs]
            rates = [f"{row.reads:.1f}", f"{row.writes:.1f}"]
            lines.append([str(row.shape), f"`{row.contender}`", str(row.count), *times, *rates])
    return lines


def decode_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each batch the microseconds of each contender, at the median; nothing for those that cannot compute it."""
    timed = [row for row in of_kind(Decoded, rows) if not row.clock]
    several = len({row.layout for row in timed}) > 1

    def name_of(row: Decoded) -> str:
        return f"{row.contender}, {row.layout}" if several else row.contender

    names = list(dict.fromkeys(map(name_of, timed)))
    lines = [["batch", "MB", *names]]
    for case, some in by_case(timed).items():
        cells = {name_of(row): f"{row.seconds * 1e6:.1f}" for row in some}
        megabytes = some[0].bytes / 1e6
        lines.append([case, f"{megabytes:.{0 if megabytes >= 10 else 2}f}", *(cells.get(name, "") for name in names)])
    return lines


def call_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each batch the microseconds of a call, at the median: on the host, and replayed; and over the last one's."""
    clocks = {"host": "a call on the host", "graph": "replayed in a graph"}
    lines = [["batch", "function", *clocks.values(), "of PyTorch's call"]]
    for case, some in by_case(row for row in of_kind(Decoded, rows) if row.clock).items():
        found = {(row.contender, row.clock): row.seconds for row in some}
        names = list(dict.fromkeys(row.contender for row in some))
        for name in names:
            cells = [f"{found[name, clock] * 1e6:.1f}" for clock in clocks]
            lines.append([case, name, *cells, f"{found[name, 'host'] / found[names[-1], 'host']:.2f}x"])
    return lines


def decode_text(rows: Sequence[Row]) -> str:
    """The times, and below them those of calls, if there are any."""
    called = call_lines(rows)
    more = f"\n{tables.markdown(called)}" if len(called) > 1 else ""
    return tables.markdown(decode_lines(rows)) + more


# ---- On tensors

IN_PLACE = (
    "case", "(B, H, N, d)", "layout", "timed", "contender", "median", "min to max", "relative L2", "of the first"
)  # fmt: skip


def in_place_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case its contenders, and how many times as long as the first each of them takes."""
    lines = [list(IN_PLACE)]
    for some in by_case(rows).values():
        timed = of_kind(InPlace, some)
        for row in some:
            if isinstance(row, InPlace):
                lines.append([*_in_place(row), f"{row.seconds / timed[0].seconds:.2f}x"])
            else:
                lines.append([row.case, "", "", "", row.contender, outcome(row), *[""] * 3])
    return lines


def _in_place(row: InPlace) -> list[str]:
    problem = Problem(row.B, row.H, row.Hkv, row.M, row.N, row.d)
    factor, unit = (1e6, "us") if row.seconds < 1e-4 else (1e3, "ms")
    low, median, high = (seconds * factor for seconds in (row.min, row.seconds, row.max))
    spread = f"{low:.4g} to {high:.4g}"
    return [
        row.case, str(problem), row.layout, row.clock, row.contender, f"{median:.4g} {unit}", spread,
        f"{row.relative_l2:.1e}",
    ]  # fmt: skip


def arrays_text(rows: Sequence[Row]) -> str:
    """What is wanted and measured, and below it all that was measured."""
    return f"{tables.markdown(target_lines(of_kind(InPlace, rows)))}\n{tables.markdown(in_place_lines(rows))}"


# ---- The grid


class Against(NamedTuple):
    """Our choice on a shape of the grid, the best of our kernels, and the best of the peers, if there are any."""

    ours: Gridded
    best: Gridded
    peer: Gridded | None
    replayed_peer: Gridded | None  # the best of them in a CUDA graph

    @property
    def faster(self) -> float | None:
        """How many times as fast as the best peer ours is, in single calls."""
        return self.peer.seconds / self.ours.seconds if self.peer else None

    @property
    def faster_replayed(self) -> float | None:
        if self.replayed_peer is None or self.replayed_peer.replayed is None or self.ours.replayed is None:
            return None
        return self.replayed_peer.replayed / self.ours.replayed

    @property
    def share(self) -> float:
        """The floor over our time."""
        return self.ours.floor / self.ours.seconds

    @property
    def share_replayed(self) -> float | None:
        return self.ours.floor / self.ours.replayed if self.ours.replayed else None

    @property
    def operations(self) -> float:
        return self.ours.tflops * self.ours.seconds * 1e12


def against_peers(rows: Iterable[Row]) -> list[Against]:
    """The shapes of the grid on which our choice was timed."""
    found = []
    for some in by_case(of_kind(Gridded, rows)).values():
        ours = [row for row in some if row.contender in KERNELS]
        peers = [row for row in some if row.contender not in KERNELS]
        if chosen := next((row for row in ours if row.chosen), None):
            best, peer = (min(them, key=lambda row: row.seconds, default=None) for them in (ours, peers))
            replayed = min((row for row in peers if row.replayed), key=lambda row: row.replayed or 0, default=None)
            found.append(Against(chosen, best or chosen, peer, replayed))
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


GRID = (
    "(B, N, d)", "kernel", "ms", "of floor", "best peer", "ms", "ours is faster", "in a graph, ms", "peer, ms",
    "ours is faster", "best of ours",
)  # fmt: skip


def grid_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each shape our choice and the best peer, in single calls and in a CUDA graph; the best of ours, if another.

    The last line has geometric means.
    """
    lines, shapes = [list(GRID)], against_peers(rows)
    for one in shapes:
        ours, peer = one.ours, one.peer
        cells = [ours.case, ours.contender, _ms(ours.seconds), f"{100 * one.share:.0f} %"]
        cells += [peer.contender, _ms(peer.seconds), _times(one.faster)] if peer else [""] * 3
        cells += ["" if ours.replayed is None else _ms(ours.replayed)]
        cells += [
            "" if one.replayed_peer is None else _ms(one.replayed_peer.replayed or 0),
            _times(one.faster_replayed),
        ]
        best = "" if one.best is ours else f"{one.best.contender}, {ours.seconds / one.best.seconds:.2f}x"
        lines.append([*cells, best])
    means = [_times(_mean([one.faster for one in shapes])), _times(_mean([one.faster_replayed for one in shapes]))]
    if any(means):
        lines.append(["geometric mean", *[""] * 5, means[0], "", "", means[1], ""])
    return lines


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known else None


def grid_text(rows: Sequence[Row]) -> str:
    """What is wanted and measured, and below it the whole grid."""
    return f"{tables.markdown(grid_target_lines(of_kind(Gridded, rows)))}\n{tables.markdown(grid_lines(rows))}"


def rounding_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each kind of arithmetic its error on each shape."""
    by_shape = by_case(of_kind(Emulated, rows))
    errors = {case: {row.contender: f"{row.relative_l2:.1e}" for row in some} for case, some in by_shape.items()}
    names = list(dict.fromkeys(row.contender for row in rows))
    return [["", *errors], *([name, *(some.get(name, "") for some in errors.values())] for name in names)]


# ---- Gradients

BACKWARD_ERRORS = "relative L2 of dQ, dK, dV"


def backward_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case what is wanted, our own choice of a kernel and how right it is, and all others: milliseconds, and
    how many times as long as ours they take."""
    timed = of_kind(Gradients, rows)
    others = [name for name in dict.fromkeys(row.contender for row in timed) if name != "flashcli"]
    wanted = {str(target.problem): target.most for target in BACKWARD}
    lines = [["(B, H, N, d)", "wanted, ms", "flashcli, ms", "TFLOP/s", BACKWARD_ERRORS, *(f"{x}, ms" for x in others)]]
    for some in by_case(timed).values():
        by_name = {row.contender: row for row in some}
        if "flashcli" not in by_name:
            continue
        own = by_name["flashcli"]
        problem = str(Problem(own.B, own.H, own.Hkv, own.M, own.N, own.d))
        errors = ", ".join(f"{error:.1e}" for error in (own.dq, own.dk, own.dv))
        lines.append([
            problem + (" causal" if own.causal else ""),
            f"{wanted[problem] * 1e3:.3g}" if problem in wanted else "",
            _ms(own.seconds), f"{own.tflops:.0f}", errors, *(_beside(by_name.get(name), own) for name in others),
        ])  # fmt: skip
    return lines


def _beside(row: Gradients | None, own: Gradients) -> str:
    return "" if row is None else f"{_ms(row.seconds)}, {row.seconds / own.seconds:.1f}x"


def training_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each attention the time of a step, some losses, and a hash of the weights at the end."""
    timed = of_kind(Trained, rows)
    steps = [1, 10, 50, 100, 200, 500, 1000]
    steps = [step for step in steps if timed and step <= len(timed[0].losses)]
    lines = [["attention", "median of a step", "min to max", *(f"loss {step}" for step in steps), "weights"]]
    for row in timed:
        times = [f"{_ms(row.seconds)} ms", f"{_ms(row.min)} to {_ms(row.max)}"]
        lines.append([row.contender, *times, *(f"{row.losses[step - 1]:.6f}" for step in steps), row.weights])
    return lines


# ---- Models


def gpt2_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each way to keep keys and values, with a cache or without, seconds for all tokens by each attention."""
    lines = [["", "attention", "seconds", "min to max", "over naive", "memory, MiB", "tokens"]]
    for some in by_case(rows).values():
        naive = next((row.seconds for row in of_kind(Generated, some) if row.contender == "naive"), None)
        for row in some:
            if not isinstance(row, Generated):
                lines.append([row.case, row.contender, outcome(row), *[""] * 4])
                continue
            memory = "" if row.peak_mib is None else f"{row.peak_mib:.1f}"
            faster = f"{naive / row.seconds:.2f}x" if naive else ""
            spread = f"{row.min:.3f} to {row.max:.3f}"
            lines.append([row.case, row.contender, f"{row.seconds:.3f}", spread, faster, memory, _same(row)])
    return lines


def _same(row: Generated) -> str:
    if row.differs_at is None:
        return f"the same {row.N}"
    return f"another at {row.differs_at}, logit {row.gap:+.1e}"


def model_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each model and kind of attention the error and the time of a pass, and how many times as fast ours is."""
    lines = [["model", "(B, H, N, d)", "attention", "relative L2", "median", "min to max", "ours is faster"]]
    for case, some in by_case(rows).items():
        ours = next((row.seconds for row in of_kind(Forward, some) if row.contender == "flashcli"), None)
        for row in some:
            if not isinstance(row, Forward):
                lines.append([case, "", row.contender, outcome(row), *[""] * 3])
                continue
            problem = Problem(row.B, row.H, row.Hkv, row.N, row.N, row.d)
            times = [f"{_ms(row.seconds)} ms", f"{_ms(row.min)} to {_ms(row.max)}"]
            faster = f"{row.seconds / ours:.2f}x" if ours and row.contender != "flashcli" else ""
            start = [case, str(problem), row.contender, f"{row.relative_l2:.1e}"]
            lines.append([*start, *times, faster])
    return lines


# ---- In the documents


def texts(titled: Titled) -> str:
    """Several tables for a terminal."""
    return "\n\n".join(f"{title}\n{tables.text(lines)}" for title, lines in titled)


def markdowns(titled: Titled) -> str:
    """The same in Markdown."""
    return "\n".join(f"**{title}**\n\n{tables.markdown(lines)}" for title, lines in titled)


def circumstances_text(circumstances: dict[str, object]) -> str:
    """Under which circumstances a record was made, in one line."""
    wordings = {
        "gpu": "{}", "driver": "driver {}", "cpu": "{}", "threads": "{} threads", "blas": "{}", "date": "{}",
        "commit": "commit {}", "command": "`{}`",
    }  # fmt: skip
    return ", ".join(wording.format(circumstances[name]) for name, wording in wordings.items() if name in circumstances)


VIEWS: dict[str, Callable[[Sequence[Row]], str]] = {
    "headline": lambda rows: tables.markdown(fastest_lines(rows)),
    "table": lambda rows: tables.markdown(contender_lines(rows)),
    "end_to_end": lambda rows: tables.markdown(command_lines(rows)),
    "ladder": lambda rows: markdowns(ladder_tables(rows)),
    "profile": lambda rows: markdowns(profile_tables(rows)),
    "scaling": lambda rows: tables.markdown(scaling_lines(rows)),
    "decode": decode_text,
    "arrays": arrays_text,
    "grid": grid_text,
    "roundings": lambda rows: tables.markdown(rounding_lines(rows)),
    "backward": lambda rows: tables.markdown(backward_lines(rows)),
    "training": lambda rows: tables.markdown(training_lines(rows)),
    "gpt2": lambda rows: tables.markdown(gpt2_lines(rows)),
    "models": lambda rows: tables.markdown(model_lines(rows)),
}
BLOCK = re.compile(r"(<!-- (\w+): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a Markdown document with each block between ``<!-- VIEW: RECORD -->`` and ``<!-- end -->`` made anew.

    VIEW is a name in `VIEWS`, RECORD the path of a record, relative to the document. Where that is not there, the block
    stays as it is.
    """

    def view(match: re.Match) -> str:
        path = document.parent / match[3]
        if not path.exists():
            return match[0]
        record = read(path.read_bytes())
        return f"{match[1]}{VIEWS[match[2]](record.rows)}\n{circumstances_text(record.circumstances)}\n{match[4]}"

    return BLOCK.sub(view, document.read_text())


@click.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(documents: tuple[Path, ...]) -> None:
    """Bring the tables in DOCUMENTS, Markdown, up to date with their records."""
    for document in documents:
        write_whole(document, refreshed(document))


if __name__ == "__main__":
    main()  # not by `flashcli.measure.scripts`, which needs this module
