"""Who is best: the ranking of the submissions on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from flashcli.judge.judging import ACCEPTED, Result
from flashcli.judge.results import description
from flashcli.judge.rules import RANKINGS

HEADINGS = ("rank", "submission", "accepted", "time", "score")  # by time alone, there is no other score to show


@dataclass
class Standing:
    """Where a submission stands. ``seconds`` is over the cases it has right; what ``score`` is, the ranking says.

    Without a case that is right there is no time.
    """

    submission: str
    results: dict[str, Result] = field(default_factory=dict)  # by case
    rank: int = 0
    passed: int = 0
    seconds: float | None = None
    score: float | None = None


@dataclass
class Board:
    """The standings on one device, best first. Times of different devices are never compared."""

    device: str
    ranking: str
    cases: list[str]
    standings: list[Standing]
    about: list[str] = field(default_factory=list)  # of each judging that it is of: when, the seed, the rules


def boards(results: list[Result], ranking: str, judgings: Iterable[dict[str, object]] = ()) -> list[Board]:
    """One board for each device, of results and of the circumstances in which they came about.

    A later result of the same submission and case replaces an earlier one.
    """
    by_device: dict[str, list[Result]] = {}
    for result in results:
        by_device.setdefault(result.device, []).append(result)
    about: dict[str, list[str]] = {}
    for conditions in judgings:
        about.setdefault(str(conditions.get("device")), []).append(description(conditions))
    return [_board(device, own, ranking, about.get(device, [])) for device, own in by_device.items()]


def _board(device: str, results: list[Result], ranking: str, about: list[str]) -> Board:
    standings: dict[str, Standing] = {}
    for result in results:
        standings.setdefault(result.submission, Standing(result.submission)).results[result.case] = result
    penalties = {result.case: result.penalty for result in results}
    best = {case: _best(case, standings) for case in penalties}
    for standing in standings.values():
        _score(standing, ranking, penalties, best)
    return Board(device, ranking, list(penalties), _ranked(list(standings.values()), ranking), about)


def _best(case: str, standings: dict[str, Standing]) -> float:
    """The least time in which anybody has the case right."""
    results = [standing.results[case] for standing in standings.values() if case in standing.results]
    return min(
        (result.seconds for result in results if result.verdict == ACCEPTED and result.seconds is not None),
        default=0.0,
    )


def _score(standing: Standing, ranking: str, penalties: dict[str, float], best: dict[str, float]) -> None:
    """A case that a submission was not judged on counts like one it has wrong."""
    accepted = {case: result.seconds for case, result in standing.results.items() if result.verdict == ACCEPTED}
    times = {case: seconds for case, seconds in accepted.items() if seconds is not None}  # which all of them are
    standing.passed, standing.seconds = len(times), sum(times.values()) if times else None
    if ranking == "passed":
        standing.score = standing.seconds
    elif ranking == "penalty":
        standing.score = sum(times.get(case, penalty) for case, penalty in penalties.items())
    else:
        # Those that took no time at all, as far as the clock tells, are as quick as the best.
        shares = (best[case] / seconds if seconds else 1.0 for case, seconds in times.items())
        standing.score = sum(shares) / len(penalties)


def _ranked(standings: list[Standing], ranking: str) -> list[Standing]:
    def key(standing: Standing) -> tuple[float, float]:
        if ranking == "passed":
            return -standing.passed, math.inf if standing.seconds is None else standing.seconds
        score = standing.score or 0.0
        return (score if ranking == "penalty" else -score), 0.0

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
    score = f"{standing.score:.3f}" if board.ranking == "relative" else shown(standing.score)
    return str(standing.rank), standing.submission, passed, shown(standing.seconds), score


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def headline(board: Board) -> str:
    return f"{board.device}; ranking {board.ranking!r}: {RANKINGS[board.ranking]}"
