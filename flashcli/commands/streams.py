from __future__ import annotations

import os
from pathlib import Path

import click

from flashcli.commands import options
from flashcli.errors import MISMATCH
from flashcli.measure.rows import MEMORIES, ORDERS
from flashcli.terminal import as_json, parameters

MOST_STREAMS, MOST_CONNECTIONS = 64, 32


@click.command(
    epilog=options.examples(
        "flashcli streams testcases/t06.in",
        "flashcli streams IN --streams 4 --memory pinned --connections 8 --trace trace.json",
        "flashcli streams IN --json streams.json --plot streams.png",
    )
)
@click.argument("input_path", metavar="IN", type=parameters.TEXT)
@click.option(
    "--streams",
    multiple=True,
    type=click.IntRange(0, MOST_STREAMS),
    default=(0, 1, 2, 3, 4, 8),
    show_default=True,
    help="Deal chunks to so many streams; 0 is the default stream; repeatable.",
)
@click.option(
    "--memory",
    "memories",
    multiple=True,
    type=click.Choice(MEMORIES),
    default=MEMORIES,
    show_default=True,
    help="Copy from and to such memory of the host; repeatable.",
)
@click.option(
    "--order",
    "orders",
    multiple=True,
    type=click.Choice(ORDERS),
    default=ORDERS,
    show_default=True,
    help="Queue one chunk after another, or one step of all streams after another; repeatable.",
)
@click.option(
    "--connections",
    multiple=True,
    type=click.IntRange(1, MOST_CONNECTIONS),
    default=(1, 8),
    show_default=True,
    help="Ask the driver for so many queues to the GPU; repeatable.",
)
@options.kernel_option
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Time each way so many times.")
@click.option("--trace", metavar="FILE", help="Write a timeline of each way, for ui.perfetto.dev.")
@click.option("--plot", metavar="FILE", help="Draw the times to FILE, .png, .svg or .pdf.")
@as_json.json_option
def command(
    input_path: str,
    streams: tuple[int, ...],
    memories: tuple[str, ...],
    orders: tuple[str, ...],
    connections: tuple[int, ...],
    kernel: str | None,
    runs: int,
    trace: str | None,
    plot: str | None,
    json_path: str | None,
) -> None:
    """Show what of copies and kernels goes on at the same time, by ways to hand the chunks of IN to a GPU.

    Each way is timed; then events tell when the GPU copied in, computed and copied out, and how much of that beside
    something else. A way whose answer is wrong is not timed, and the exit code is 1.
    """
    from flashcli.files.fileformat import InputFile
    from flashcli.files.outputs import check_creatable, check_distinct
    from flashcli.measure import machine, plots, records
    from flashcli.measure import streams as streams_
    from flashcli.measure.rows import Failure
    from flashcli.run.report import write_trace

    check_distinct(input_path, None if json_path == as_json.PRINT else json_path, trace, plot)
    if trace:
        check_creatable(trace)
    if plot:
        plots.check_picture(plot)
    ways = streams_.ways(streams, memories, orders)
    with InputFile(input_path):  # before a process is started for it
        record = records.Record(machine.circumstances() | machine.gpu_circumstances())
    if os.environ.get(streams_.CONNECTIONS) == ",".join(map(str, connections)):  # so it is what the driver started with
        timelines = {}
        for row, timeline in streams_.measured(Path(input_path).stem, input_path, ways, kernel, runs):
            click.echo(f"{row.contender}: {records.outcome(row)}", err=True)
            record.rows.append(row)
            if timeline:
                timelines[row.contender] = timeline
        if trace:
            write_trace(trace, timelines)
    else:
        words = [input_path, f"--runs={runs}", *([f"--kernel={kernel}"] if kernel else [])]
        words += [f"--streams={count}" for count in streams]
        words += [f"--memory={name}" for name in memories] + [f"--order={name}" for name in orders]
        record.rows = streams_.in_children(words, connections, trace)
    as_json.present(record.written(), records.texts(records.streams_tables(record.rows)), json_path)
    if plot:
        plots.draw_streams(record, plot)
    if any(isinstance(row, Failure) for row in record.rows):
        raise SystemExit(MISMATCH)
