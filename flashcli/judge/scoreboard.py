"""Who is best: the ranking of the submissions on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flashcli.judge.device_code import ProgramKernel
from flashcli.judge.judging import ACCEPTED, Result
from flashcli.judge.results import description
from flashcli.judge.rules import RANKINGS
from flashcli.terminal import sizes


@dataclass
class Standing:
    """Where a submission stands. ``seconds`` is over the cases it has right; what ``score`` is, the ranking says.

    Without a case that is right there is neither a time nor a rank. ``memory`` is the most over all cases, in bytes.
    """

    submission: str
    results: dict[str, Result] = field(default_factory=dict)  # by case
    rank: int | None = None
    passed: int = 0
    points: float = 0.0
    memory: int | None = None
    seconds: float | None = None
    score: float | None = None


@dataclass
class Board:
    """The standings on one device, best first. Times of different devices are never compared."""

    device: str
    ranking: str
    points: dict[str, float]  # by case
    standings: list[Standing]
    about: list[str] = field(default_factory=list)  # of each judging that it is of: when, the seed, the rules

    @property
    def cases(self) -> list[str]:
        return list(self.points)


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
    points = {result.case: result.points for result in results}
    times = [_times(standing) for standing in standings.values()]
    best = {case: min((own[case] for own in times if case in own), default=0.0) for case in points}
    for standing in standings.values():
        _sum_up(standing, points)
        standing.score = _score(standing, ranking, points, penalties, best)
    return Board(device, ranking, points, _ranked(list(standings.values()), ranking), about)


def _times(standing: Standing) -> dict[str, float]:
    """Seconds on each case that a submission has right. One that it was not judged on counts like one it has wrong."""
    results = standing.results.items()
    return {case: r.seconds for case, r in results if r.verdict == ACCEPTED and r.seconds is not None}  # all have one


def _sum_up(standing: Standing, points: dict[str, float]) -> None:
    times = _times(standing)
    standing.passed, standing.points = len(times), sum(points[case] for case in times)
    standing.seconds = sum(times.values()) if times else None
    standing.memory = max((r.memory for r in standing.results.values() if r.memory is not None), default=None)


def _score(
    standing: Standing, ranking: str, points: dict[str, float], penalties: dict[str, float], best: dict[str, float]
) -> float | None:
    times = _times(standing)
    if ranking == "passed":
        return standing.seconds
    if ranking == "penalty":
        return sum(times.get(case, penalty) for case, penalty in penalties.items())
    # A time of 0, as far as the clock tells, is as quick as the best.
    shares = (points[case] * (best[case] / seconds if seconds else 1.0) for case, seconds in times.items())
    return sum(shares) / sum(points.values())


def _ranked(standings: list[Standing], ranking: str) -> list[Standing]:
    """Order standings by rank: equals share one; behind them, without a rank, those with no case accepted."""

    def key(standing: Standing) -> tuple[float, ...]:
        if ranking == "passed":
            return standing.passed == 0, -standing.points, standing.seconds or 0.0
        score = standing.score or 0.0
        return standing.passed == 0, (score if ranking == "penalty" else -score)

    ordered = sorted(standings, key=key)
    for place, standing in enumerate(ordered, start=1):
        tied = place > 1 and key(standing) == key(ordered[place - 2])
        standing.rank = None if not standing.passed else ordered[place - 2].rank if tied else place
    return ordered


class Column(NamedTuple):
    """A column of a board: what is shown of a standing, and by what it is sorted; None comes last."""

    heading: str
    text: Callable[[Standing], str]
    key: Callable[[Standing], float | str | None]


def columns(board: Board) -> list[Column]:
    """The board's columns that tell something: points only if they differ, memory if known, a score if not the time."""
    worth = sum(board.points.values())
    score = "{:.3f}".format if board.ranking == "relative" else shown
    found = [
        Column("rank", lambda one: "-" if one.rank is None else str(one.rank), lambda one: one.rank),
        Column("submission", lambda one: one.submission, lambda one: one.submission),
        Column("accepted", lambda one: f"{one.passed} of {len(board.points)}", lambda one: one.passed),
    ]
    if set(board.points.values()) != {1.0}:
        found.append(Column("points", lambda one: f"{one.points:g} of {worth:g}", lambda one: one.points))
    found.append(Column("time", lambda one: shown(one.seconds), lambda one: one.seconds))
    if board.ranking != "passed":
        found.append(Column("score", lambda one: score(one.score or 0.0), lambda one: one.score))
    if any(standing.memory is not None for standing in board.standings):
        found.append(Column("memory", lambda one: size(one.memory), lambda one: one.memory))
    return found


def lines(board: Board) -> list[list[str]]:
    """The rows of a board as text: the headings, then the cells of each standing."""
    chosen = columns(board)
    body = [[column.text(standing) for column in chosen] for standing in board.standings]
    return [[column.heading for column in chosen], *body]


def kernels(standing: Standing) -> list[ProgramKernel]:
    """The kernels of a submission's program, which all its results repeat."""
    return next((list(result.kernels) for result in standing.results.values() if result.kernels), [])


def size(memory: int | None) -> str:
    return "-" if memory is None else sizes.text(memory)


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


def headline(board: Board) -> str:
    return f"{board.device}; ranking {board.ranking!r}: {RANKINGS[board.ranking]}"
