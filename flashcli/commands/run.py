from __future__ import annotations

import functools
import os

import click

from flashcli.commands import options


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is None:
        return None
    from flashcli.api import MAX_SCALE

    if not abs(value) <= MAX_SCALE:
        raise click.BadParameter("must be finite in float32.")
    return value


@click.command()
@click.argument("input_path", metavar="IN")
@click.argument("output_path", metavar="OUT")
@options.backend_option
@options.kernel_option
@options.precision_option
@click.option("--causal", is_flag=True, help="Row i of Q sees rows 0 to i of K only.")
@click.option("--scale", type=float, callback=_finite, help="Factor on Q Kᵀ; 1/sqrt(d) by default.")
@click.option("--device", type=click.IntRange(0), help="Number of the GPU; the first by default.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the cpu backend; all usable cores by default.")
@click.option(
    "--max-device-memory", metavar="BYTES", type=options.BYTES, help="Use no more of the GPU's memory; 2G, 512M."
)
@click.option("--serial", is_flag=True, help="Read, compute, write one after another, without overlap.")
@click.option("--trace", metavar="FILE", help="Write a timeline of every chunk, for ui.perfetto.dev.")
@options.json_option
def command(
    input_path: str,
    output_path: str,
    backend: str,
    kernel: str | None,
    precision: str,
    causal: bool,
    scale: float | None,
    device: int | None,
    threads: int | None,
    max_device_memory: int | None,
    serial: bool,
    trace: str | None,
    as_json: bool,
) -> None:
    """Compute O = softmax(scale · Q Kᵀ) V for each batch of the file IN, and write O to OUT.

    Prints the times for reading, computing and writing.
    """
    from flashcli import pipeline, timing
    from flashcli.api import open_backend

    chosen = functools.partial(
        open_backend, backend, causal=causal, scale=scale, kernel=kernel, precision=precision, device=device,
        threads=threads, max_device_bytes=max_device_memory, notice=options.notice,
    )  # fmt: skip
    record = pipeline.run(input_path, output_path, chosen, options.warn, options.late_progress, serial, trace, causal)
    record |= {"causal": causal, "scale": scale}
    aside = _is_stdout(output_path)  # the answer goes there: the report must not
    if as_json:
        options.print_json(record, err=aside)
    else:
        click.echo(timing.report(record), err=aside)


def _is_stdout(path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(1)) and not os.path.samefile(path, os.devnull)
    except OSError:
        return False
