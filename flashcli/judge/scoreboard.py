"""Who is best: the ranking of the submissions on one device, and views of it as text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field

from flashcli import tables
from flashcli.judge.judging import ACCEPTED, Result
from flashcli.judge.results import record
from flashcli.judge.rules import RANKINGS

HEADINGS = ("rank", "submission", "accepted", "time", "score")  # by time alone, there is no other score to show


@dataclass
class Standing:
    """Where a submission stands. ``seconds`` is over the cases it has right; what ``score`` is, the ranking says."""

    submission: str
    results: dict[str, Result] = field(default_factory=dict)  # by case
    rank: int = 0
    passed: int = 0
    seconds: float = 0.0
    score: float = 0.0


@dataclass
class Board:
    """The standings on one device, best first. Times of different devices are never compared."""

    device: str
    ranking: str
    cases: list[str]
    standings: list[Standing]


def boards(results: list[Result], ranking: str) -> list[Board]:
    """One board for each device. A later result of the same submission and case replaces an earlier one."""
    by_device: dict[str, list[Result]] = {}
    for result in results:
        by_device.setdefault(result.device, []).append(result)
    return [_board(device, own, ranking) for device, own in by_device.items()]


def _board(device: str, results: list[Result], ranking: str) -> Board:
    standings: dict[str, Standing] = {}
    for result in results:
        standings.setdefault(result.submission, Standing(result.submission)).results[result.case] = result
    penalties = {result.case: result.penalty for result in results}
    best = {case: _best(case, standings) for case in penalties}
    for standing in standings.values():
        _score(standing, ranking, penalties, best)
    return Board(device, ranking, list(penalties), _ranked(list(standings.values()), ranking))


def _best(case: str, standings: dict[str, Standing]) -> float:
    """The least time in which anybody has the case right."""
    results = [standing.results[case] for standing in standings.values() if case in standing.results]
    return min((result.seconds for result in results if result.verdict == ACCEPTED), default=0.0)


def _score(standing: Standing, ranking: str, penalties: dict[str, float], best: dict[str, float]) -> None:
    """A case that a submission was not judged on counts like one it has wrong."""
    times = {case: result.seconds for case, result in standing.results.items() if result.verdict == ACCEPTED}
    standing.passed, standing.seconds = len(times), sum(times.values())
    if ranking == "passed":
        standing.score = standing.seconds
    elif ranking == "penalty":
        standing.score = sum(times.get(case, penalty) for case, penalty in penalties.items())
    else:
        standing.score = sum(best[case] / seconds for case, seconds in times.items()) / len(penalties)


def _ranked(standings: list[Standing], ranking: str) -> list[Standing]:
    def key(standing: Standing) -> tuple[float, float]:
        return {
            "passed": (-standing.passed, standing.seconds),
            "penalty": (standing.score, 0.0),
            "relative": (-standing.score, 0.0),
        }[ranking]

    ordered = sorted(standings, key=key)
    for place, standing in enumerate(ordered, start=1):
        tied = place > 1 and key(standing) == key(ordered[place - 2])
        standing.rank = ordered[place - 2].rank if tied else place
    return ordered


def headings(board: Board) -> tuple[str, ...]:
    return HEADINGS[:-1] if board.ranking == "passed" else HEADINGS


def rows(board: Board) -> list[tuple[str, ...]]:
    return [_row(standing, board)[: len(headings(board))] for standing in board.standings]


def _row(standing: Standing, board: Board) -> tuple[str, ...]:
    passed = f"{standing.passed} of {len(board.cases)}"
    seconds = f"{standing.seconds:.3f} s" if standing.passed else "-"
    score = f"{standing.score:.3f}" + ("" if board.ranking == "relative" else " s")
    return str(standing.rank), standing.submission, passed, seconds, score


def headline(board: Board) -> str:
    return f"{board.device}; ranking {board.ranking!r}: {RANKINGS[board.ranking]}"


def text(found: list[Board]) -> str:
    return "\n\n".join(f"{headline(board)}\n{_table(board)}" for board in found)


def _table(board: Board) -> str:
    return tables.text([headings(board), *rows(board)])


def markdown(found: list[Board]) -> str:
    return "\n".join(f"**{_escaped(headline(board))}**\n\n{_markdown_table(board)}" for board in found)


def _markdown_table(board: Board) -> str:
    return tables.markdown([[_escaped(cell) for cell in line] for line in (headings(board), *rows(board))])


def _escaped(cell: str) -> str:
    """Markdown of a text in which nothing is markup, so that no submission's name can add a link or a picture."""
    return "".join(f"&#{ord(sign)};" if sign in "\\`*_[]<>&|!~#" else sign for sign in cell)


def csv_text(found: list[Board]) -> str:
    """A row for each submission, with its seconds, or else its verdict, on each case."""
    cases = list(dict.fromkeys(case for board in found for case in board.cases))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["device", "ranking", *HEADINGS, *cases])
    for board in found:
        for standing in board.standings:
            start = [board.device, board.ranking, standing.rank, standing.submission, standing.passed]
            times = [_csv_cell(standing.results.get(case)) for case in cases]
            line = [*start, standing.seconds, standing.score, *times]
            writer.writerow([_harmless(cell) for cell in line])
    return buffer.getvalue()


def _csv_cell(result: Result | None) -> object:
    if result is None:
        return ""
    return result.seconds if result.verdict == ACCEPTED else result.verdict


def _harmless(cell: object) -> object:
    """Spreadsheets run a cell that begins like a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@")) else cell


def as_record(found: list[Board]) -> list[dict[str, object]]:
    return [
        {
            "device": board.device,
            "ranking": board.ranking,
            "standings": [
                {name: getattr(standing, name) for name in ("rank", "submission", "passed", "seconds", "score")}
                for standing in board.standings
            ],
            "results": [record(result) for standing in board.standings for result in standing.results.values()],
        }
        for board in found
    ]


def json_text(found: list[Board]) -> str:
    return json.dumps(as_record(found), indent=2) + "\n"


def page(found: list[Board]) -> str:
    from flashcli.judge.page import html

    return html(found)


WRITERS = {".md": markdown, ".csv": csv_text, ".json": json_text, ".html": page}
