"""What all commands have in common: help, usage, where their output goes, and how failures look."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types

import pytest
from support import command, environment, flashcli, random_qkv, write_input

from flashcli import __version__, cli, signals
from flashcli.cli import COMMANDS


def test_the_version():
    assert flashcli("--version").out == f"flashcli, version {__version__}\n"


def test_help_lists_every_command_with_its_purpose():
    done = flashcli("--help")
    assert done.code == 0
    words = " ".join(done.out.split())  # long ones are wrapped
    for name, purpose in COMMANDS.items():
        assert f" {name} {purpose}" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = flashcli(name, "-h")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: flashcli {name} ")
    assert "--debug" in done.out


@pytest.mark.parametrize("arguments", [[], ["nonesuch"], ["run"], ["--nonesuch"], ["compare", "only-one"]])
def test_wrong_usage_is_code_2(arguments):
    done = flashcli(*arguments)
    assert done.code == 2
    assert "Usage: flashcli" in done.err and "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize("arguments", [["kernels"], ["--help"], ["kernels", "--json", "-"]])
def test_a_closed_pipe_is_silent(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = flashcli(*arguments, stdout=writer)
    os.close(writer)
    assert (done.code, done.err) == (74, "")


def test_a_full_disk_under_stdout_is_an_output_error():
    with open("/dev/full", "w") as full:
        flashcli("kernels", stdout=full).assert_error(74, "cannot write the results", "no space left")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_standard_stream_that_is_closed_is_no_accident(tmp_path, number):
    out = tmp_path / "x.in"
    script = f'exec {number}>&-; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command("generate", out, "--shape", "2,3,4")],
        env=environment(),
        capture_output=True,
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr + done.stdout
    assert out.stat().st_size == 12 + 2 * 3 * 3 * 4 * 4


@pytest.mark.parametrize("where", [["--debug", "inspect"], ["inspect", "--debug"]])
def test_debug_adds_the_traceback(tmp_path, where):
    path = tmp_path / "empty.in"
    path.touch()
    assert "Traceback" not in flashcli("inspect", path).err
    done = flashcli(*where, path)
    assert done.code == 65
    assert "Traceback" in done.err and "\nHint: " in done.err


def test_an_unforeseen_error_is_code_70(tmp_path, monkeypatch):
    # A NumPy that breaks is something no part of flashcli expects.
    (tmp_path / "numpy.py").write_text("raise ZeroDivisionError('broken')")
    done = flashcli(
        "inspect", write_input(tmp_path / "x.in", random_qkv(1, 2, 3)), env={"PYTHONPATH": _first(tmp_path)}
    )
    assert done.code == 70
    assert done.err.splitlines() == [
        "Error: internal error: ZeroDivisionError: broken.",
        "Hint: run again with --debug, and report it.",
    ]


def _first(folder) -> str:
    return os.pathsep.join([str(folder), environment()["PYTHONPATH"]])


@pytest.mark.parametrize("arguments", [["run", "--help"], ["--help"], ["compare", "--help"]])
def test_help_can_be_printed_in_ascii(arguments):
    done = flashcli(*arguments, env={"PYTHONIOENCODING": "ascii"})
    assert (done.code, done.err) == (0, "")


def test_a_file_name_that_is_no_text_can_be_printed(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.in"
    done = subprocess.run(
        [*command("generate"), path, "--shape", "1,2,3"],
        env=environment(PYTHONIOENCODING="utf-8:strict"),  # as in most locales
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert os.path.exists(path)


def test_a_signal_while_modules_are_imported(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *ignored: None)
    monkeypatch.setattr(cli, "_stopped", [])
    monkeypatch.setitem(sys.modules, "flashcli.files.outputs", types.ModuleType("half of it"))
    with pytest.raises(signals.Terminated):
        cli._stop(signal.SIGTERM, None)
