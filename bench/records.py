"""Records as they are read from files, and what a document says of how one was made."""

from __future__ import annotations

import json
from pathlib import Path
from types import UnionType

from bench import rows as kinds
from flashcli.errors import BadInput, explained
from flashcli.measure.records import Record
from flashcli.measure.rows import Failure, Row, Skipped


def read(text: str | bytes) -> Record:
    """A record from its file. ValueError if it is none."""
    found = json.loads(text)
    try:
        return Record(found["circumstances"], [kinds.read(row) for row in found["rows"]], found.get("ceilings"))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a record: {error!r}") from error


def load_record(path: Path, command: str, kind: type[Row] | UnionType) -> Record:
    """A record of ``command``, whose rows are of a kind that no other command's are."""
    with explained("read", path):
        content = path.read_bytes()
    try:
        record = read(content)
    except ValueError:
        record = Record({})
    if not record.rows or not all(isinstance(row, kind | Failure | Skipped) for row in record.rows):
        raise BadInput(f"{str(path)!r} is not a record of `{command}`.", f"`{command} --json FILE` writes one.")
    return record


def circumstances_text(circumstances: dict[str, object]) -> str:
    """The circumstances under which a record was made, in one line."""
    wordings = {
        "gpu": "{}", "driver": "driver {}", "cpu": "{}", "threads": "{} threads", "blas": "{}", "date": "{}",
        "commit": "commit {}", "command": "`{}`",
    }  # fmt: skip
    return ", ".join(wording.format(circumstances[name]) for name, wording in wordings.items() if name in circumstances)
