from __future__ import annotations

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


@click.command(
    epilog=options.examples(
        "flashcli scoreboard results.jsonl",
        "flashcli scoreboard monday.jsonl tuesday.jsonl --rank relative --board board.html",
    )
)
@click.argument("files", nargs=-1, required=True, metavar="RESULTS...")
@rank_option
@board_option
def command(files: tuple[str, ...], ranking: str | None, boards: tuple[str, ...]) -> None:
    """Rank what `judge --results` has written, with one scoreboard for each kind of GPU (or CPU).

    Where files have results of the same submission, case and device, those of the last file count.
    """
    from flashcli.files.outputs import check_distinct
    from flashcli.judge import results, scoreboard, views

    check_formats(boards)
    for file in files:
        check_distinct(file, *boards)
    judgings = [results.read(Path(file)) for file in files]
    found = [result for _, own in judgings for result in own]
    standings = scoreboard.boards(found, ranking or "passed", [conditions for conditions, _ in judgings])
    click.echo(views.text(standings) or "no results yet")
    write_boards(standings, boards)


def check_formats(paths: tuple[str, ...]) -> None:
    """Done before any judging, for it would be a pity to find out after it."""
    for path in paths:
        if Path(path).suffix not in FORMATS:
            raise click.BadParameter(f"{path!r} should end in {', '.join(FORMATS)}.", param_hint="--board")


def write_boards(standings: list, paths: tuple[str, ...]) -> None:
    from flashcli.files.outputs import write_whole
    from flashcli.judge import views

    for path in map(Path, paths):
        write_whole(path, views.WRITERS[path.suffix](standings))
