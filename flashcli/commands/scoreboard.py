from __future__ import annotations

import secrets
from pathlib import Path

import click

from flashcli.commands import options

RANKINGS = ("passed", "penalty", "relative")  # a test holds them to judge/rules.py
FORMATS = (".html", ".md", ".csv", ".json")
rank_option = click.option(
    "--rank", "ranking", type=click.Choice(RANKINGS),
    help="passed: most cases accepted, then least time (the default); penalty: least time, a case not accepted "
    "counting as its penalty; relative: largest mean of best time / own time.",
)  # fmt: skip
board_option = click.option(
    "--board", "boards", multiple=True, metavar="FILE", help=f"Write the scoreboard: {', '.join(FORMATS)}; repeatable."
)
feedback_option = click.option(
    "--feedback", metavar="DIR", help="Write a Markdown file for each submission into DIR, to be handed to its author."
)


@click.command(
    epilog=options.examples(
        "flashcli scoreboard results.jsonl",
        "flashcli scoreboard results.jsonl --anonymous --board board.html",
        "flashcli scoreboard monday.jsonl tuesday.jsonl --rank relative --board board.html",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="RESULTS...")
@rank_option
@board_option
@click.option(
    "--anonymous", is_flag=True, help="Show pseudonyms, always those that the first file of results explains."
)
@feedback_option
def command(
    files: tuple[str, ...], ranking: str | None, boards: tuple[str, ...], anonymous: bool, feedback: str | None
) -> None:
    """Rank what `judge --results` has written, with one scoreboard for each kind of GPU (or CPU).

    Where files have results of the same submission, case and device, those of the last file count.
    """
    from flashcli.files.outputs import check_distinct
    from flashcli.judge import pseudonyms, results, scoreboard, views
    from flashcli.judge.feedback import prepare as prepare_feedback
    from flashcli.judge.feedback import write as write_feedback

    check_formats(boards)
    prepare_feedback(feedback)
    for file in files:
        check_distinct(file, *boards)
    judgings = [results.read(Path(file)) for file in files]
    found = [result for _, own in judgings for result in own]
    conditions = [conditions for conditions, _ in judgings]
    key = pseudonyms.key_of(conditions)
    write_feedback(feedback, scoreboard.boards(found, ranking or "passed"), key)
    if anonymous:
        if key is None:
            options.notice("an earlier flashcli wrote these results: their pseudonyms are others each time.")
        key = key or secrets.token_hex()
        found = [pseudonyms.disguised(result, key) for result in found]
    standings = scoreboard.boards(found, ranking or "passed", conditions)
    click.echo(views.text(standings) or "no results yet")
    write_boards(standings, boards)


def check_formats(paths: tuple[str, ...]) -> None:
    """Check the formats of a scoreboard's files before any judging: to find out after it would be a pity."""
    for path in paths:
        if Path(path).suffix not in FORMATS:
            raise click.BadParameter(f"{path!r} should end in {', '.join(FORMATS)}.", param_hint="--board")


def write_boards(standings: list, paths: tuple[str, ...]) -> None:
    from flashcli.files.outputs import write_whole
    from flashcli.judge import views

    for path in map(Path, paths):
        write_whole(path, views.WRITERS[path.suffix](standings))
