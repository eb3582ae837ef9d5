"""Tables of records, in Markdown: a view for each script, and for each command whose record is shown in a document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bench.case_study import STEPS
from bench.rows import (
    Called,
    Compiled,
    Emulated,
    FirstCall,
    Forward,
    Generated,
    Gridded,
    Judged,
    PlainFiles,
    Ragged,
    Scaled,
    Trained,
    WholeCommand,
)
from bench.targets import BACKWARD, grid_target_lines, target_lines
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.registry import OPERATIONS
from flashcli.measure.records import (
    by_case,
    case_cells,
    contender_tables,
    decode_tables,
    ladder_tables,
    markdowns,
    ms,
    of_kind,
    outcome,
    profile_tables,
    rule_tables,
    streams_tables,
    tiles_tables,
    times,
)
from flashcli.measure.rows import Decoded, Gradients, InPlace, Row, Timed
from flashcli.measure.tensors import Problem
from flashcli.terminal import tables

FP32_PEERS = ("PyTorch efficient", "PyTorch math", "Triton tf32x3", "Triton bf16x6")


def fastest_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case the fastest of ours in fp32, and its fp32 peers in the same run: how many times slower they are."""
    peers = [name for name in FP32_PEERS if any(row.contender == name for row in rows)]
    lines = [["case", "(B, N, d)", "flashcli", "TFLOP/s", "relative L2", *peers]]
    for some in by_case(of_kind(Timed, rows)).values():
        timed = {row.contender: row for row in some}
        ours = min((timed[name] for name in KERNELS if name in timed), key=lambda row: row.seconds)
        theirs = (
            f"{ms(timed[peer].seconds)} ms, {timed[peer].seconds / ours.seconds:.1f}x" if peer in timed else ""
            for peer in peers
        )
        own = [f"{ours.contender} {ms(ours.seconds)} ms", f"{ours.tflops:.0f}", f"{ours.relative_l2:.1e}"]
        lines.append([*case_cells(ours), *own, *theirs])
    return lines


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
    """For each way to use several GPUs: seconds of the slowest kernel, of the pipeline and of the whole command, with
    speed-ups over one GPU. The rates of plain reading and writing meanwhile are beside them."""
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


def call_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each batch the microseconds of a call, at the median: on the host, and replayed; and over the last one's."""
    clocks = {"host": "a call on the host", "graph": "replayed in a graph"}
    lines = [["batch", "function", *clocks.values(), "of PyTorch's call"]]
    for case, some in by_case(of_kind(Called, rows)).items():
        found = {(row.contender, row.clock): row.seconds for row in some}
        names = list(dict.fromkeys(row.contender for row in some))
        for name in names:
            cells = [f"{found[name, clock] * 1e6:.1f}" for clock in clocks]
            lines.append([case, name, *cells, f"{found[name, 'host'] / found[names[-1], 'host']:.2f}x"])
    return lines


def judged_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each pair of types and each kernel: how many cases, and its largest error as a share of what is allowed."""
    judged = of_kind(Judged, rows)
    names = list(dict.fromkeys(row.contender for row in judged))
    lines = [["query, cache", *names]]
    for types, some in by_case(judged).items():
        cells = {
            row.contender: f"{row.cases}: {row.share:.2f}" + f", {row.wrong} wrong" * (row.wrong > 0) for row in some
        }
        lines.append([types, *(cells.get(name, "") for name in names)])
    return lines


def decode_text(rows: Sequence[Row]) -> str:
    """The times, those of calls, and what was judged, as far as there are any."""
    found = [call_lines(rows), judged_lines(rows)]
    timed = markdowns(decode_tables(rows)) if any(isinstance(row, Decoded) for row in rows) else ""
    return "\n".join(filter(None, [timed, *(tables.markdown(lines) for lines in found if len(lines) > 1)]))


def ragged_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each batch the microseconds of each contender at the median, and the rate of the call of ours."""
    timed = of_kind(Decoded, rows)
    names = list(dict.fromkeys(row.contender for row in timed))
    lines = [["batch", "MB", "GFLOP", *names, "TFLOP/s of flashcli"]]
    for case, some in by_case(timed).items():
        cells = {row.contender: f"{row.seconds * 1e6:.1f}" for row in some}
        called = next((row for row in of_kind(Ragged, some) if row.contender == "flashcli"), None)
        work, rate = ("", "")
        if called:
            work, rate = f"{called.operations / 1e9:.1f}", f"{called.operations / called.seconds / 1e12:.0f}"
        lines.append([case, f"{some[0].bytes / 1e6:.0f}", work, *(cells.get(name, "") for name in names), rate])
    return lines


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


def halves_lines(rows: Sequence[Row]) -> tables.Lines:
    """Each contender's time for a case, and how many times as fast as the first it is, which takes float32."""
    lines = [["(B, H, N, d)", "contender", "median", "min to max", "TFLOP/s", "of the first's speed", "relative L2"]]
    for case, some in by_case(of_kind(Timed, rows)).items():
        first, *_ = some
        for row in some:
            measured = f"{ms(row.seconds)} ms", f"{ms(row.min)} to {ms(row.max)}", f"{row.tflops:.0f}"
            lines.append([case, row.contender, *measured, times(first.seconds / row.seconds), f"{row.relative_l2:.1e}"])
    return lines


