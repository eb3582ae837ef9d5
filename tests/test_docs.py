"""The documents and the help texts cannot drift from the program."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import importlib
import json
import re
import shlex
import shutil
import signal
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from support import ROOT, python_in

from bench.documents import BLOCK, refreshed
from flashcli import attention, errors
from flashcli.cli import COMMANDS, group
from flashcli.files.distributions import DISTRIBUTIONS
from flashcli.judge import rules
from flashcli.kernels.attention import KERNELS

PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "cuda/README.md",
    *sorted(ROOT.glob("cuda/*/README.md")),
]  # fmt: skip
README = PAGES[0].read_text()
COMMAND = re.compile(r"(?:(?:mpirun|srun) .*)?\bflashcli(?: (.*))?$|\S*python (-m (?:flashcli|bench)\b.*)")
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
OTHERS_OPTIONS = {"--help", "--bind-to"}  # click's, mpirun's
MADE = {"testcases/large/"}  # by `make testcases`


def on(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda path: str(path.relative_to(ROOT)))


page = on(PAGES)


def prose(page: Path) -> str:
    """A page without the tables made of records, whose command lines are those of their time."""
    return BLOCK.sub("", page.read_text())


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in INLINE.findall(FENCE.sub("", prose(page)))]


def command_lines(page: Path) -> Iterator[list[str]]:
    """Those of a page, as `commands_in` gives them."""
    fenced = "\n".join(FENCE.findall(prose(page))).splitlines()
    return commands_in([*(line for line in fenced if not line.startswith("from ")), *inline_code(page)])


def commands_in(lines: Iterable[str]) -> Iterator[list[str]]:
    """The words after ``flashcli``, or from ``-m`` on for a script of ours, in each line that is a command.

    Two blanks begin what is said about it.
    """
    for code in lines:
        line = re.split(r"  +|\s[#>|;&]|\s\.\.\.", code.removeprefix("$ ").strip())[0]
        if found := re.match(
            r"(?:(?:mpirun|srun) .*)?\bflashcli(?: (.*))?$|\S*python (-m (?:flashcli|bench)\b.*)", line
        ):
            yield shlex.split(found[1] or found[2] or "")


@functools.cache
def command_of(name: str) -> click.Command:
    return group.get_command(click.Context(group), name)


def script(name: str) -> click.Command:
    """The command of a module, or of a package's `__main__`, that is called by ``python -m``."""
    module = importlib.import_module(name)
    return importlib.import_module(f"{name}.__main__" if hasattr(module, "__path__") else name).main


def parse(words: list[str]) -> None:
    """As the command line does it, but for what is left out: a page may speak of `flashcli run`."""
    name, *arguments = words
    if name == "-m":
        name, *arguments = arguments
        command = script(name)
    else:
        assert name in COMMANDS, name
        command = command_of(name)
    expanded = [match for word in arguments for match in (glob.glob(word, root_dir=ROOT) if "*" in word else [word])]
    try:
        with contextlib.chdir(ROOT):
            command.make_context(name, expanded)
    except click.MissingParameter:
        pass
    except click.exceptions.Exit:  # --help
        pass


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


# ---- the README


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name):
    assert f"flashcli {name}" in README


def test_every_exit_code_is_in_the_readme():
    codes = {kind.exit_code for kind in errors.FlashError.__subclasses__()} | {0, errors.MISMATCH, errors.INTERRUPTED}
    assert len(codes) > 10
    for code in codes | {128 + signal.SIGTERM}:
        assert re.search(rf"\|\s*{code}\s*\|", README), code


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


# ---- all pages


