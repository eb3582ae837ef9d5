"""The sandbox, with the real bubblewrap: what a program in it sees and can change."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy
import pytest
from support import flashcli, script

from flashcli.judge import bubblewrap
from flashcli.judge.sandbox import means
from flashcli.judge.submissions import find

needed = pytest.mark.skipif(
    shutil.which("bwrap") is None or not means()[1], reason="there is no bubblewrap that works here"
)


@pytest.fixture
def inside(judging, case, tmp_path, compiled):
    """What a submission in a folder of its own prints in the sandbox."""
    home = tmp_path / "course" / "alice"
    home.mkdir(parents=True)
    (tmp_path / "course" / "bob").mkdir()
    (home / "right").write_bytes(compiled("right").read_bytes())
    (home / "right").chmod(0o755)

    def run(text: str, **rules):
        script(home / "hw4", f"#!/bin/sh\n{text}\n")
        made = judging(sandbox="bwrap", **rules)
        [found] = made.results([case], find([str(home)], made.rules))
        return found

    return run


@needed
def test_a_right_answer_is_accepted(inside):
    found = inside('"$(dirname "$0")/right" "$@"')
    assert (found.verdict, found.detail) == ("accepted", "")


@needed
def test_what_is_not_there(inside, tmp_path, monkeypatch):
    """No other submission, no home, no answers, nothing of the judge, no network, no secrets, no other process."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:/")
    text = f"""
    for name in {tmp_path}/course/bob {os.path.expanduser("~")}/. /home/. /root/. /etc/shadow /var/. /dev/shm/x
    do [ -e "$name" ] && echo "sees $name"; done
    [ "$(ls "$(dirname "$HOME")")" ] && ls "$(dirname "$HOME")" | grep -v -e run- -e input-
    grep -v -e Inter -e face -e lo: /proc/net/dev
    [ "$(ls -d /proc/[0-9]* | wc -l)" -gt 6 ] && echo "sees processes"
    exit 3"""
    found = inside(text)
    assert (found.detail, found.printed) == ("exit code 3", "")


@needed
def test_what_cannot_be_written(inside, tmp_path, case):
    shared = [f"{folder}/flashcli-{os.getpid()}" for folder in ("/dev/shm", "/tmp")]  # there only
    text = f"""
    for name in "$(dirname "$0")/x" "$(dirname "$0")/hw4" "$(readlink "$1")" /usr/x /sys/x
    do (echo > "$name") 2> /dev/null && echo "wrote $name"; done
    rm -rf "$(dirname "$0")" "$(readlink "$1")" 2> /dev/null
    echo > {shared[0]} && echo > {shared[1]} && echo > "$HOME/x" && echo "wrote where it may"
    exit 3"""
    found = inside(text)
    assert found.detail == "exit code 3: wrote where it may" and found.printed == "wrote where it may"
    assert not any(map(os.path.exists, shared))


@needed
def test_a_signal_a_time_limit_and_its_grace_are_told_as_without(inside):
    assert inside("kill -SEGV $$").detail == "killed by SIGSEGV"
    found = inside("trap 'sleep 0.2; echo heard; exit' TERM; sleep 9 & wait", time_limit=0.3, grace=5)
    assert (found.verdict, found.printed) == ("time limit exceeded", "heard")


@needed
def test_one_submission_leaves_nothing_for_the_next(judging, case, compiled, tmp_path):
    """The first is right and keeps its answer; the second looks for it."""
    texts = {
        "1-keeps": '"$(dirname "$0")/right" "$@" && cp "$2" /dev/shm/kept && cp "$2" /tmp/kept',
        "2-copies": 'cp /dev/shm/kept "$2" || cp /tmp/kept "$2"',
    }
    for name, text in texts.items():
        home = tmp_path / "course" / name
        home.mkdir(parents=True)
        script(home / "hw4", f"#!/bin/sh\n{text}\n")
        shutil.copy(compiled("right"), home)
    made = judging(sandbox="bwrap", build=":")
    first, second = made.results([case], find([str(tmp_path / "course")], made.rules))
    assert (first.verdict, second.verdict) == ("accepted", "runtime error")


@needed
def test_numpy_is_found_where_the_rules_make_it_readable(inside, tmp_path):
    """A submission whose interpreter is the judge's own; without the rule, it has not even that."""
    script(tmp_path / "course" / "alice" / "solve", f"#!{sys.executable}\nimport numpy\nraise SystemExit(7)\n")
    run = 'exec "$(dirname "$0")/solve"'
    places = tuple(dict.fromkeys([sys.prefix, sys.base_prefix, str(Path(numpy.__file__).parents[1])]))
    assert inside(run).detail.startswith("exit code 127: ")
    found = inside(run, readable=places)
    assert (found.detail, found.printed) == ("exit code 7", "")
    assert "Read-only" in inside(f"echo > {sys.prefix}/x", readable=places).printed


@needed
def test_an_interpreter_that_the_sandbox_hides_is_named(judging, case, tmp_path):
    hidden = script(tmp_path / "python3", "#!/bin/sh\n")
    home = tmp_path / "bob"
    home.mkdir()
    script(home / "hw4", f"#!{hidden}\n")
    made = judging(sandbox="bwrap")
    [found] = made.results([case], find([str(home)], made.rules))
    assert found.detail == f"in the sandbox there is no '{hidden}', which its line #! names"


@needed
def test_a_readable_folder_that_is_not_there_is_told_before_anything_runs(cases, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('cases = "cases"\nsandbox = "bwrap"\nreadable = ["/none/there"]\n')
    done = flashcli("judge", rules, "--exe", script(tmp_path / "fails", "#!/bin/sh\nexit 1\n"))
    done.assert_error(69, "Can't find source path /none/there")
    assert "correct readable in the rules" in done.err


def test_a_sandbox_that_does_not_work_is_told_before_anything_runs(cases, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('cases = "cases"\nsandbox = "bwrap"\n')
    script(tmp_path / "bwrap", "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    program = script(tmp_path / "fails", "#!/bin/sh\nexit 1\n")
    done = flashcli("judge", rules, "--exe", program, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    done.assert_error(69, "the sandbox 'bwrap' does not work: bwrap: No permissions to create new namespace")


def test_a_folder_of_libraries_is_not_shown_if_it_holds_what_is_to_be_hidden(tmp_path):
    libraries = tmp_path / "lib"
    words = bubblewrap.command(
        str(tmp_path / "run"),
        ["/x/input"],
        ["/cuda/more"],
        {"LD_LIBRARY_PATH": f"{libraries}:{tmp_path}:/:relative", "CUDA_HOME": "/x", "CUDA_PATH": "/cuda"},
    )
    shown = {words[place + 1] for place, word in enumerate(words) if word.startswith("--ro-bind")}
    assert {str(libraries), "/cuda", "/cuda/more"} <= shown and not {str(tmp_path), "/", "/x", "relative"} & shown
