"""Which programs are judged, and what of their folders is copied to be built."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from support import flashcli, script

from flashcli.errors import UsageError
from flashcli.judge.copying import NotCopied, copy_folder
from flashcli.judge.rules import Rules
from flashcli.judge.submissions import build, find


@pytest.fixture
def course(tmp_path):
    """Folders alice and bob, each with a program hw4 and a folder src."""
    for name in ("alice", "bob"):
        (tmp_path / "course" / name / "src").mkdir(parents=True)
        script(tmp_path / "course" / name / "hw4", "#!/bin/sh\nexit 3\n")
    return tmp_path / "course"


def names(*named: object, **rules: object) -> list[str]:
    return [submission.name for submission in find(map(str, named), Rules(**rules))]


def test_a_submissions_folder_is_named_after_itself(course):
    assert names(course / "alice", course / "bob") == ["alice", "bob"]
    assert names(course / "alice", build="make") == ["alice"], "though it has a folder in it"
    assert names(course) == names(course, build="make") == ["alice", "bob"]


def test_a_name_can_be_given(course):
    program = course / "alice" / "hw4"
    assert names(f"first={program}", f"second={course / 'bob'}") == ["first", "second"]
    program.rename(course / "a=b")
    (course / "a=b").chmod(0o755)
    assert names(course / "a=b") == [str(course / "a=b")], "a file that is there is what is meant"
    for wrong in ("=x", "x="):
        with pytest.raises(UsageError, match="lacks a name or a path"):
            names(wrong)


def test_two_of_one_name_are_told_how_to_differ(course, tmp_path, cases):
    shutil.copytree(course, tmp_path / "again")
    done = flashcli("judge", cases, "--exe", course / "bob", "--exe", tmp_path / "again" / "bob")
    done.assert_error(2, "two submissions named 'bob'")
    assert "--exe NAME=PATH" in done.err


def test_a_copy_has_files_folders_and_links_as_they_are(course, tmp_path):
    alice, copy = course / "alice", tmp_path / "copy"
    (alice / "src" / "a.c").write_text("int x;")
    (alice / "libraries").symlink_to("/usr/lib")
    (alice / "nowhere").symlink_to("nothing")
    copy.mkdir()
    copy_folder(alice, copy, 2**20)
    assert (copy / "src" / "a.c").read_text() == "int x;" and os.access(copy / "hw4", os.X_OK)
    assert os.readlink(copy / "libraries") == "/usr/lib" and os.readlink(copy / "nowhere") == "nothing"


def _sparse(path):
    path.touch()
    os.truncate(path, 10 * 2**40)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_sparse, "it is larger than 1.0 MiB"),
        (lambda path: path.write_bytes(bytes(2**20)), "it is larger than 1.0 MiB"),
        (lambda path: os.mkfifo(path), "src/odd is neither a file nor a folder"),
    ],
)
def test_what_is_not_copied(course, tmp_path, spoil, said):
    spoil(course / "alice" / "src" / "odd")
    (tmp_path / "copy").mkdir()
    with pytest.raises(NotCopied, match=said):
        copy_folder(course / "alice", tmp_path / "copy", 2**20)
    copied = sum(file.stat().st_blocks * 512 for file in (tmp_path / "copy").rglob("*"))
    assert copied < 2**20


def test_too_many_files(course, tmp_path, monkeypatch):
    monkeypatch.setattr("flashcli.judge.copying.MOST_ENTRIES", 1)
    (tmp_path / "copy").mkdir()
    with pytest.raises(NotCopied, match="more than 1 files"):
        copy_folder(course / "alice", tmp_path / "copy", 2**20)


def test_a_folder_that_cannot_be_copied_is_a_failed_build(course, cases):
    os.mkfifo(course / "alice" / "odd")
    done = flashcli("judge", cases, "--exe", course, "--build", ":", "--case", "c1", "--json", "-")
    first, second = json.loads(done.out)["cases"]
    assert first["verdict"] == "build failed"
    assert first["detail"] == "its folder cannot be copied: odd is neither a file nor a folder"
    assert second["detail"] == "exit code 3"


def test_a_program_in_a_folder_of_the_submission_is_built_from_all_of_it(tmp_path, judging):
    alice = tmp_path / "alice"
    (alice / "bin").mkdir(parents=True)
    script(alice / "source", "#!/bin/sh\nexit 0\n")
    made = judging(exe="bin/hw4", build="cp source bin/hw4")
    [submission] = find([f"alice={alice}"], made.rules)
    built = build(submission, made.rules, made.scratch, made.supervision)
    assert built.failure == "" and built.command[0].endswith("/bin/hw4") and os.access(built.command[0], os.X_OK)
    assert not (alice / "bin" / "hw4").exists()
