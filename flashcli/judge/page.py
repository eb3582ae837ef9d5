"""The scoreboard as one HTML file that needs nothing else: sortable tables, and a plot of time per case.

Whatever comes from a submission goes through `html.escape`; besides, the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import math
import string
from html import escape

from flashcli.judge import device_code, scoreboard
from flashcli.judge.judging import ACCEPTED
from flashcli.judge.scoreboard import Board, Standing

# Colour and shape both tell the first ones apart (colours after Okabe and Ito); the others are grey.
MARKS = (
    ("#0072b2", "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0-5 0Z"),  # circle
    ("#d55e00", "M-4.5-4.5H4.5V4.5H-4.5Z"),  # square
    ("#009e73", "M0-6L5.5 4.5H-5.5Z"),  # triangle
    ("#cc79a7", "M0-6L6 0L0 6L-6 0Z"),  # diamond
    ("#e69f00", "M0 6L5.5-4.5H-5.5Z"),  # triangle, pointing down
    ("#56b4e9", "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2Z"),  # plus
)
OTHER = ("#8a8a8a", "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z")
SHORTEST = 1e-6  # seconds
ROW, TOP = 22, 30  # heights in the plot, of a line and of the axis, in pixels


def html(boards: list[Board]) -> str:
    files = importlib.resources.files("flashcli.judge")
    script = (files / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return string.Template((files / "page.html").read_text(encoding="utf-8")).substitute(
        digest=digest, script=script, sections="\n".join(map(_section, boards))
    )


def _section(board: Board) -> str:
    return "\n".join([
        f"<section><h2>{escape(board.device)}</h2>",
        f"<p>Ranking: {escape(scoreboard.RANKINGS[board.ranking])}.</p>",
        *(f'<p class="about">{escape(line)}</p>' for line in board.about),
        _standings(board),
        "<h3>Time on each case</h3>",
        _legend(board),
        _plot(board),
        "<h3>All results</h3>",
        _results(board),
        _kernels(board),
        "</section>",
    ])  # fmt: skip


def _table(headings: tuple[str, ...], lines: list[str], numbers: str, kind: str) -> str:
    """A sortable table: the script orders the lines by their cells' data-key. ``numbers`` names columns set right."""
    kinds = [' class="n"' if heading in numbers else "" for heading in headings]
    head = "".join(
        f'<th scope="col"{kind}><button type="button">{escape(heading)}</button></th>'
        for heading, kind in zip(headings, kinds, strict=True)
    )
    return f'<table class="{kind}">' + f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>'


def _number(text: str, key: float | None) -> str:
    """A table cell that is set to the right and sorted by a number; without one it comes last."""
    return f'<td class="n" data-key="{"" if key is None else repr(key)}">{escape(text)}</td>'


def _sorted(text: str, key: float | str | None) -> str:
    return _cell(text) if isinstance(key, str) else _number(text, key)


def _standings(board: Board) -> str:
    lines, columns = [], scoreboard.columns(board)
    for standing in board.standings:
        cells = [_sorted(column.text(standing), column.key(standing)) for column in columns]
        lines.append(f'<tr data-of="{escape(standing.submission)}">{"".join(cells)}</tr>')
    headings = tuple(column.heading for column in columns)
    return _table(headings, lines, numbers="rank accepted points time score memory", kind="standings")


def _results(board: Board) -> str:
    lines = []
    for standing in board.standings:
        for case, result in standing.results.items():
            shape, good = f"({result.B}, {result.N}, {result.d})", result.verdict == ACCEPTED
            lines.append(
                f'<tr data-of="{escape(standing.submission)}">'
                + _cell(standing.submission)
                + _cell(case)
                + _number(shape, result.B * result.N**2 * result.d)
                + _number(scoreboard.shown(result.seconds), result.seconds)
                + _number(scoreboard.size(result.memory), result.memory)
                + _cell(f"{'✓' if good else '✗'} {result.verdict}", kind="good" if good else "bad")
                + _cell(result.detail, kind="detail")
                + "</tr>"
            )
    headings = ("submission", "case", "(B, N, d)", "time", "memory", "verdict", "detail")
    return _table(headings, lines, numbers="(B, N, d) time memory", kind="results")


