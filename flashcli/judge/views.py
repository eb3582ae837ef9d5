"""Views of scoreboards: as text, Markdown, CSV, JSON and a page; in none of them is a submission more than text."""

from __future__ import annotations

import csv
import io
import re
import unicodedata

from flashcli.judge import page
from flashcli.judge.judging import ACCEPTED
from flashcli.judge.results import record
from flashcli.judge.scoreboard import Board, headline, lines
from flashcli.terminal import as_json, tables

# Heading in CSV -> what it is of a standing.
NUMBERS = {
    "rank": "rank", "submission": "submission", "accepted": "passed", "time": "seconds", "score": "score",
    "points": "points", "memory": "memory",
}  # fmt: skip
JOINER = "&#8288;"  # of no width: what it parts is no mention, and no link
MARKUP = r"[\\`*_\[\]<>&|!~#@]|://|www\."  # some sites make links of addresses that nobody marked up


def text(found: list[Board]) -> str:
    return "\n\n".join("\n".join([headline(board), *board.about, tables.text(lines(board))]) for board in found)


def markdown(found: list[Board]) -> str:
    return "\n".join(map(_markdown, found))


def _markdown(board: Board) -> str:
    about = "".join(f"{escaped(line)}\n\n" for line in board.about)
    table = tables.markdown([[escaped(cell) for cell in line] for line in lines(board)])
    return f"**{escaped(headline(board))}**\n\n{about}{table}"


def escaped(cell: str) -> str:
    """Markdown of a text in which nothing is markup: no submission's name adds a link, a picture, or calls somebody."""
    return re.sub(MARKUP, lambda found: "".join(map(_entity, found[0])), cell, flags=re.IGNORECASE)


def _entity(sign: str) -> str:
    return sign if sign.isalpha() else f"&#{ord(sign)};" + (JOINER if sign in "@#" else "")


def csv_text(found: list[Board]) -> str:
    """A row for each submission, with its seconds, or else its verdict, on each case."""
    cases = list(dict.fromkeys(case for board in found for case in board.cases))
    buffer = io.StringIO()
    # Texts in quotes, or some spreadsheets would take what follows a semicolon for another cell.
    writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow([_harmless(cell) for cell in ("device", "ranking", *NUMBERS, *cases)])
    for board in found:
        for standing in board.standings:
            numbers = [getattr(standing, name) for name in NUMBERS.values()]
            judged = [standing.results.get(case) for case in cases]
            times = [one and (one.seconds if one.verdict == ACCEPTED else one.verdict) for one in judged]
            line = [board.device, board.ranking, *numbers, *times]
            writer.writerow([_harmless(cell) for cell in line])
    return buffer.getvalue()


def _harmless(cell: object) -> object:
    """Quote a cell that spreadsheets would run as a formula, also one behind a blank or in letters of full width."""
    if isinstance(cell, str) and unicodedata.normalize("NFKC", cell).lstrip().startswith(("=", "+", "-", "@")):
        return f"'{cell}"
    return "" if cell is None else cell


def as_record(found: list[Board]) -> list[dict[str, object]]:
    return [
        {
            "device": board.device,
            "ranking": board.ranking,
            "judgings": board.about,
            "standings": [{name: getattr(standing, name) for name in NUMBERS.values()} for standing in board.standings],
            "results": [record(result) for standing in board.standings for result in standing.results.values()],
        }
        for board in found
    ]


def json_text(found: list[Board]) -> str:
    return as_json.json_text(as_record(found))


WRITERS = {".md": markdown, ".csv": csv_text, ".json": json_text, ".html": page.html}
