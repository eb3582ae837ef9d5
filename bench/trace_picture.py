"""Draw the trace of `flashcli run` or `flashcli streams`: a row for each track, a bar for each span, time to the right.

``python -m bench.trace_picture TRACE.json OUT.svg --from 50 --to 90`` shows a window of it, in milliseconds.
One chunk, in the middle of the window, is dark, so that the eye can follow it from row to row. What the engines of the
GPU did at the same time, in all of the trace, is printed.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench import scripts
from flashcli.errors import BadInput, UsageError, explained
from flashcli.measure.engines import engines, hidden
from flashcli.measure.plots import BLACK, check_picture, save_picture
from flashcli.run.timeline import ENGINES, Span
from flashcli.terminal import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From top to bottom, the way that a chunk takes.
COLOURS = {
    "start": "#b5c18e",
    "input": "#7aa6d6",
    "host to device": "#86c9b7",
    "kernel": "#f2a33c",
    "device to host": "#b9a5dc",
    "computation": "#c9c9c9",
    "output": "#e08a8a",
}
WIDTH, ROW, BAR, LETTER = 11.0, 0.21, 0.76, 0.055  # inches of the picture, a row and a letter; a bar's share of its row
CHUNK = re.compile(r"batch.*")

Event = dict[str, Any]  # of a Chrome trace; its times are in microseconds


def picture(events: list[Event], start: float, end: float, title: str) -> Figure:
    """The events of a trace between two times, in milliseconds."""
    from matplotlib.figure import Figure

    shown = [event for event in events if event["ts"] < end * 1e3 and event["ts"] + event["dur"] > start * 1e3]
    tracks = list[tuple[str, list[Event]]]()
    for name, some in by_process(shown).items():
        tracks += [(str(name), [])] if len(by_process(events)) > 1 else []
        some.sort(key=lambda event: (list(COLOURS).index(event["cat"]), event["tid"], event["ts"]))
        tracks += [(track, list(spans)) for track, spans in itertools.groupby(some, key=lambda event: event["tid"])]
    followed = middle_chunk(shown, (start + end) / 2)
    figure = Figure(figsize=(WIDTH, ROW * len(tracks) + 1), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(start, end), ylim=(len(tracks) - 0.4, -0.6), xlabel="milliseconds")
    ax.set_title(title, loc="left", fontweight="bold", fontsize=10)
    ax.set_title(f"dark: one chunk on its way, {followed}" if followed else "", loc="right", fontsize=9)
    for label, (_, spans) in zip(ax.set_yticks(range(len(tracks)), [name for name, _ in tracks]), tracks, strict=True):
        label.label1.set(fontsize=8, fontweight="normal" if spans else "bold")
    ax.tick_params(axis="both", length=0, labelsize=8)
    ax.grid(axis="x", color="#dddddd")
    ax.set_axisbelow(True)
    ax.spines[:].set_visible(False)
    for row, (_, spans) in enumerate(tracks):
        for span in spans:
            left, right = max(span["ts"] / 1e3, start), min((span["ts"] + span["dur"]) / 1e3, end)
            dark, room = chunk_of(span) == followed != "", (right - left) / (end - start) * (WIDTH - 1)
            colour, edge, ink = (BLACK, BLACK, "white") if dark else (COLOURS[span["cat"]], "white", BLACK)
            ax.barh(row, right - left, BAR, left, color=colour, edgecolor=edge, linewidth=0.4)
            if len(inscription := inscribed(span)) * LETTER < room:
                ax.text((left + right) / 2, row, inscription, color=ink, fontsize=6, ha="center", va="center_baseline")
    return figure


def by_process(events: list[Event]) -> dict[object, list[Event]]:
    """The events of each process, as a trace calls what stands under a name of its own."""
    processes: dict[object, list[Event]] = {}
    for event in events:
        processes.setdefault(event["pid"], []).append(event)
    return processes


def engines_table(events: list[Event]) -> str:
    """For each process the engines' milliseconds, and which share of them went on beside what."""
    lines = [["", *ENGINES, *(f"{engine} beside others" for engine in ENGINES), "behind copies in", "or reading"]]
    for name, some in by_process(events).items():
        spans = [Span(event["cat"], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3) for event in some]
        read = [span._replace(phase=ENGINES[0]) if span.phase == "input" else span for span in spans]
        times, shares = [], []
        for engine in engines(spans).values():
            times.append(f"{engine.busy:.1f} ms")
            shares.append(engine.beside / engine.busy if engine.busy else 0.0)
        lines.append([str(name), *times, *(f"{share:.0%}" for share in (*shares, hidden(spans), hidden(read)))])
    return tables.text(lines)


def inscribed(span: Event) -> str:
    return chunk_of(span).removeprefix("batches ").replace(" to ", "–") or span["name"]


def middle_chunk(events: list[Event], middle: float) -> str:
    """The chunk whose kernel, or computation, is nearest to a time."""
    computed = [event for event in events if event["cat"] == "kernel"] or events
    chunks = [event for event in computed if chunk_of(event)]
    nearest = min(chunks, key=lambda event: abs(event["ts"] / 1e3 - middle), default={"name": ""})
    return chunk_of(nearest)


def chunk_of(event: Event) -> str:
    match = CHUNK.search(event["name"])
    return match[0] if match else ""


def load_events(path: Path) -> list[Event]:
    with explained("read", path):
        content = path.read_bytes()
    try:
        events = json.loads(content)["traceEvents"]
        if events and all(event["cat"] in COLOURS for event in events):
            return events
    except (ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{str(path)!r} is not a trace of a run.", "`flashcli run IN OUT --trace FILE` writes one.")


@click.command()
@click.argument("trace", type=Path)
@click.argument("path", metavar="PICTURE")
@click.option("--from", "start", type=float, default=0.0, help="Where the window begins, in milliseconds.")
@click.option("--to", "end", type=float, help="Where it ends, in milliseconds; with the trace by default.")
@click.option("--process", "processes", multiple=True, help="Draw only what stands under this name; repeatable.")
@click.option("--title", default="flashcli run", show_default=True, help="Write this above the picture.")
def main(trace: Path, path: str, start: float, end: float | None, processes: tuple[str, ...], title: str) -> None:
    """Draw TRACE to PICTURE, and print what its engines did at the same time."""
    check_picture(path)
    events = [event for event in load_events(trace) if not processes or event["pid"] in processes]
    if not events:
        raise UsageError(f"nothing in {str(trace)!r} stands under such a name.", "names are those that Perfetto shows.")
    last = max(event["ts"] + event["dur"] for event in events) / 1e3
    save_picture(picture(events, start, last if end is None else end, title), path)
    click.echo(engines_table(events))


if __name__ == "__main__":
    scripts.run(main)
