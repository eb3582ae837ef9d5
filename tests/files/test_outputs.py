"""Which files a command may write. That they appear whole or not at all: test_fileformat.py, test_faults.py."""

from __future__ import annotations

import os

import pytest

from flashcli.errors import UsageError
from flashcli.files.outputs import check_distinct


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_another_name_of_the_same_file_is_the_same_file(tmp_path, link):
    first, second = tmp_path / "a", tmp_path / "b"
    first.touch()
    link(first, second)
    with pytest.raises(UsageError):
        check_distinct(first, second)


def test_two_files_not_yet_there_are_the_same_if_their_paths_are(tmp_path):
    with pytest.raises(UsageError):
        check_distinct(tmp_path / "new", tmp_path / "." / "new")


def test_different_files_are_distinct(tmp_path):
    (tmp_path / "a").touch()
    check_distinct(tmp_path / "a", tmp_path / "b")
