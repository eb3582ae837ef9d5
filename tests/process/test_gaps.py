"""Loops in blocks that a signal's exception must not leave without their cleaning up.

From Python 3.12 on, where a loop goes back on a condition is outside of the `with` or `try` that it is in; and there
Python looks for signals. So what is raised there skips `__exit__`, `finally` and `except`. A loop in a function of its
own has no such gap, nor has a `for` that does not end in an `if`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

# Nothing is raised in the first, and nothing is lost with the others: a file is closed when it is forgotten.
HARMLESS = ("held()", "contextlib.suppress(", "explained(", "open(")


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """All that is in a node, but for what is in a frame of its own."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef | ast.GeneratorExp):
        for child in ast.iter_child_nodes(node):
            yield from inside(child)


def cleans_up(block: ast.AST) -> bool:
    if isinstance(block, ast.With):
        return not all(ast.unparse(item.context_expr).startswith(HARMLESS) for item in block.items)
    return isinstance(block, ast.Try) and bool(
        block.finalbody or any(h.type is None or ast.unparse(h.type) == "BaseException" for h in block.handlers)
    )


def goes_back_on_a_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.For):
        return isinstance(node.body[-1], ast.If)
    comprehension = isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)
    return isinstance(node, ast.While) or (comprehension and any(part.ifs for part in node.generators))


def gaps(source: str) -> list[int]:
    """The lines of loops with such a gap."""
    blocks = (node for node in ast.walk(ast.parse(source)) if cleans_up(node))
    found = (node for block in blocks for part in block.body for node in inside(part))
    return sorted({node.lineno for node in found if goes_back_on_a_condition(node)})


def test_no_loop_can_be_left_without_cleaning_up():
    found = {str(path.relative_to(ROOT)): gaps(path.read_text()) for path in Path(ROOT, "flashcli").rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("while x: f()", [2]), ("for y in x:\n  if y: f()", [2]), ("g([y for y in x if y])", [2]),
        ("for y in x: f()", []), ("g(y for y in x if y)", []), ("g([y for y in x])", []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", ["with lock:", "try:"])
def test_a_gap_is_seen(body, found, block):
    text = f"{block}\n " + body.replace("\n", "\n ") + ("\nfinally: f()" if block == "try:" else "")
    assert gaps(text) == found
