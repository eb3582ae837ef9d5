"""The ladder: every rung on the report's cases, its kernel and its whole command timed, beside the rung before it.

Whole commands are ``flashcli run --serial`` in processes of their own, so that input, computing and output are phases
one after another, as in the report's tables. A rung that would take too long is skipped, and its row says why.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flashcli.asked.shape import Shape, tflops
from flashcli.compiler import compiler
from flashcli.errors import FlashError
from flashcli.files.fileformat import create_input
from flashcli.kernels.attention import KERNELS
from flashcli.measure import bench, peers, race
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Failure, Row, Rung, Skipped
from flashcli.run.report import PHASES

EVERYWHERE_FROM = "split_q"  # the report times the rungs below it on the first of its cases only
SLOWEST = 10.0  # seconds that one run of a kernel may take
COMMAND_LIMIT = 60.0  # seconds that one whole command may take
RUNS_LIMIT = 0.5  # seconds that all runs of a kernel may take together, unless it is slow: then there are FEWEST
FEWEST = 3
ALIKE = 1.1  # whole commands run twice, and once more if the slower took longer than the other by this factor


def ladder(
    shapes: dict[str, Shape],
    names: list[str],
    conditions: Conditions,
    capability: tuple[int, int] | None,
    everywhere: bool,
) -> Iterator[Row]:
    """A row for each case and rung.

    ``capability`` is the GPU's, or None where all rungs named run on the host. ``everywhere`` has every rung climb
    every case; without it those below `EVERYWHERE_FROM` have the first only.
    """
    rates: dict[str, float] = {}  # TFLOP/s of each rung on the case before
    for number, (case, shape) in enumerate(shapes.items()):
        reasons = {
            name: _does_not_run(name, capability)
            or ("" if everywhere or number == 0 else _not_in_the_report(name, next(iter(shapes))))
            or _too_slow(rates.get(name), shape, conditions.causal)
            for name in names
        }
        with tempfile.TemporaryDirectory(prefix="flashcli-") as folder:
            given = Path(folder) / "in"
            inputs = [] if all(reasons.values()) else _inputs(given, shape, conditions.seed)
            for name in names:
                about = Row.about(case, shape, name, conditions.causal)
                if reasons[name]:
                    yield Skipped(**vars(about), skipped=reasons[name])
                    continue
                row = climb(about, given, inputs, conditions)
                if isinstance(row, Rung):
                    rates[name] = row.tflops
                yield row
                peers.release()


def _does_not_run(name: str, capability: tuple[int, int] | None) -> str:
    kernel = KERNELS[name]
    if kernel.on_host or (capability is not None and kernel.runs_on(capability)):
        return ""
    return f"it needs {compiler.architecture(kernel.needs)}"


def _not_in_the_report(name: str, case: str) -> str:
    order = list(KERNELS)
    return f"as in the report, on {case} only" if order.index(name) < order.index(EVERYWHERE_FROM) else ""


def _too_slow(rate: float | None, shape: Shape, causal: bool) -> str:
    """Say why a rung is too slow for a case, by its ``rate`` on an earlier one, in TFLOP/s; empty if it is not."""
    seconds = tflops(**vars(shape), seconds=1.0, causal=causal) / rate if rate else 0.0
    return f"a run would take some {seconds:.0f} s, at its rate before" if seconds > SLOWEST else ""


def _inputs(path: Path, shape: Shape, seed: int) -> list[np.ndarray]:
    """Inputs that kernels take turns at, and the first as a file, which is in the page cache from then on."""
    inputs = bench.inputs_for(shape, seed)
    with create_input(path, shape) as file:
        file.write(shape.whole(range(shape.B)), inputs[0])
        file.commit()
    return inputs


def climb(about: Row, given: Path, inputs: list[np.ndarray], conditions: Conditions) -> Rung | Failure | Skipped:
    """The row of one rung on one case."""
    try:
        commands, seconds = whole_commands(about.contender, given, conditions.causal)
    except race.TookTooLong as error:
        return Skipped(**vars(about), skipped=str(error))
    except FlashError as error:
        return Failure(**vars(about), error=str(error))
    if seconds > SLOWEST:
        return Skipped(**vars(about), skipped=f"a run takes {seconds:.0f} s")
    # `kernel_seconds` runs each kernel twice, and two for nothing.
    affordable = int(RUNS_LIMIT / (2 * seconds)) - 2
    runs = min(conditions.runs, max(FEWEST, affordable))
    contender = bench.kernel_contender(about.contender, "fp32", conditions.causal)
    row = bench.measured(about, contender, inputs, conditions._replace(runs=runs))
    return row if isinstance(row, Failure) else Rung(**vars(row), **commands)


def whole_commands(name: str, given: Path, causal: bool) -> tuple[dict[str, Any], float]:
    """Seconds of the report's phases, median of two or three commands; and those of the kernel in the quickest.

    The first may have compiled the kernel, in which case there is a third.
    """
    records = [_whole_command(name, given, causal) for _ in range(2)]
    quick, slow = sorted(record["total"] for record in records)
    if slow > ALIKE * quick:
        records.append(_whole_command(name, given, causal))
    phases = {phase: statistics.median(record[phase] for record in records) for phase in ("total", *PHASES)}
    seconds = min(record.get("kernel_seconds", record["computation"]) for record in records)
    return phases | {"commands": len(records)}, seconds


def _whole_command(name: str, given: Path, causal: bool) -> dict[str, Any]:
    """The record of one ``flashcli run``."""
    options = ["--serial", "--json", "-", "--kernel", name, *(["--causal"] if causal else [])]
    done = race.succeed([*race.FLASHCLI, "run", given, given.with_name("out"), *options], COMMAND_LIMIT)
    return json.loads(done.out)