def test_the_contents_list_names_every_page():
    contents = ROOT / "docs/README.md"
    named = {(contents.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", contents.read_text())}
    missing = [str(path.relative_to(ROOT)) for path in set(PAGES) - {contents} - named]
    assert not missing, f"add them to {contents.relative_to(ROOT)}"


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_on_the_page_of_its_ladder(name):
    kernel = KERNELS[name]
    text = (ROOT / "cuda" / kernel.file).with_name("README.md").read_text()
    assert f"`{Path(kernel.file).name}`" in text and re.search(rf"^\*\*{name}\.\*\*", text, re.MULTILINE)


def test_every_source_file_of_cuda_is_on_its_folders_page_or_the_one_above():
    for path in (ROOT / "cuda").rglob("*.*"):
        if path.suffix in (".c", ".cu", ".cuh", ".h"):
            pages = (path.with_name("README.md"), ROOT / "cuda/README.md")
            assert any(path.name in page.read_text() for page in pages), path


@page
def test_links_and_their_anchors_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


@page
def test_lines_are_at_most_120_columns(page):
    long = [line for line in prose(page).splitlines() if len(line) > 120]
    assert [line for line in long if not line.startswith(("|", "!["))] == []


def sentences(page: Path) -> Iterator[str]:
    """Sentences of the page's prose, list items and table cells; code is one word, links are their text."""
    text = re.sub(r"\]\([^)\s]*\)", "]", INLINE.sub("code", FENCE.sub("", prose(page))))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) )|\|", text):
        yield from re.split(r"(?<=[^.][.!?])[*_)\"]*\s", " ".join(paragraph.split()))


@on([page for page in PAGES if page != ROOT / "cuda/attention/README.md"])
def test_no_sentence_has_more_than_40_words(page):
    """Figures and symbols are no words."""
    long = [text for text in sentences(page) if sum(bool(re.search("[A-Za-z]", word)) for word in text.split()) > 40]
    assert long == []


@page
def test_every_command_line_names_a_command_and_options_that_exist(page):
    for words in command_lines(page):
        if words:
            parse(words)


def test_command_lines_are_found_wherever_they_stand():
    lines = [words for page in PAGES for words in command_lines(page)]
    assert ["judge", "testcases"] in lines and ["run", "in", "out"] in lines and ["doctor"] in lines
    assert any(words[:1] == ["-m"] for words in lines)


@pytest.mark.parametrize("record", sorted(ROOT.glob("cuda/records/*.json")), ids=lambda path: path.stem)
def test_the_command_of_a_record_can_be_run_today(record):
    [words] = commands_in([json.loads(record.read_text())["circumstances"]["command"]])
    parse(words)


@page
def test_every_option_that_is_named_exists(page):
    scripts = [script(words[1]) for words in command_lines(page) if words[:1] == ["-m"]]
    known = {option for one in (*map(command_of, COMMANDS), *scripts) for param in one.params for option in param.opts}
    named = {code.split()[0].partition("=")[0] for code in inline_code(page) if code.startswith("--")}
    assert named <= known | OTHERS_OPTIONS


@page
def test_every_file_that_is_named_exists(page):
    for code in inline_code(page):
        if code not in MADE and re.fullmatch(r"(flashcli|bench|cuda|docs|testcases|tests)/[\w./-]*", code):
            assert (ROOT / code).exists(), code


def test_every_module_that_a_source_of_a_kernel_names_exists():
    sources = [path for path in ROOT.glob("cuda/**/*.*") if path.suffix in (".c", ".cu", ".cuh", ".h")]
    named = {name for path in sources for name in re.findall(r"\bflashcli/[\w/]+\.py\b", path.read_text())}
    assert len(named) > 2 and [name for name in named if not (ROOT / name).exists()] == []


