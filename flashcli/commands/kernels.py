from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import click

from flashcli.asked.how import PRECISIONS
from flashcli.asked.shape import MAX_D, Shape
from flashcli.commands import options
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build, Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.registry import OPERATIONS
from flashcli.terminal import as_json, parameters


@click.command(
    epilog=options.examples(
        "flashcli kernels mma --arch sm_80 --json -",
        "flashcli kernels --shape 8,1000,32 --causal",
        "flashcli kernels --operation decode",
    )
)
@click.argument("name", metavar="[NAME]", required=False, type=options.KERNEL_TYPE)
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
    default="attention",
    show_default=True,
    help="The ladder to show: attention is that of `flashcli run`, backward that of gradients, decode that of "
    "`flashcli decode`; write_kv fills its cache.",
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
    operation: str,
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
        if name is not None or operation != "attention":
            raise click.UsageError("--shape asks which kernel of attention is chosen: leave out NAME and --operation.")
        choice = _choice(shape, causal, precision, arch)
        as_json.present(choice, "\n".join(_choice_lines(choice)), json_path)
        return
    if operation != "attention":
        if name is not None:
            raise click.UsageError(f"{name} is a kernel of attention; those of {operation} are only listed.")
        listed = [_about(kernel) for kernel in OPERATIONS[operation].kernels.values()]
        as_json.present(listed, "\n".join("{name}: {source}\n    {summary}".format(**row) for row in listed), json_path)
        return
    if name is not None:
        record = _one(name, d, arch)
        as_json.present(record, "\n".join(_lines(record)), json_path)
        return
    rows = [_row(kernel, d) for kernel in KERNELS.values()]
    told = "{name}: {tiles}, needs {needs}; {source}\n    {summary}"
    as_json.present(rows, "\n".join(told.format(tiles=_tiles(row), **row) for row in rows), json_path)


def _choice(shape: Shape, causal: bool, precision: str, arch: str | None) -> dict[str, Any]:
    """Which kernels are chosen for a shape on an architecture, and what is expected of each."""
    from flashcli.kernels.choice import candidates, choose, why

    arch = arch or _arch_here() or "sm_90a"
    capability = _capability(arch)
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
    yield "({B}, {N}, {d}){mask} in {precision} on {arch}: {chosen}".format(mask=mask, **choice)
    width = max(len(one["name"]) for one in choice["kernels"])
    for one in choice["kernels"]:
        time = one["microseconds"]
        yield f"  {one['name']:{width}}  " + (one["refused"] or ("unknown" if time is None else _time(time)))
    yield "{chosen} {why}.".format(**choice)
    yield "Times are those that the model of flashcli/kernels/cost.py expects on an H200."
    if choice["chosen_by_B"] != choice["chosen"]:
        yield f"With batch_invariant=False, where the kernel may depend on B, it is {choice['chosen_by_B']}."
    if choice["chosen_for_files"] != choice["chosen"]:
        yield f"For files it is {choice['chosen_for_files']}."


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.3f} ms"


def _row(kernel: Kernel, d: int) -> dict[str, Any]:
    tiling = kernel.tiling(Problem(1, 2048, 2048, d))
    return {
        **_about(kernel), "needs": _needs(kernel), "d": d, "Br": tiling.Br, "Bc": tiling.Bc, "threads": tiling.threads,
    }  # fmt: skip


def _about(kernel: Any) -> dict[str, str]:
    """What there is to say of a kernel of any operation."""
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
    return "Br={Br}, Bc={Bc}, {threads} thread{s}".format(s="s" if row["threads"] > 1 else "", **row)


def _one(name: str, d: int, arch: str | None) -> dict[str, Any]:
    """What `_row` says of a kernel, and what each of its functions takes."""
    from flashcli.errors import UsageError

    build = Build(KERNELS[name], Problem(1, 2048, 2048, d))
    record = _row(build.kernel, d) | {"dynamic_shared": build.tiling.shared, "functions": {}}
    if not build.kernel.on_host:
        record |= _compiled(build, arch)
    elif arch:
        raise UsageError(f"kernel {name} runs on the CPU, not on {arch}.", "leave out --arch.")
    return record


def _lines(record: dict[str, Any]) -> Iterator[str]:
    """The comment that begins the source, then what the kernel takes."""
    source = Path(record["source"]).read_text().splitlines()
    for line in itertools.takewhile(lambda line: line.startswith("//"), source):
        yield line.removeprefix("//").removeprefix(" ")
    yield "\n{source}\nneeds {needs}; any d from 1 to 256".format(**record)
    shared = f", {record['dynamic_shared']} bytes of dynamic shared memory" if "arch" in record else ""
    yield f"d = {record['d']}: {_tiles(record)}{shared}"
    for function, found in record["functions"].items():
        numbers = (
            "{registers} registers a thread, {spilled} bytes spilled, {static_shared} bytes of static shared memory"
        )
        yield f"{function} on {record['arch']}: {numbers.format(**found)}"
    if "arch" in record and not record["functions"]:
        yield "registers: unknown without nvcc"


def _compiled(build: Build, arch: str | None) -> dict[str, Any]:
    """The architecture, and what each function takes there, where there is an nvcc to tell."""
    from flashcli.compiler import compiler

    if arch:
        _check_arch(build.kernel, arch)
    elif not (arch := _arch_here()) or not build.kernel.runs_on(_capability(arch)):
        arch = compiler.architecture(max(build.kernel.needs, (8, 0)))
    return {"arch": arch, "functions": _resources(build, arch) if compiler.find_nvcc() else {}}


def _capability(arch: str) -> tuple[int, int]:
    from flashcli.errors import UsageError

    number = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not number:
        raise UsageError(f"{arch!r} is not an architecture.", "name one like sm_80.")
    return int(number[1]), int(number[2])


def _check_arch(kernel: Kernel, arch: str) -> None:
    from flashcli.errors import UsageError

    capability = _capability(arch)
    if kernel.arch_only and arch != _needs(kernel):
        raise UsageError(f"kernel {kernel.name} is for {_needs(kernel)} only, not for {arch}.", "leave out --arch.")
    if not kernel.runs_on(capability):
        raise UsageError(f"kernel {kernel.name} needs {_needs(kernel)} or later, not {arch}.", "leave out --arch.")


def _resources(build: Build, arch: str) -> dict[str, dict[str, int]]:
    from flashcli.compiler import compiler

    return {
        function: {"registers": found.registers, "spilled": found.spilled, "static_shared": found.shared}
        for function, found in compiler.resources(build, arch).items()
    }


def _arch_here() -> str | None:
    """The architecture of the first GPU, if there is one."""
    from flashcli.compiler import compiler
    from flashcli.errors import BackendUnavailable
    from flashcli.measure.machine import gpus

    try:
        return compiler.architecture(gpus()[0].capability)
    except BackendUnavailable:
        return None
