from __future__ import annotations

from typing import Any

import click

from flashcli.asked.shape import MAX_SCALE
from flashcli.commands import options, standard
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.terminal import as_json, parameters


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not abs(value) <= MAX_SCALE:
        raise click.BadParameter(f"must be finite, from {-MAX_SCALE:.5g} to {MAX_SCALE:.5g}.")
    return value


@click.command(
    epilog=options.examples(
        "flashcli run testcases/t01.in t01.out",
        "flashcli run in out --devices all --trace trace.json",
        "srun -N2 --ntasks-per-node=4 --gpus-per-node=4 --mpi=pmix -K flashcli run in out",
    )
)
@click.argument("input_path", metavar="IN", type=parameters.FILE_OR_STREAM)
@click.argument("output_path", metavar="OUT", type=parameters.FILE_OR_STREAM)
@options.backend_option
@options.kernel_option
@click.option(
    "--emulate", is_flag=True, help="Run the --kernel on the CPU, each of its threads emulated: slow, for small inputs."
)
@options.precision_option
@click.option("--causal", is_flag=True, help="Row i of Q sees rows 0 to i of K only.")
@click.option("--scale", type=float, callback=_finite, help="Factor on Q Kᵀ; 1/sqrt(d) by default.")
@click.option("--device", type=click.IntRange(0), help="Number of the GPU; the first by default.")
@click.option(
    "--devices", metavar="all|N,N,..", type=parameters.DEVICES, help="Several GPUs of this machine; each does a share."
)
@click.option("--threads", type=click.IntRange(1), help="Threads of the cpu backend; all usable cores by default.")
@click.option(
    "--max-device-memory",
    "max_device_bytes",
    metavar="BYTES",
    type=parameters.BYTES,
    help="Use no more of the GPU's memory; 2G, 512M.",
)
@click.option("--serial", is_flag=True, help="Read, compute, write one after another, without overlap.")
@click.option("--trace", metavar="FILE", help="Write a timeline of every chunk, for ui.perfetto.dev.")
@as_json.json_option
def command(
    input_path: str, output_path: str, device: int | None, devices: tuple[int, ...] | str | None, serial: bool,
    trace: str | None, json_path: str | None, **asked: Any,
) -> None:  # fmt: skip
    """Compute O = softmax(scale · Q Kᵀ) V for each batch of the file IN, and write O to OUT.

    IN can be -, stdin, and OUT -, stdout. Prints the times for reading, computing and writing. Started as several tasks
    by mpirun or srun, each does a share.
    """
    from flashcli.run import pipeline, ranks, report
    from flashcli.run.request import Request, refuse_conflicts
    from flashcli.terminal.messages import explain
    from flashcli.terminal.messages import trace as show_trace

    with ranks.joined(show_trace, explain) as here:
        if here.size > 1 and standard.NAME in (input_path, output_path):
            raise UsageError("- is one process's stdin or stdout, and there are several.", "name files.")
        [input_path], [output_path] = standard.to_read(input_path), standard.to_write(output_path)
        as_json.check_apart(json_path, input_path, output_path, trace)
        where = "--emulate" if asked["emulate"] else f"--backend {asked['backend']}"
        chosen = _devices(devices, device, where, here.size)
        request = Request(**asked, device=chosen[0] if chosen else None, turn=here.turn, cores=here.threads)
        refuse_conflicts(request, options.as_option)
        order = pipeline.Order(input_path, output_path, request, chosen, serial, trace)
        person = pipeline.Audience(options.notice, options.warn, options.late_progress)
        try:
            record = pipeline.run(order, person if here.rank == 0 else pipeline.NOBODY, here)
        except BackendUnavailable as error:
            if request.kernel is not None and not (request.emulate or request.on_host):
                error.hint += " Or add --emulate: the kernel then runs on the CPU, slowly."
            raise
    if here.rank > 0:
        return
    record |= {"causal": request.causal, "scale": request.scale}
    aside = standard.is_stdout(output_path)  # the answer goes there: the report must not
    as_json.present(record, report.report(record), json_path, err=aside)


def _devices(several: tuple[int, ...] | str | None, one: int | None, where: str, ranks: int) -> tuple[int, ...]:
    """The GPUs that were asked for; none, if it is left open. ``where`` is the option that says where to compute."""
    if several is None:
        return () if one is None else (one,)
    if one is not None:
        raise UsageError("--device and --devices were both given.", "--devices 0 is the same as --device 0.")
    if where in ("--backend cpu", "--emulate"):
        kind = "the cpu backend" if where == "--backend cpu" else "the emulator"
        raise UsageError(f"--devices is for GPUs, not for {kind}.", f"leave out {where}.")
    if ranks > 1:
        raise UsageError(
            f"--devices was given to {ranks} processes: each takes one GPU by itself.",
            "leave out --devices, or start one process.",
        )
    if isinstance(several, tuple):
        return several
    from flashcli.gpu.pycuda import devices

    if not (found := devices()):
        raise BackendUnavailable("there is no GPU.", "see `flashcli doctor`.")
    return tuple(range(len(found)))
