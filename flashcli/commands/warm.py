from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING

import click

from flashcli.asked.shape import MAX_D
from flashcli.commands import options
from flashcli.errors import BackendUnavailable, explained
from flashcli.kernels import usual
from flashcli.terminal import as_json

if TYPE_CHECKING:
    from flashcli.kernels.operation import Gpu

MULTIPROCESSORS = 132  # of an H200: they hardly change what is compiled
LAST = 19  # a priority: for what processors have to spare


@click.command(
    epilog=options.examples("flashcli warm --background", "flashcli warm run --d 64", "flashcli warm --arch sm_86")
)
@click.argument("calls", nargs=-1, type=click.Choice(list(usual.CALLS)))
@click.option(
    "--d", "heads", multiple=True, type=click.IntRange(1, MAX_D),
    help="A head size; can be given several times.  [default: 32, 64 of run; 32, 64, 80, 96, 128 else]",
)  # fmt: skip
@click.option("--arch", help="The architecture to compile for, such as sm_80; that of this machine's GPU by default.")
@click.option(
    "--background", is_flag=True, help="Leave it to a process of its own, which takes what processors have to spare."
)
@as_json.json_option
def command(
    calls: tuple[str, ...], heads: tuple[int, ...], arch: str | None, background: bool, json_path: str | None
) -> None:
    """Compile the kernels that usual shapes need, so that no first call waits for a compiler.

    CALLS are what is to be called: run, attention, backward (its gradients), decode; all, if none is named. Kernels are
    kept in the cache, for whoever reads it: FLASHCLI_CACHE_DIR may name several folders, with colons between.
    """
    from flashcli.commands.kernels import capability_of
    from flashcli.compiler import cache, compiler
    from flashcli.kernels.operation import Gpu
    from flashcli.measure.builds import compile_for

    gpu = Gpu(capability_of(arch), MULTIPROCESSORS) if arch else _first_gpu()
    builds, start = usual.builds(gpu, calls or usual.CALLS, heads), time.perf_counter()
    if background:
        _begin([*calls, *(f"--d={d}" for d in heads), *([f"--arch={arch}"] if arch else [])])
    else:
        compile_for(compiler.architecture(gpu.capability), builds)
    record = {
        "arch": compiler.architecture(gpu.capability), "builds": len(builds), "seconds": time.perf_counter() - start,
        "folder": str(cache.folder()),
    }  # fmt: skip
    told = "{builds} kernels for {arch} are in {folder}, after {seconds:.1f} s."
    if background:
        told = "{builds} kernels for {arch} are being compiled, in the background, for {folder}."
    as_json.present(record, told.format(**record), json_path)


def _begin(arguments: list[str]) -> None:
    """Begin the process that compiles in the background; BackendUnavailable says why it could not."""
    from flashcli.compiler import cache, compiler
    from flashcli.process import detached

    if problem := compiler.reporting_problem():
        raise BackendUnavailable(f"{problem}.", "install the CUDA toolkit, or pip install 'cuda-bindings[all]'.")
    with explained("write to", str(cache.folder())):
        cache.try_to_write()
    detached.begin(["-m", "flashcli", "warm", *arguments], preexec_fn=functools.partial(os.nice, LAST))


def _first_gpu() -> Gpu:
    """The first GPU as calls will find it; BackendUnavailable if there is none."""
    from flashcli.gpu import driver, plain
    from flashcli.gpu.place import described

    if missing := driver.problem():
        raise BackendUnavailable(f"{missing}.", "go to a machine with a GPU, or name an architecture.")
    gpu = plain.Device(0)
    return described(0, gpu.name(), lambda name: gpu.get_attribute(getattr(plain.device_attribute, name)))