def arrays_text(rows: Sequence[Row]) -> str:
    """The targets and what was measured of them, and below that all that was measured."""
    return f"{tables.markdown(target_lines(of_kind(InPlace, rows)))}\n{tables.markdown(in_place_lines(rows))}"


class Against(NamedTuple):
    """Our choice on a shape of the grid, the best of our kernels, and the best of the peers, if there are any."""

    ours: Gridded
    best: Gridded
    peer: Gridded | None
    replayed_peer: Gridded | None  # the best of them in a CUDA graph

    @property
    def faster(self) -> float | None:
        """Our speed-up over the best peer, in single calls; None without a peer."""
        return self.peer.seconds / self.ours.seconds if self.peer else None

    @property
    def faster_replayed(self) -> float | None:
        if self.replayed_peer is None or self.replayed_peer.replayed is None or self.ours.replayed is None:
            return None
        return self.replayed_peer.replayed / self.ours.replayed

    @property
    def share(self) -> float:
        """The floor's time as a share of ours."""
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
        cells = [ours.case, ours.contender, ms(ours.seconds), f"{100 * one.share:.0f} %"]
        cells += [peer.contender, ms(peer.seconds), times(one.faster)] if peer else [""] * 3
        cells += ["" if ours.replayed is None else ms(ours.replayed)]
        cells += [
            "" if one.replayed_peer is None else ms(one.replayed_peer.replayed or 0),
            times(one.faster_replayed),
        ]
        best = "" if one.best is ours else f"{one.best.contender}, {ours.seconds / one.best.seconds:.2f}x"
        lines.append([*cells, best])
    means = [times(_mean([one.faster for one in shapes])), times(_mean([one.faster_replayed for one in shapes]))]
    if any(means):
        lines.append(["geometric mean", *[""] * 5, means[0], "", "", means[1], ""])
    return lines


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return geometric_mean(known) if known else None


def grid_text(rows: Sequence[Row]) -> str:
    """The targets and what was measured of them, and below that the whole grid."""
    return f"{tables.markdown(grid_target_lines(of_kind(Gridded, rows)))}\n{tables.markdown(grid_lines(rows))}"


def rounding_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each kind of arithmetic its error on each shape."""
    by_shape = by_case(of_kind(Emulated, rows))
    errors = {case: {row.contender: f"{row.relative_l2:.1e}" for row in some} for case, some in by_shape.items()}
    names = list(dict.fromkeys(row.contender for row in rows))
    return [["", *errors], *([name, *(some.get(name, "") for some in errors.values())] for name in names)]


def compiled_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each kernel and architecture registers, KiB of shared memory, and bytes spilled; chosen ones are bold."""
    some = of_kind(Compiled, rows)
    archs = list(dict.fromkeys(row.arch for row in some))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in some:
        text = f"{row.registers}, {row.shared / 1024:.0f}" + (f", {row.spilled} B" if row.spilled else "")
        cells.setdefault((row.case, row.contender), {})[row.arch] = f"**{text}**" if row.chosen else text
    ladder = [(one.name, kernel) for one in OPERATIONS.values() for kernel in one.kernels]
    lines = [[*each, *(cells[each].get(arch, "") for arch in archs)] for each in ladder if each in cells]
    return [["operation", "kernel", *archs], *lines]


def first_call_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each head size and state of the cache the seconds of the first call of each operation, masked or not."""
    lines: dict[tuple[int, str], dict[str, str]] = {}
    for row in of_kind(FirstCall, rows):
        called = f"{row.case}, causal" if row.causal else row.case
        lines.setdefault((row.d, row.contender), {})[called] = f"{row.seconds:.2f} s"
    names = list(dict.fromkeys(name for own in lines.values() for name in own))
    cells = ([str(d), state, *(own.get(name, "") for name in names)] for (d, state), own in sorted(lines.items()))
    return [["d", "", *names], *cells]


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
            ms(own.seconds), f"{own.tflops:.0f}", errors, *(_beside(by_name.get(name), own) for name in others),
        ])  # fmt: skip
    return lines


def _beside(row: Gradients | None, own: Gradients) -> str:
    return "" if row is None else f"{ms(row.seconds)}, {row.seconds / own.seconds:.1f}x"


def science_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each case and contender forward and gradients: milliseconds, and how many times as long as ours they take."""
    lines = [
        ["case", "(B, H, N, d)", "what", "contender", "median, ms", "min to max", "TFLOP/s", "relative L2", "of ours"]
    ]
    for some in by_case(of_kind(InPlace, rows)).values():
        for what, kind in (("forward", InPlace), ("gradients", Gradients)):
            timed = [row for row in some if type(row) is kind]
            for row in timed:
                lines.append([
                    row.case, str(Problem(row.B, row.H, row.Hkv, row.M, row.N, row.d)), what, row.contender,
                    ms(row.seconds), f"{ms(row.min)} to {ms(row.max)}", f"{row.tflops:.0f}", f"{row.relative_l2:.1e}",
                    f"{row.seconds / timed[0].seconds:.2f}x",
                ])  # fmt: skip
    return lines


