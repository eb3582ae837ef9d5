"""Names for boards that everybody may see: one submission has one pseudonym, which only its results' file explains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from flashcli.judge.judging import Result


def key_of(judgings: Iterable[dict[str, Any]]) -> str | None:
    """The secret of the first judging that has one, so that more results under it leave pseudonyms as they are."""
    return next((key for conditions in judgings if isinstance(key := conditions.get("secret"), str) and key), None)


def pseudonym(submission: str, key: str) -> str:
    """A name of eight digits, which nobody can find out by trying names who does not have the key."""
    return f"anon-{hashlib.blake2b(submission.encode(), key=key.encode()[:64], digest_size=4).hexdigest()}"


def disguised(result: Result, key: str) -> Result:
    """A result under a pseudonym, without what a program has said or named, which may tell its author."""
    return result._replace(submission=pseudonym(result.submission, key), detail="", printed="", kernels=())
