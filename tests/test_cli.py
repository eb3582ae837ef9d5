"""What all commands have in common: help, usage, where their output goes, and how failures look."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
from support import command, environment, flashcli, python, random_qkv, write_input

from flashcli import __version__
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
        "inspect", write_input(tmp_path / "x.in", random_qkv(1, 2, 3)), env={"PYTHONPATH": _first(tmp_path)}, cold=True
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


# Signals

# The command line, with a fault before it, and one in its middle, where `inspect` is called.
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
{before}
from flashcli.__main__ import main
import flashcli.commands.inspect as inspect
import click

@click.command()
def command():
    {middle}
inspect.command = command
sys.argv = ["flashcli", "inspect"]
main()
"""
TERMINATED = (143, "Error: terminated; nothing is left half-written.\n")


def stopped(tmp_path, middle: str = "time.sleep(10)", before: str = "", modules: str = "") -> tuple[int, str]:
    """How a command ends, and what it says."""
    (tmp_path / "imported.py").write_text(modules)
    program = PROGRAM.format(folder=str(tmp_path), before=before, middle=middle.replace("\n", "\n    "))
    done = python("-c", program, timeout=30)
    return done.code, done.err


KILL = "os.kill(os.getpid(), signal.SIGTERM)"
EARLY = f"""
import flashcli.process.signals
listen = flashcli.process.signals.listen
flashcli.process.signals.listen = lambda: (listen(), {KILL})
"""
IMPORTED = f"""
import os, signal
try:
    {KILL}
except BaseException:
    pass
whole = True
"""
IN_A_DESTRUCTOR = f"""
class Careless:
    def __del__(self):
        {KILL}
        time.sleep(1)
Careless()
time.sleep(10)
"""
CAUGHT = f"""
try:
    {KILL}
    time.sleep(1)
except BaseException:
    pass
time.sleep(10)
"""
CLEANING_UP = f"""
try:
    {KILL}
    time.sleep(10)
finally:
    {KILL}
    time.sleep(0.2)
    print("clean", file=sys.stderr)
"""
HELD = f"""
from flashcli.process import signals
with signals.held():
    {KILL}
    time.sleep(0.1)
    print("done", file=sys.stderr)
time.sleep(10)
"""
BOTH = f"""
signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])
{KILL}
os.kill(os.getpid(), 2)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [2, 15])
time.sleep(10)
"""


def test_a_signal_before_the_command_line_is_there_is_heeded_then(tmp_path):
    assert stopped(tmp_path, before=EARLY) == TERMINATED


def test_a_signal_while_a_module_is_imported_waits_until_it_is_there(tmp_path):
    middle = r'import imported; os.write(2, b"True\n" * imported.whole); time.sleep(10)'
    code, told = stopped(tmp_path, middle, modules=IMPORTED)
    assert (code, told.removeprefix("True\n")) == TERMINATED


@pytest.mark.parametrize("swallowed", [IN_A_DESTRUCTOR, CAUGHT], ids=["in a destructor", "caught"])
def test_a_signal_that_is_swallowed_is_raised_again(tmp_path, swallowed):
    assert stopped(tmp_path, swallowed) == TERMINATED


def test_cleaning_up_is_not_interrupted(tmp_path):
    assert stopped(tmp_path, CLEANING_UP) == (143, "clean\n" + TERMINATED[1])


def test_a_step_that_is_held_is_done(tmp_path):
    assert stopped(tmp_path, HELD) == (143, "done\n" + TERMINATED[1])


def test_two_signals_at_once_are_told_as_one(tmp_path):
    code, told = stopped(tmp_path, BOTH)
    word = {130: "interrupted", 143: "terminated"}[code]
    assert told == f"Error: {word}; nothing is left half-written.\n"


# Where messages go


DEAD = {
    "closed by its reader": "exec 2>&1 >&-; ",
    "read-only": "exec 2</dev/null; ",
    "full": "exec 2>/dev/full; ",
}


@pytest.mark.parametrize("stderr", DEAD)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["inspect", "nowhere"], 65), (["nonesuch"], 2), (["run"], 2), (["inspect", "nowhere", "--debug"], 65)],
)
def test_a_dead_stderr_changes_no_exit_code(stderr, arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    script = DEAD[stderr] + 'exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *command(*arguments)], env=environment(), stdout=writer)
    os.close(writer)
    assert done.returncode == code


def test_a_warning_that_nobody_can_read_is_no_error(tmp_path):
    qkv = random_qkv(2, 3, 4)
    qkv[1] = np.nan
    given = write_input(tmp_path / "x.in", qkv)
    with open("/dev/full", "w") as full:
        assert flashcli("run", given, tmp_path / "x.out", "--backend", "cpu", stderr=full).code == 0
    assert (tmp_path / "x.out").exists()


def test_a_dead_stdout_hides_no_other_error(tmp_path):
    with open("/dev/full", "w") as full:
        done = flashcli("inspect", tmp_path / "nowhere", "--json", "-", stdout=full)
    done.assert_error(65, "nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        ["judge", "-"],
        ["judge", "--results", "-"],
        ["scoreboard", "-"],
        ["export-hw4", "-"],
        ["bench", "--plot", "-"],
        ["decode", "-", "out"],
    ],
)
def test_where_stdin_and_stdout_cannot_be_a_dash_is_refused(tmp_path, arguments):
    done = flashcli(*arguments, cwd=tmp_path)
    assert done.code == 2 and "- stands for stdin or stdout, but this names a file (a file - is ./-)." in done.err
    assert not list(tmp_path.iterdir())