def training_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each attention the time of a step, some losses, and a hash of the weights at the end."""
    timed = of_kind(Trained, rows)
    steps = [1, 10, 50, 100, 200, 500, 1000]
    steps = [step for step in steps if timed and step <= len(timed[0].losses)]
    lines = [["attention", "median of a step", "min to max", *(f"loss {step}" for step in steps), "weights"]]
    for row in timed:
        times = [f"{ms(row.seconds)} ms", f"{ms(row.min)} to {ms(row.max)}"]
        lines.append([row.contender, *times, *(f"{row.losses[step - 1]:.6f}" for step in steps), row.weights])
    return lines


def gpt2_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each way to keep keys and values, with a cache or without, seconds for all tokens by each attention."""
    lines = [["", "attention", "seconds", "min to max", "over naive", "tokens/s", "memory, MiB", "tokens"]]
    for some in by_case(rows).values():
        naive = next((row.seconds for row in of_kind(Generated, some) if row.contender == "naive"), None)
        for row in some:
            if not isinstance(row, Generated):
                lines.append([row.case, row.contender, outcome(row), *[""] * 5])
                continue
            memory = "" if row.peak_mib is None else f"{row.peak_mib:.1f}"
            faster = f"{naive / row.seconds:.2f}x" if naive else ""
            spread = f"{row.min:.3f} to {row.max:.3f}"
            rate = f"{row.B * row.N / row.seconds:.0f}"
            lines.append([row.case, row.contender, f"{row.seconds:.3f}", spread, faster, rate, memory, _same(row)])
    return lines


def _same(row: Generated) -> str:
    if row.differs_at is None:
        return f"the same {row.N}"
    return f"another at {row.differs_at}, logit {row.gap:+.1e}"


def step_lines(rows: Sequence[Row]) -> tables.Lines:
    """For each of `STEPS` its change, the rungs that have it, and in each case its time and gain over the one before.

    Other contenders follow, and what had no right answer.
    """
    cases, steps = by_case(rows), {step.name: [step.change, step.rungs] for step in STEPS}
    lines = [["step", "change", "rungs that have it", *(x for case in cases for x in (f"{case}, ms", "gain"))]]
    before: dict[str, float] = {}
    for name in dict.fromkeys(row.contender for row in rows):
        cells = []
        for case, some in cases.items():
            row = next(row for row in some if row.contender == name)
            cells += [ms(row.seconds) if isinstance(row, InPlace) else outcome(row), ""]
            if name in steps and isinstance(row, InPlace):
                cells[-1] = times(before[case] / row.seconds) if case in before else ""
                before[case] = row.seconds
        lines.append([name, *steps.get(name, ["", ""]), *cells])
    return lines


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
            times = [f"{ms(row.seconds)} ms", f"{ms(row.min)} to {ms(row.max)}"]
            faster = f"{row.seconds / ours:.2f}x" if ours and row.contender != "flashcli" else ""
            start = [case, str(problem), row.contender, f"{row.relative_l2:.1e}"]
            lines.append([*start, *times, faster])
    return lines


VIEWS: dict[str, Callable[[Sequence[Row]], str]] = {
    "headline": lambda rows: tables.markdown(fastest_lines(rows)),
    "table": lambda rows: markdowns(contender_tables(rows)),
    "end_to_end": lambda rows: tables.markdown(command_lines(rows)),
    "ladder": lambda rows: markdowns(ladder_tables(rows)),
    "profile": lambda rows: markdowns(profile_tables(rows)),
    "tiles": lambda rows: markdowns(tiles_tables(rows)),
    "scaling": lambda rows: tables.markdown(scaling_lines(rows)),
    "decode": decode_text,
    "ragged": lambda rows: tables.markdown(ragged_lines(rows)),
    "rule": lambda rows: markdowns(rule_tables(rows)),
    "arrays": arrays_text,
    "halves": lambda rows: tables.markdown(halves_lines(rows)),
    "grid": grid_text,
    "first_calls": lambda rows: tables.markdown(first_call_lines(rows)),
    "compile_all": lambda rows: tables.markdown(compiled_lines(rows)),
    "roundings": lambda rows: tables.markdown(rounding_lines(rows)),
    "backward": lambda rows: tables.markdown(backward_lines(rows)),
    "streams": lambda rows: markdowns(streams_tables(rows)),
    "packed": lambda rows: tables.markdown(science_lines(rows)),
    "science": lambda rows: tables.markdown(science_lines(rows)),
    "second": lambda rows: tables.markdown(science_lines(rows)),
    "training": lambda rows: tables.markdown(training_lines(rows)),
    "pairs": lambda rows: tables.markdown(training_lines(rows)),
    "gpt2": lambda rows: tables.markdown(gpt2_lines(rows)),
    "steps": lambda rows: tables.markdown(step_lines(rows)),
    "models": lambda rows: tables.markdown(model_lines(rows)),
}