def _kernels(board: Board) -> str:
    """The page's table of the submissions' kernels; empty where no program was looked into."""
    lines = []
    for standing in board.standings:
        for kernel in scoreboard.kernels(standing):
            name, arch, *numbers = device_code.cells(kernel)
            keys = (kernel.registers, kernel.shared, kernel.local, kernel.occupancy)
            row = [_cell(standing.submission), _cell(name), _cell(arch), *map(_number, numbers, keys)]
            lines.append(f'<tr data-of="{escape(standing.submission)}">{"".join(row)}</tr>')
    if not lines:
        return ""
    about = f"Occupancy is that of blocks of {device_code.THREADS} threads without dynamic shared memory."
    headings = ("submission", *device_code.HEADINGS)
    table = _table(headings, lines, numbers="registers shared local occupancy", kind="kernels")
    return f'<h3>Kernels</h3><p class="about">{about}</p>{table}'


def _shown(board: Board) -> list[Standing]:
    """The standings that have a mark in the plot: submissions with a case accepted."""
    return [standing for standing in board.standings if standing.passed]


def _mark(board: Board, standing: Standing) -> tuple[str, str]:
    place = _shown(board).index(standing)
    return MARKS[place] if place < len(MARKS) else OTHER


def _legend(board: Board) -> str:
    entries, shown = [], _shown(board)
    for standing in shown[: len(MARKS)]:
        colour, shape = _mark(board, standing)
        icon = f'<svg viewBox="-7 -7 14 14" aria-hidden="true"><path fill="{colour}" d="{shape}"/></svg>'
        entries.append(f'<li data-of="{escape(standing.submission)}">{icon} {escape(standing.submission)}</li>')
    if (others := len(shown) - len(MARKS)) > 0:
        entries.append(f"<li>and {others} more, in grey</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _plot(board: Board) -> str:
    """A line for each case, a mark for each submission that has it right, at its time; the axis is logarithmic.

    Places along the axis are shares of the width, so that a narrow page has letters and marks as large as a wide one.
    """
    accepted = [r.seconds for s in board.standings for r in s.results.values() if r.verdict == ACCEPTED]
    low, high = _decades([seconds for seconds in accepted if seconds is not None])
    height = TOP + ROW * len(board.cases) + 10
    names = max(map(len, board.cases), default=0)
    parts = [
        f'<svg class="plot" height="{height}" style="--name: {names + 2}ch" role="img"'
        ' aria-label="Time on each case; the table of all results has the numbers.">'
    ]
    for power in range(low, high + 1):
        x = _x(10.0**power, low, high)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 6}" y2="{height - 10}"/>')
        parts.append(f'<text x="{x}" y="{TOP - 12}" text-anchor="middle">{10.0**power:g} s</text>')
    parts += [_plot_line(board, case, TOP + ROW * (line + 0.5), low, high) for line, case in enumerate(board.cases)]
    return "".join(parts) + "</svg>"


def _plot_line(board: Board, case: str, y: float, low: int, high: int) -> str:
    judged = {s.submission: s.results[case] for s in board.standings if case in s.results}
    some = next(iter(judged.values()))
    failed = [f"{name}: {result.verdict}" for name, result in judged.items() if result.verdict != ACCEPTED]
    shape = f'<tspan class="more"> ({some.B}, {some.N}, {some.d})</tspan>'
    parts = [
        f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text x="-12" y="{y + 4:.1f}" text-anchor="end">{escape(case)}{shape}</text>',
    ]
    for standing in reversed(board.standings):  # the best on top
        result = standing.results.get(case)
        if result is not None and result.verdict == ACCEPTED and result.seconds is not None:
            colour, form = _mark(board, standing)
            parts.append(
                f'<svg class="mark" data-of="{escape(standing.submission)}" x="{_x(result.seconds, low, high)}"'
                f' y="{y:.1f}"><title>{escape(standing.submission)}: {result.seconds:.3f} s</title>'
                f'<path fill="{colour}" d="{form}"/></svg>'
            )
    if failed:
        parts.append(
            f'<text class="bad" x="100%" dx="14" y="{y + 4:.1f}">✗ {len(failed)}<tspan class="more"> failed</tspan>'
            f"<title>{escape(chr(10).join(failed))}</title></text>"
        )
    return "".join(parts)


def _decades(times: list[float]) -> tuple[int, int]:
    """Powers of ten, in seconds, between which all times lie but for those that no clock could have told from 0."""
    told = [max(time, SHORTEST) for time in times if time > 0] or [1.0]
    low = math.floor(math.log10(min(told)))
    return low, max(low + 1, math.ceil(math.log10(max(told))))


def _x(seconds: float, low: int, high: int) -> str:
    """The place of a time on the plot's logarithmic axis, as a percentage."""
    return f"{100 * (math.log10(max(seconds, 10.0**low)) - low) / (high - low):.2f}%"
