"""Tables in documents, made of records: ``python -m bench.documents DOCUMENT...`` brings them up to date."""

from __future__ import annotations

import re
from pathlib import Path

import click

from bench import records, scripts
from bench.views import VIEWS
from flashcli.files.outputs import write_whole

BLOCK = re.compile(r"(<!-- (\w+): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(document: Path) -> str:
    """The text of a Markdown document with each block between ``<!-- VIEW: RECORD -->`` and ``<!-- end -->`` made anew.

    VIEW is a name in `VIEWS`, RECORD the path of a record, relative to the document. Where that is not there, the block
    stays as it is.
    """

    def view(match: re.Match) -> str:
        path = document.parent / match[3]
        if not path.exists():
            return match[0]
        record = records.read(path.read_bytes())
        return (
            f"{match[1]}{VIEWS[match[2]](record.rows)}\n{records.circumstances_text(record.circumstances)}\n{match[4]}"
        )

    return BLOCK.sub(view, document.read_text())


@click.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(documents: tuple[Path, ...]) -> None:
    """Bring the tables in DOCUMENTS, Markdown, up to date with their records."""
    for document in documents:
        write_whole(document, refreshed(document))


if __name__ == "__main__":
    scripts.run(main)
