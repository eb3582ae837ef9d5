"""Which files a command may write. That they appear whole or not at all: test_fileformat.py, test_faults.py."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest
from support import command, environment, leftovers

from flashcli.errors import CannotCreate, NoPermission, UsageError
from flashcli.files import outputs
from flashcli.files.outputs import AtomicFile, check_distinct, write_whole
from flashcli.process import signals


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


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_temporary_file_is_never_one_that_is_there_already(tmp_path, monkeypatch, link):
    """Whoever guesses its name could have another file written, by a link."""
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link(victim, tmp_path / ".new.00000000.tmp")
    with pytest.raises(CannotCreate, match="file exists"):
        write_whole(tmp_path / "new", "content")
    assert victim.read_text() == "precious" and leftovers(tmp_path) == [".new.00000000.tmp"]


@pytest.mark.parametrize("call", ["fchmod", "fstatvfs"])
def test_a_file_that_cannot_be_made_ready_leaves_nothing(tmp_path, monkeypatch, call):
    def fail(*arguments):
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "old").write_text("old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(NoPermission):
        AtomicFile(tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"] and not signals.half_written


def test_the_owner_and_the_permissions_are_those_of_the_file_that_is_replaced(tmp_path):
    path = tmp_path / "old"
    path.touch(mode=0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 54321)
    before = path.stat()
    write_whole(path, "content")
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert after.st_ino != before.st_ino


def test_another_users_file_in_a_sticky_folder_is_refused_at_once(tmp_path, monkeypatch):
    path = tmp_path / "theirs"
    path.write_text("old")
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # neither the file's owner nor the folder's
    with pytest.raises(NoPermission, match="only that user may replace it"):
        AtomicFile(path)
    with AtomicFile(tmp_path / "mine") as file:
        file.commit()
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["mine", "theirs"]


def test_a_file_that_something_is_mounted_on_is_refused_at_once(tmp_path):
    for name in ("old file", "other"):
        (tmp_path / name).write_text(name)
    script = 'mount --bind other "old file" || exit 99; exec "$@"'
    given = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    generate = command("generate", "old file", "--shape", "1,2,3", "--force")
    done = subprocess.run([*given, *generate], cwd=tmp_path, env=environment(), capture_output=True)
    if done.returncode in (1, 99, 127):
        pytest.skip("nothing can be mounted here")
    assert done.returncode == 73, done.stderr
    assert b"something is mounted on it" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["old file", "other"]


def test_links_are_followed_to_the_file_that_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    (tmp_path / "second").symlink_to("folder/target")
    link.symlink_to(tmp_path / "second")
    for content in ("new", "again"):
        write_whole(link, content)
        assert target.read_text() == content and link.is_symlink()
    link.unlink()
    link.symlink_to("link")
    with pytest.raises(CannotCreate, match="too many levels of symbolic links"):
        AtomicFile(link)


@pytest.mark.parametrize(
    ("path", "leads_to_one"),
    [("/dev/stdout", True), ("/dev/fd/1", True), ("/proc/self/fd/2", True), ("/proc/thread-self/fd/0", True),
     ("/dev/null", False), ("/proc/self/fd", False), ("/tmp/fd/1", False)],
)  # fmt: skip
def test_what_leads_to_an_open_descriptor(path, leads_to_one):
    if not os.path.exists("/proc/thread-self/fd"):
        pytest.skip("this system has no /proc of Linux")
    assert outputs.is_descriptor(outputs.follow(path)) is leads_to_one


def test_who_reads_slowly_from_an_open_pipe_that_does_not_wait_gets_everything():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    content, received = bytes(range(256)) * 4096, []
    thread = threading.Thread(target=lambda: received.append(os.fdopen(reader, "rb").read()))
    with AtomicFile(f"/dev/fd/{writer}") as file:
        os.close(writer)
        thread.start()
        file.write_at(0, memoryview(content))
        file.commit()
    thread.join()
    assert received == [content]
