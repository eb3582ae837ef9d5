"""--json, which means the same in every command: a file, or - for stdout."""

from __future__ import annotations

import importlib
import json
import os
import stat

import pytest
from support import ROOT, flashcli, random_qkv, write_input, write_output

from flashcli.cli import COMMANDS
from flashcli.files.decode.cases import Case, generate
from flashcli.terminal.as_json import json_text

LINES = {
    "run": ("run", "x.in", "x.out", "--backend", "cpu"),
    "compare": ("compare", "x.ref", "x.ref"),
    "decode": ("decode", "x.safetensors", "y.safetensors", "--backend", "cpu"),
    "inspect": ("inspect", "x.in"),
    "judge": ("judge", ROOT / "testcases", "--case", "t01", "--backend", "cpu"),
    "bench": ("bench", "--backend", "cpu", "--shape", "2,20,8", "--runs", 1),
    "bench-decode": ("bench-decode", "--backend", "cpu", "--shape", "1,2,1,32", "--lengths", "9", "--runs", 1),
    "streams": ("streams", "x.in", "--memory", "pageable", "--streams", 0, "--runs", 1, "--connections", 1),
    "profile": ("profile", "--kernel", "sequential", "--shape", "2,20,8"),
    "kernels": ("kernels", "mma"),
    "doctor": ("doctor",),
}
every_command = pytest.mark.parametrize("line", LINES.values(), ids=LINES)


@pytest.fixture
def folder(tmp_path):
    qkv = random_qkv(2, 20, 8)
    write_input(tmp_path / "x.in", qkv)
    write_output(tmp_path / "x.ref", qkv[:, 0])
    generate(str(tmp_path / "x.safetensors"), Case(1, 2, 1, 8, "3"))
    return tmp_path


def test_no_command_has_another_meaning_for_it():
    modules = {name: importlib.import_module(f"flashcli.commands.{name.replace('-', '_')}") for name in COMMANDS}
    options = [(name, option) for name, module in modules.items() for option in module.command.params]
    found = {name: option for name, option in options if "--json" in option.opts}
    assert found.keys() == LINES.keys() | {"bench-tensors", "warm"}  # which need PyTorch, and a compiler
    assert all(option.metavar == "FILE" and not option.is_flag for option in found.values())


@every_command
def test_a_file_has_what_is_printed_otherwise(fake_gpu, folder, line):
    done = flashcli(*line, "--json", "x.json", cwd=folder)
    printed = flashcli(*line, "--json", "-", cwd=folder)
    assert done.code == printed.code, done.err
    written = json.loads((folder / "x.json").read_text())
    again = json.loads(printed.out)  # and nothing else
    assert type(written) is type(again)
    assert not isinstance(written, dict) or written.keys() == again.keys()
    with pytest.raises(ValueError):
        json.loads(done.out)  # but the text


@every_command
def test_a_file_that_cannot_be_written_is_told_before_the_work(no_pycuda, folder, line):
    done = flashcli(*line, "--json", folder / "missing" / "x.json", cwd=folder)
    done.assert_error(73, "missing")
    assert done.out == "" and not (folder / "x.out").exists() and not (folder / "y.safetensors").exists()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (LINES["run"], "x.in"), (LINES["run"], "x.out"), ((*LINES["run"], "--trace", "x.json"), "x.json"),
        (LINES["compare"], "x.ref"), (LINES["inspect"], "x.in"), (LINES["streams"], "x.in"),
        (LINES["decode"], "y.safetensors"),
        ((*LINES["judge"], "--results", "x.jsonl"), "x.jsonl"),
    ],
)  # fmt: skip
def test_it_overwrites_no_other_file_of_the_command(folder, line, name):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    flashcli(*line, "--json", name, cwd=folder).assert_error(2, f"{name}' is named twice")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_fifo_is_written_through(folder):
    os.mkfifo(folder / "fifo")
    reader = os.open(folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert flashcli("inspect", "x.in", "--json", "fifo", cwd=folder).code == 0
    assert json.loads(os.read(reader, 2**16))["B"] == 2
    os.close(reader)
    assert stat.S_ISFIFO(os.stat(folder / "fifo").st_mode)


def test_what_json_has_no_number_for_is_null():
    assert json.loads(json_text({"a": [float("nan"), 1.5], "b": (float("inf"),)})) == {"a": [None, 1.5], "b": [None]}
