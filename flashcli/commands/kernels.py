from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import click

from flashcli.asked.how import PRECISIONS
from flashcli.asked.shape import MAX_D, Shape
from flashcli.commands import options
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels import backward
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build, Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.registry import OPERATIONS
from flashcli.kernels.tuning.decode import Problem as Paged
from flashcli.terminal import as_json, parameters

ATTENTION = "attention"
NAMES = tuple(dict.fromkeys(name for operation in OPERATIONS.values() for name in operation.kernels))
# The problem that a kernel is shown for, by operation: heads of d numbers, so many tokens.
PROBLEMS: dict[str, Callable[[int, int], Any]] = {
    ATTENTION: lambda d, tokens: Problem(1, tokens, tokens, d),
    "backward": lambda d, tokens: backward.of_sizes(d, M=tokens, N=tokens),
    "tangents": lambda d, tokens: backward.of_sizes(d, M=tokens, N=tokens),
    "decode": lambda d, tokens: Paged(d, 16, "float16", "float16", True, table_width=tokens // 16),
    "write_kv": lambda d, tokens: Paged(d, 16, "float16", "float16", True),
    "merge": lambda d, tokens: Paged(d, 1, "float16", "float16", False),
}
PROMPTS = Paged(64, 16, "float32", "float32", True, ragged=True, packs=True, table_width=128, total=2048)
IN_PAGES = "as for 2048 tokens in pages of 16, float16 (gather: float32), layout vllm"
TAKES = {
    ATTENTION: "any d from 1 to 256",
    "backward": "as without a bias",
    "tangents": "as without a bias",
    "decode": IN_PAGES,
    "write_kv": IN_PAGES,
    "merge": IN_PAGES,
}
# Architectures that nvcc of CUDA 12 or 13 knows.
ARCHITECTURES = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)


@click.command(
    epilog=options.examples(
        "flashcli kernels mma --arch sm_80 --json -",
        "flashcli kernels --shape 8,1000,32 --causal",
        "flashcli kernels tensor --d 128",
    )
)
@click.argument("name", metavar="[NAME]", required=False, type=click.Choice(NAMES))
@click.option(
    "--d",
    default=64,
    show_default=True,
    type=click.IntRange(1, MAX_D),
    help="The head size, for which the tiles are shown.",
)
@click.option("--arch", help="The architecture to compile for, such as sm_80; that of this machine's GPU by default.")
@click.option(
    "--operation",
    type=click.Choice(list(OPERATIONS)),
    help="The ladder to show: attention, if nothing is said, is that of `flashcli run`, backward that of gradients, "
    "decode that of `flashcli decode`; write_kv fills its cache. A NAME is looked for in all of them.",
)
@click.option(
    "--shape",
    type=parameters.SHAPE,
    help="Tell which kernel is chosen for arrays of this B,N,d, why, and what time is expected of each.",
)
@click.option("--causal", is_flag=True, help="With --shape: row i of Q sees rows 0 to i of K only.")
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default="fp32",
    show_default=True,
    help="With --shape: what is asked for.",
)
@as_json.json_option
def command(
    name: str | None,
    d: int,
    arch: str | None,
    operation: str | None,
    shape: Shape | None,
    causal: bool,
    precision: str,
    json_path: str | None,
) -> None:
    """Show the ladder of kernels: the idea of each, its tiles for a head size, and the GPU that it needs.

    With the NAME of a kernel, tell what that one does, and how many registers and how much memory it takes. With a
    shape, tell which one computes it.
    """
    if shape is not None:
        if name is not None or operation not in (None, ATTENTION):
            raise click.UsageError("--shape asks which kernel of attention is chosen: leave out NAME and --operation.")
        choice = _choice(shape, causal, precision, arch)
        as_json.present(choice, "\n".join(_choice_lines(choice)), json_path)
        return
    if causal or precision != "fp32":
        raise click.UsageError(f"{'--causal' if causal else '--precision'} has a meaning with --shape only.")
    if name is not None:
        record = _one(*_found(name, operation), d, arch)
        as_json.present(record, "\n".join(_lines(record)), json_path)
        return
    if arch is not None:
        raise click.UsageError("--arch has a meaning with NAME or --shape only.")
    operation = operation or ATTENTION
    rows = [_listed(operation, kernel, d) for kernel in OPERATIONS[operation].kernels.values()]
    told = "{name}: {tiles}, needs {needs}; {source}\n    {summary}"
    as_json.present(rows, "\n".join(told.format(tiles=_tiles(row), **row) for row in rows), json_path)