def test_every_test_that_is_named_exists():
    named = {name for page in PAGES for code in inline_code(page) for name in re.findall(r"^test_\w+$", code)}
    there = {
        name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 5 and named <= there


def test_the_tables_are_those_of_the_records():
    for page in PAGES:
        assert page.read_text() == refreshed(page), f"run: python -m bench.documents {page.relative_to(ROOT)}"
    shown = {match[3] for page in PAGES for match in BLOCK.finditer(page.read_text())}
    assert {Path(name).name for name in shown} >= {"h200.json", "ladder.json", "cpu.json", "end-to-end.json"}


def test_no_text_installs_the_stranger_who_has_our_name_on_the_package_index():
    folders = ("flashcli", "bench", "cuda", "docs", "tests", "testcases")
    paths = [*ROOT.glob("*.*"), ROOT / "Makefile", *(path for name in folders for path in (ROOT / name).rglob("*.*"))]
    texts = [path for path in paths if path.suffix in (".py", ".md", ".toml", ".sh", ".cu", ".cuh", ".c", ".h", "")]
    assert len(texts) > 100
    named = re.compile(r"pip install ['\"]?flashcli|['\"]flashcli\[")
    assert [str(path) for path in texts if path.is_file() and named.search(path.read_text())] == []


# ---- single pages


def test_the_rules_file_that_is_shown_has_every_key_and_the_defaults(tmp_path):
    [shown] = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs/judging.md").read_text(), re.DOTALL | re.MULTILINE)
    path = tmp_path / "rules.toml"
    path.write_text(shown)
    assert rules.load(path) == rules.Rules(cases=tmp_path / "testcases", select=("t[01-30]",))
    path.write_text(re.sub(r"^# (?=\w+ = |\[)", "", shown, flags=re.MULTILINE))
    given = rules.load(path)
    assert all(getattr(given, item.name) not in (None, (), {}) for item in dataclasses.fields(given))
    assert set(re.findall(r"^(?:# )?(\w+) = ", shown, re.MULTILINE)) >= set(rules.CHECKS) - {"environment", "case"}


def rooms_drawn() -> tuple[list[str], set[str]]:
    """The layers of the picture of the rooms, as the contract writes them, and the paths of all that it names."""
    [picture] = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/contributing.md").read_text(), re.DOTALL | re.M)
    layers: list[str] = []
    named: list[str] = []
    for line in picture.splitlines():
        found = re.fullmatch(r"([ ┌│└]) ( *)(\w+)  +(\S.*)", line)
        assert found, f"a bracket or a blank, a name, and what lives there: {line}"
        bracket, inner, name, _ = found.groups()
        if inner:
            named.append(f"{named[-1].partition('/')[0]}/{name}")
            continue
        named.append(name)
        layers[-1:] = [f"{layers[-1]} | {name}"] if bracket in "│└" else [*layers[-1:], name]
    assert len(named) == len(set(named))
    return layers, set(named)


def test_the_picture_of_the_rooms_is_the_contract_that_lint_checks():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["name"] == "rooms"]
    assert rooms_drawn()[0] == layers


def test_every_room_and_every_module_at_the_door_has_a_line_in_the_picture():
    modules = {path.relative_to(ROOT / "flashcli") for path in ROOT.glob("flashcli/**/*.py")}
    rooms = {str(path.parent) for path in modules} - {"."}
    door = {path.stem for path in modules if len(path.parts) == 1} - {"__init__"}
    assert rooms_drawn()[1] == rooms | door


def test_at_most_eight_modules_are_at_the_door():
    assert len(list(ROOT.glob("flashcli/*.py"))) <= 8


def test_every_distribution_has_a_line():
    assert set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/files.md").read_text(), re.MULTILINE)) == set(DISTRIBUTIONS)


def test_every_environment_variable_that_is_read_has_a_line():
    modules = [path for path in (ROOT / "flashcli").rglob("*.py") if path.parent.name != "judge"]
    code = "".join(path.read_text() for path in modules)
    read = set(re.findall(r'environ(?:\.get\(|\.setdefault\(|\[)"(\w+)"', code))
    text = (ROOT / "docs/run.md").read_text()
    assert len(read) > 5 and [name for name in read if f"`{name}`" not in text and f"${name}" not in text] == []


def test_three_lines_of_numpy_read_and_write_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "testcases/t01.in", "x.in")
    shutil.copy(ROOT / "testcases/t01.ref", "x.out")
    [shown] = [block for block in python_in(PAGES[0]) if "np.fromfile" in block]
    values: dict[str, Any] = {}
    exec(shown, values)
    o = attention(*(np.ascontiguousarray(values[name]) for name in "qkv"))
    assert Path("y.in").read_bytes() == Path("x.in").read_bytes()
    np.testing.assert_allclose(values["o"], o, rtol=1e-5, atol=1e-5)


def test_the_python_that_is_shown_runs():
    values: dict[str, Any] = {}
    for block in python_in(ROOT / "docs/python.md"):
        exec(block.replace("10, 2048, 64", "2, 30, 8"), values)
    assert values["o"].shape == (1, 2, 30, 8) and values["lse"].shape == (1, 2, 30)
    assert values["dk"].shape == (1, 2, 30, 8) and values["dbias"].shape == (30,)


# ---- the help texts


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_ends_with_examples_that_work(name):
    command = command_of(name)
    shown = command.get_help(click.Context(command, info_name=name, **command.context_settings)).splitlines()
    examples = [line.strip() for line in shown[shown.index("  Examples:") + 1 :]]
    assert 2 <= len(examples) <= 3
    for line in examples:
        [words] = commands_in([line])
        assert words[0] == name and len(line) <= 90
        command_of(name).make_context(name, words[1:])  # nothing is missing either
