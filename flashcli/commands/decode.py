from __future__ import annotations

import functools

import click

from flashcli.commands import options


@click.command(
    epilog=options.examples(
        "flashcli generate x.safetensors --decode 8,32,8,128 --lengths uniform:4096",
        "flashcli decode x.safetensors answer.safetensors",
    )
)
@click.argument("input_path", metavar="IN")
@click.argument("output_path", metavar="OUT")
@options.backend_option
@click.option("--threads", type=click.IntRange(1), help="Threads of the cpu backend; all usable cores by default.")
@options.json_option
def command(input_path: str, output_path: str, backend: str, threads: int | None, as_json: bool) -> None:
    """Compute attention of each sequence's last tokens against its pages of a cache of keys and values.

    IN and OUT are .safetensors files: queries, a cache in pages, tables of pages and lengths in; `out` and `lse` out.
    docs/decode.md says what is in them. Prints the times for reading, computing and writing.
    """
    from flashcli.errors import UsageError
    from flashcli.run import decode

    if threads is not None and backend == "cuda":
        raise UsageError("--threads is for the cpu backend, not for GPUs.", "leave it out.")
    chosen = "cpu" if threads is not None else backend
    opener = functools.partial(decode.open_backend, chosen, threads, notice=options.notice)
    record = decode.run(input_path, output_path, opener, options.late_progress)
    if as_json:
        options.print_json(record)
    else:
        click.echo(decode.report(record))
