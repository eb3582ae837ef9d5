from __future__ import annotations

import functools

import click

from flashcli.commands import options, standard
from flashcli.errors import UsageError
from flashcli.kernels.registry import OPERATIONS
from flashcli.terminal import as_json

KERNELS = OPERATIONS["decode"].kernels


@click.command(
    epilog=options.examples(
        "flashcli decode x.safetensors answer.safetensors",
        "flashcli decode x.safetensors answer.safetensors --backend cpu --json -",
    )
)
@click.argument("input_path", metavar="IN")
@click.argument("output_path", metavar="OUT")
@options.backend_option
@click.option(
    "--kernel",
    metavar="NAME",
    type=click.Choice(list(KERNELS)),
    help=f"Compute on the GPU with one of {', '.join(KERNELS)}; by default the fastest that can.",
)
@click.option("--threads", type=click.IntRange(1), help="Threads of the cpu backend; all usable cores by default.")
@as_json.json_option
def command(
    input_path: str, output_path: str, backend: str, kernel: str | None, threads: int | None, json_path: str | None
) -> None:
    """Compute attention of each sequence's last tokens against its pages of a cache of keys and values.

    IN and OUT are .safetensors files: queries, a cache in pages, tables of pages and lengths in; `out` and `lse` out.
    docs/decode.md says what is in them. Prints the times for reading, computing and writing.
    """
    from flashcli.run import decode

    if threads is not None and backend == "cuda":
        raise UsageError("--threads is for the cpu backend, not for GPUs.", "leave out --threads.")
    chosen = "cpu" if threads is not None else backend
    decode.check_kernel(chosen, kernel, "--kernel")
    as_json.check_apart(json_path, input_path, output_path)
    [input_path], [output_path] = standard.to_read(input_path), standard.to_write(output_path)
    opener = functools.partial(decode.open_backend, chosen, threads, kernel, notice=options.notice)
    record = decode.run(input_path, output_path, opener, options.late_progress, options.notice, options.warn)
    as_json.present(record, decode.report(record), json_path, err=standard.is_stdout(output_path))
