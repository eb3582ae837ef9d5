"""Results of a command or a script as JSON: the option ``--json``, and how it is written."""

from __future__ import annotations

import math

import click

from flashcli.files.outputs import check_creatable, check_distinct, write_whole
from flashcli.terminal import parameters

PRINT = "-"  # in the place of a file's name


def creatable(context: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Check before the work, as an option's callback, that the FILE for the results can be written."""
    if path not in (None, PRINT) and not context.resilient_parsing:
        check_creatable(path)
    return path


json_option = click.option(
    "--json",
    "json_path",
    metavar="FILE",
    type=parameters.FILE_OR_STREAM,
    callback=creatable,
    help="Write what was found to FILE as JSON; - prints that, in place of the text.",
)


def check_apart(json_path: str | None, *others: str | None) -> None:
    """Refuse to overwrite one of the ``others``, the files that a command reads or writes, with that of ``--json``."""
    for path in others:
        check_distinct(path, None if json_path == PRINT else json_path)


def json_text(found: object) -> str:
    import json  # here, as everything that few calls need: imports are most of a small run's time

    return json.dumps(finite(found), indent=2) + "\n"


def finite(value: object) -> object:
    """Replace NaN and Inf by None, anywhere in a value: JSON has null in their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def present(found: object, text: str, json_path: str | None, err: bool = False) -> None:
    """Print the text; write what was found to the file of ``--json``, or print it in place of the text.

    Where ``err`` is true, stdout has something else already, and stderr is printed to.
    """
    if json_path != PRINT:
        click.echo(text, err=err)
    if json_path is not None:
        write(found, json_path, err)


def write(found: object, json_path: str, err: bool = False) -> None:
    if json_path == PRINT:
        click.echo(json_text(found), nl=False, err=err)
    else:
        write_whole(json_path, json_text(found))