def _found(name: str, operation: str | None) -> tuple[str, Kernel]:
    """The operation, the first that has a kernel of that name if none is asked for, and the kernel."""
    able = [one.name for one in OPERATIONS.values() if name in one.kernels]
    if operation not in (None, *able):
        raise click.UsageError(f"{name} is a kernel of {' and '.join(able)}, not of {operation}.")
    operation = operation or able[0]
    return operation, OPERATIONS[operation].kernels[name]


def _problem(operation: str, kernel: Kernel, d: int) -> Any:
    """A problem with heads of d numbers and long sequences, or short ones if the kernel is for those alone.

    For a kernel of paged decode that takes no other problem, it is one of prompts in float32.
    """
    problems = [PROBLEMS[operation](d, tokens) for tokens in (2048, 128)]
    for problem in (*problems, *([PROMPTS._replace(d=d)] if operation == "decode" else [])):
        if not kernel.refuses(fitted := kernel.fitted(problem)):
            return fitted
    reason = kernel.refuses(kernel.fitted(problems[-1]))
    raise UsageError(f"kernel {kernel.name} has no heads of {d} numbers: {reason}.", "choose another --d.")


def _choice(shape: Shape, causal: bool, precision: str, arch: str | None) -> dict[str, Any]:
    """Which kernels are chosen for a shape on an architecture, and what is expected of each."""
    from flashcli.kernels.choice import candidates, choose, why

    arch = arch or _arch_here() or "sm_90a"
    capability = capability_of(arch)
    B, N, d = astuple(shape)
    problem = Problem(B, N, N, d, causal, precision, in_place=True, batch_invariant=True)
    chosen = {
        "chosen": choose(capability, problem).name,
        "chosen_by_B": choose(capability, problem._replace(batch_invariant=False)).name,
        "chosen_for_files": choose(capability, problem._replace(in_place=False, batch_invariant=False)).name,
    }
    expected = [
        {"name": one.name, "microseconds": one.microseconds, "refused": one.refused}
        for one in candidates(capability, problem)
    ]
    asked = {"B": B, "N": N, "d": d, "causal": causal, "precision": precision, "arch": arch}
    return asked | chosen | {"why": why(capability, problem)} | {"kernels": expected}


def _choice_lines(choice: dict[str, Any]) -> Iterator[str]:
    mask = " causal" if choice["causal"] else ""
    arrays, files = choice["chosen"], choice["chosen_for_files"]
    taken = f"{arrays} for arrays, {files} for files" if arrays != files else f"{arrays} for arrays and files"
    yield "({B}, {N}, {d}){mask} in {precision} on {arch}: {taken}".format(mask=mask, taken=taken, **choice)
    width = max(len(one["name"]) for one in choice["kernels"])
    for one in choice["kernels"]:
        time = one["microseconds"]
        yield f"  {one['name']:{width}}  " + (one["refused"] or ("unknown" if time is None else _time(time)))
    yield "For arrays, {chosen} {why}.".format(**choice)
    yield "Times are those that the model of flashcli/kernels/tuning/cost.py expects on an H200."
    if choice["chosen_by_B"] != choice["chosen"]:
        yield f"With batch_invariant=False, where the kernel may depend on B, it is {choice['chosen_by_B']}."
    if arrays != files:
        yield f"For files, as `flashcli run` computes them, {files} comes first of all that can."


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.3f} ms"


def _listed(operation: str, kernel: Kernel, d: int) -> dict[str, Any]:
    """A kernel as in `_row`; without tiles, and with the reason, where it has no heads of d numbers."""
    try:
        return _row(kernel, _problem(operation, kernel, d))
    except UsageError as error:
        return {**_about(kernel), "needs": _needs(kernel), "d": d, "refused": str(error)}


def _row(kernel: Kernel, problem: Any) -> dict[str, Any]:
    tiling = kernel.tiling(problem)
    return {
        **_about(kernel), "needs": _needs(kernel), "d": problem.d, "Br": tiling.Br, "Bc": tiling.Bc,
        "threads": tiling.threads,
    }  # fmt: skip


def _about(kernel: Kernel) -> dict[str, str]:
    """The name, source and summary of a kernel of any operation."""
    from flashcli.compiler import compiler

    source = compiler.SOURCES / kernel.file
    if source.is_relative_to(Path.cwd()):  # of a checkout, probably
        source = source.relative_to(Path.cwd())
    return {"name": kernel.name, "file": kernel.file, "source": str(source), "summary": kernel.summary}


