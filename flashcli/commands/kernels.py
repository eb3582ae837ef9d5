from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from flashcli import as_json
from flashcli.commands import options
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.registry import OPERATIONS
from flashcli.kernels.types import Build, Kernel, Problem
from flashcli.shape import MAX_D


@click.command(
    epilog=options.examples(
        "flashcli kernels wgmma --d 128",
        "flashcli kernels mma --arch sm_80 --json -",
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
    help="The ladder to show: that of `flashcli run`; without tiles, of `flashcli decode`, or what fills its cache.",
)
@as_json.json_option
def command(name: str | None, d: int, arch: str | None, operation: str, json_path: str | None) -> None:
    """Show the ladder of kernels: the idea of each, its tiles for a head size, and the GPU that it needs.

    With the NAME of a kernel, tell what that one does, and how many registers and how much memory it takes.
    """
    if operation != "attention":
        if name is not None:
            raise click.UsageError(f"{name} is a kernel of attention; those of {operation} are only listed.")
        listed = [_about(kernel) for kernel in OPERATIONS[operation].values()]
        as_json.present(listed, "\n".join("{name}: {source}\n    {summary}".format(**row) for row in listed), json_path)
        return
    if name is not None:
        record = _one(name, d, arch)
        as_json.present(record, "\n".join(_lines(record)), json_path)
        return
    rows = [_row(kernel, d) for kernel in KERNELS.values()]
    told = "{name}: {tiles}, needs {needs}; {source}\n    {summary}"
    as_json.present(rows, "\n".join(told.format(tiles=_tiles(row), **row) for row in rows), json_path)


def _row(kernel: Kernel, d: int) -> dict[str, Any]:
    tiling = kernel.tiling(Problem(1, 2048, 2048, d))
    return {
        **_about(kernel), "needs": _needs(kernel), "d": d, "Br": tiling.Br, "Bc": tiling.Bc, "threads": tiling.threads,
    }  # fmt: skip


def _about(kernel: Any) -> dict[str, str]:
    """What there is to say of a kernel of any operation."""
    from flashcli.kernels import compiler

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
    from flashcli.kernels import compiler

    if arch:
        _check_arch(build.kernel, arch)
    else:
        arch = _arch_here(build.kernel) or compiler.architecture(max(build.kernel.needs, (8, 0)))
    return {"arch": arch, "functions": _resources(build, arch) if compiler.find_nvcc() else {}}


def _check_arch(kernel: Kernel, arch: str) -> None:
    from flashcli.errors import UsageError

    number = re.fullmatch(r"sm_(\d+)(\d)[af]?", arch)
    if not number:
        raise UsageError(f"{arch!r} is not an architecture.", "name one like sm_80.")
    if kernel.arch_only and arch != _needs(kernel):
        raise UsageError(f"kernel {kernel.name} is for {_needs(kernel)} only, not for {arch}.", "leave out --arch.")
    if not kernel.runs_on((int(number[1]), int(number[2]))):
        raise UsageError(f"kernel {kernel.name} needs {_needs(kernel)} or later, not {arch}.", "leave out --arch.")


def _resources(build: Build, arch: str) -> dict[str, dict[str, int]]:
    from flashcli.kernels import compiler

    return {
        function: {"registers": found.registers, "spilled": found.spilled, "static_shared": found.shared}
        for function, found in compiler.resources(build, arch).items()
    }


def _arch_here(kernel: Kernel) -> str | None:
    """The architecture of the first GPU, if there is one that runs the kernel."""
    from flashcli.errors import BackendUnavailable
    from flashcli.kernels import compiler
    from flashcli.measure.machine import gpus

    try:
        capability = gpus()[0].capability
    except BackendUnavailable:
        return None
    return compiler.architecture(capability) if kernel.runs_on(capability) else None
