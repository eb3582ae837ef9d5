from __future__ import annotations

import time

import click

from flashcli.asked.shape import MAX_D
from flashcli.commands import options
from flashcli.errors import BackendUnavailable
from flashcli.kernels import usual
from flashcli.terminal import as_json

MULTIPROCESSORS = 132  # of an H200: they hardly change what is compiled


@click.command(epilog=options.examples("flashcli warm", "flashcli warm run --d 64", "flashcli warm --arch sm_86"))
@click.argument("calls", nargs=-1, type=click.Choice(list(usual.CALLS)))
@click.option(
    "--d", "heads", multiple=True, type=click.IntRange(1, MAX_D),
    help="A head size; can be given several times.  [default: 32, 64, 80, 96, 128]",
)  # fmt: skip
@click.option("--arch", help="The architecture to compile for, such as sm_80; that of this machine's GPU by default.")
@as_json.json_option
def command(calls: tuple[str, ...], heads: tuple[int, ...], arch: str | None, json_path: str | None) -> None:
    """Compile the kernels that usual shapes need, so that no first call waits for a compiler.

    CALLS are what is to be called: run, attention, backward (its gradients), decode; all, if none is named. Kernels are
    kept in the cache, for whoever reads it: FLASHCLI_CACHE_DIR may name several folders, with colons between.
    """
    from flashcli.commands.kernels import capability_of
    from flashcli.compiler import cache, compiler
    from flashcli.kernels.operation import Gpu
    from flashcli.measure.builds import compile_for

    gpu = Gpu(capability_of(arch), MULTIPROCESSORS) if arch else Gpu(*_first_gpu())
    arch = compiler.architecture(gpu.capability)
    builds, start = usual.builds(gpu, calls or usual.CALLS, heads or usual.HEADS), time.perf_counter()
    compile_for(arch, builds)
    seconds = time.perf_counter() - start
    record = {"arch": arch, "builds": len(builds), "seconds": seconds, "folder": str(cache.folder())}
    told = f"{len(builds)} kernels for {arch} are in {cache.folder()}, after {seconds:.1f} s."
    as_json.present(record, told, json_path)


def _first_gpu() -> tuple[tuple[int, int], int]:
    """The first GPU's compute capability and number of multiprocessors; BackendUnavailable if there is no GPU."""
    from flashcli.gpu import driver, plain

    if missing := driver.problem():
        raise BackendUnavailable(f"{missing}.", "go to a machine with a GPU, or name an architecture.")
    gpu = plain.Device(0)
    return gpu.compute_capability(), gpu.get_attribute(plain.device_attribute.MULTIPROCESSOR_COUNT)
