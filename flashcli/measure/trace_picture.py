"""Draw the trace of `flashcli run --trace` as an SVG: a row for each track, a bar for each span, time to the right.

``python -m flashcli.measure.trace_picture TRACE.json OUT.svg --from 50 --to 90`` shows a window of it, in milliseconds.
One chunk, in the middle of the window, is dark, so that the eye can follow it from row to row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

import click

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
DARK = "#222"
WIDTH, LEFT, RIGHT, TOP, ROW, BAR, LETTER = 1100, 124, 14, 44, 21, 16, 6  # pixels
CHUNK = re.compile(r"batch.*")


def picture(events: list[dict], start: float, end: float, title: str) -> str:
    """The events of a Chrome trace between two times, in milliseconds, as an SVG."""
    shown = [event for event in events if event["ts"] < end * 1e3 and event["ts"] + event["dur"] > start * 1e3]
    shown.sort(key=lambda event: (list(COLOURS).index(event["cat"]), event["tid"], event["ts"]))
    rows = [list(spans) for _, spans in groupby(shown, key=lambda event: event["tid"])]
    followed, height = middle_chunk(shown, (start + end) / 2), TOP + ROW * len(rows) + 30
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="26" width="10" height="10" fill="{DARK}"/>',
        f'<text x="{LEFT + 15}" y="35">one chunk on its way: {followed}</text>',
        *axis(start, end, TOP + ROW * len(rows)),
        *(part for index, spans in enumerate(rows) for part in row(spans, TOP + ROW * index, start, end, followed)),
        "</svg>\n",
    ])  # fmt: skip


def middle_chunk(events: list[dict], middle: float) -> str:
    """The chunk whose kernel, or computation, is nearest to a time."""
    computed = [event for event in events if event["cat"] == "kernel"] or events
    chunks = [event for event in computed if CHUNK.search(event["name"])]
    nearest = min(chunks, key=lambda event: abs(event["ts"] / 1e3 - middle), default={"name": ""})
    return chunk_of(nearest)


def chunk_of(event: dict) -> str:
    match = CHUNK.search(event["name"])
    return match[0] if match else ""


def x(microseconds: float, start: float, end: float) -> float:
    """Pixels from the left, for a time within the window of milliseconds or cut off at its edges."""
    return LEFT + (WIDTH - LEFT - RIGHT) * (min(max(microseconds / 1e3, start), end) - start) / (end - start)


def axis(start: float, end: float, bottom: int) -> Iterator[str]:
    """Lines at round times, some eight of them, with the milliseconds below."""
    rough = (end - start) / 8
    step = next(s for s in (10 ** math.floor(math.log10(rough)) * k for k in (1, 2, 5, 10)) if s >= rough)
    for number in range(math.ceil(start / step), math.floor(end / step) + 1):
        tick = x(number * step * 1e3, start, end)
        yield f'<path d="M{tick:.1f} {TOP - 4}V{bottom + 4}" stroke="#ddd"/>'
        yield f'<text x="{tick:.1f}" y="{bottom + 18}" text-anchor="middle">{number * step:g} ms</text>'


def row(spans: list[dict], top: int, start: float, end: float, followed: str) -> Iterator[str]:
    """A label, and the bars: those of the chunk to follow dark, the others in the colour of the phase."""
    yield f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(spans[0]["tid"])}</text>'
    dark = [span for span in spans if followed and chunk_of(span) == followed]
    light = [span for span in spans if span not in dark]
    for some, colour, ink in ((light, COLOURS[spans[0]["cat"]], DARK), (dark, DARK, "#fff")):
        if some:
            edges = [(x(span["ts"], start, end), x(span["ts"] + span["dur"], start, end)) for span in some]
            path = "".join(bar(left, right, top) for left, right in edges)
            yield f'<path fill="{colour}" stroke="#fff" stroke-width=".5" d="{path}"/>'
            texts = "".join(inscription(span, *edge, top) for span, edge in zip(some, edges, strict=True))
            yield f'<g fill="{ink}" font-size="10" text-anchor="middle">{texts}</g>'


def bar(left: float, right: float, top: int) -> str:
    width = max(right - left, 1.2)  # short spans are to be seen too
    return f"M{left:.1f} {top}h{width:.1f}v{BAR}h-{width:.1f}z"


def inscription(span: dict, left: float, right: float, top: int) -> str:
    """What a bar stands for, where there is room for it."""
    text = chunk_of(span).removeprefix("batches ").replace(" to ", "–") or span["name"]
    if len(text) * LETTER > right - left:
        return ""
    return f'<text x="{(left + right) / 2:.0f}" y="{top + 12}">{escape(text)}</text>'


@click.command()
@click.argument("trace", type=Path)
@click.argument("svg", type=Path)
@click.option("--from", "start", type=float, default=0.0, help="Milliseconds.")
@click.option("--to", "end", type=float, help="Milliseconds; to the end by default.")
@click.option("--title", default="flashcli run", show_default=True)
def main(trace: Path, svg: Path, start: float, end: float | None, title: str) -> None:
    """Draw TRACE as SVG."""
    events = json.loads(trace.read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events) / 1e3
    svg.write_text(picture(events, start, end or last, title))


if __name__ == "__main__":
    main()