def _needs(kernel: Kernel) -> str:
    if kernel.on_host:
        return "a C compiler"
    return "sm_{}{}".format(*kernel.needs) + ("a" if kernel.arch_only else "")


def _tiles(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"no heads of {row['d']} numbers"
    tiles = "Br={Br}, Bc={Bc}, " if row["Bc"] else ""  # a kernel of paged decode has pieces of its own
    return (tiles + "{threads} thread{s}").format(s="s" if row["threads"] > 1 else "", **row)


def _one(operation: str, kernel: Kernel, d: int, arch: str | None) -> dict[str, Any]:
    """A kernel as in `_row`, with the resources of each of its functions."""
    build = Build(kernel, _problem(operation, kernel, d))
    record = _row(kernel, build.problem) | {
        "operation": operation, "functions": {},
        "dynamic_shared": max((launch.shared for launch in build.functions()), default=0),
    }  # fmt: skip
    if not build.kernel.on_host:
        record |= _compiled(build, arch)
    elif arch:
        raise UsageError(f"kernel {kernel.name} runs on the CPU, not on {arch}.", "leave out --arch.")
    return record


def _lines(record: dict[str, Any]) -> Iterator[str]:
    """The comment that begins the source, then what the kernel takes."""
    source = Path(record["source"]).read_text("utf-8").splitlines()
    for line in itertools.takewhile(lambda line: line.startswith("//"), source):
        yield line.removeprefix("//").removeprefix(" ")
    takes = TAKES[record["operation"]]
    if record["operation"] == ATTENTION:
        takes = KERNELS[record["name"]].refuses(Problem(1, 128, 128, MAX_D)) or takes
    yield "\n{source}\nneeds {needs}; {takes}".format(takes=takes, **record)
    shared = f", {record['dynamic_shared']} bytes of dynamic shared memory" if "arch" in record else ""
    yield f"d = {record['d']}: {_tiles(record)}{shared}"
    for function, found in record["functions"].items():
        numbers = (
            "{registers} registers a thread, {spilled} bytes spilled, {static_shared} bytes of static shared memory"
        )
        yield f"{function} on {record['arch']}: {numbers.format(**found)}"
    if "arch" in record and not record["functions"]:
        yield "registers: unknown without nvcc or NVRTC"
    if record["operation"] == ATTENTION and "arch" in record:
        yield "without a GPU: flashcli run IN OUT --emulate --kernel {name}".format(**record)


def _compiled(build: Build, arch: str | None) -> dict[str, Any]:
    """The architecture, and what each function takes there, where there is an nvcc to tell."""
    from flashcli.compiler import compiler

    if arch:
        _check_arch(build.kernel, arch)
    elif not (arch := _arch_here()) or not build.kernel.runs_on(capability_of(arch)):
        arch = compiler.architecture(max(build.kernel.needs, (8, 0)))
    found = {} if compiler.reporting_problem() else compiler.resources(build, arch)
    functions = {
        function: {"registers": of.registers, "spilled": of.spilled, "static_shared": of.shared}
        for function, of in found.items()
    }
    return {"arch": arch, "functions": functions}


def capability_of(arch: str) -> tuple[int, int]:
    number = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not number or int(number[1] + number[2]) not in ARCHITECTURES:
        known = ", ".join(f"sm_{known}" for known in ARCHITECTURES)
        raise UsageError(f"{arch!r} is not an architecture.", f"name one of {known}; sm_90a has Hopper's own.")
    return int(number[1]), int(number[2])


def _check_arch(kernel: Kernel, arch: str) -> None:
    capability = capability_of(arch)
    if kernel.arch_only and arch != _needs(kernel):
        raise UsageError(f"kernel {kernel.name} is for {_needs(kernel)} only, not for {arch}.", "leave out --arch.")
    if not kernel.runs_on(capability):
        raise UsageError(f"kernel {kernel.name} needs {_needs(kernel)} or later, not {arch}.", "leave out --arch.")


def _arch_here() -> str | None:
    """The architecture of the first GPU, if there is one."""
    from flashcli.compiler import compiler
    from flashcli.gpu.pycuda import devices

    try:
        found = devices()
    except BackendUnavailable:
        return None
    return compiler.architecture(found[0].capability) if found else None
