"""A docstring is understood alone, by a reader who came in by grep or hover."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from support import ROOT

POINTS_ELSEWHERE = re.compile(r"(The same|Of|Those|These|That|Its|It|They|Their|What|As|All that)\b")
CODE = re.compile(r"(`+).+?\1", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.?!])\s+|\n\s*\n|\n(?=\s*\w+(?:, \w+)* : )|\n(?=\s*[-*] )")  # also of a list's entry
MOST_WORDS = 40
FILES = [path for folder in ("flashcli", "bench") for path in sorted((ROOT / folder).rglob("*.py"))]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def faults(source: str) -> Iterator[str]:
    """Say for each docstring at fault where it is, and how it begins, or its sentence that is too long."""
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        where = getattr(node, "name", "the module")
        if text and (first := POINTS_ELSEWHERE.match(text)):
            yield f"{where} begins with {first[0]!r}"
        for sentence in SENTENCE_END.split(CODE.sub("code", text or "")):
            if len(sentence.split()) > MOST_WORDS:
                yield f"{where} has a sentence of {len(sentence.split())} words: {sentence[:60]!r}"


def test_a_docstring_is_understood_alone_and_has_short_sentences():
    assert [f"{path.relative_to(ROOT)}: {fault}" for path in FILES for fault in faults(path.read_text())] == []


@pytest.mark.parametrize(
    ("docstring", "told"),
    [
        ("The same for rows.", "begins with 'The same'"), ("Its result.", "begins with 'Its'"),
        ("One. " + "word " * 41, "has a sentence of 41 words"), ("Item of it.", ""),
        ("`" + "code " * 50 + "` is one.", ""),
    ],
    ids=["same", "its", "long", "noun", "code"],
)  # fmt: skip
def test_a_docstring_that_points_elsewhere_or_runs_on_is_found(docstring, told):
    assert [told in fault for fault in faults(f'def f():\n    """{docstring}"""\n')] == [True] * bool(told)
