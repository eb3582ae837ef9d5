"""The homework's files: what is read is what was written, and nothing else passes for an input file."""

from __future__ import annotations

import os
import stat
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import input_bytes, leftovers, random_qkv, sparse_input, write_input, write_output

from flashcli.asked.shape import Chunk, Shape
from flashcli.errors import BadInput, CannotCreate, InputOutputError
from flashcli.files.fileformat import InputFile, create_input, create_output, flat_shape, read_output
from flashcli.process.signals import remove_half_written

shapes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
int32 = st.integers(-(2**31), 2**31 - 1)


def numbered(B: int, N: int, d: int) -> np.ndarray:
    """Every number of the file is another one."""
    return np.arange(B * 3 * N * d, dtype=np.float32).reshape(B, 3, N, d)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.in"


# Reading what is right


@given(shape=shapes, data=st.data())
def test_any_range_of_batches_is_read_from_its_place(path, shape, data):
    qkv = numbered(*shape)
    write_input(path, qkv)
    start = data.draw(st.integers(0, shape[0] - 1))
    stop = data.draw(st.integers(start + 1, shape[0]))
    with InputFile(path) as source:
        assert source.shape == Shape(*shape)
        np.testing.assert_array_equal(source.read(range(start, stop)), qkv[start:stop])


@given(shape=shapes, data=st.data())
def test_batches_written_in_any_order_make_the_same_file(path, shape, data):
    qkv = numbered(*shape)
    its_shape = Shape(*shape)
    with create_input(path, its_shape) as sink:
        for b in data.draw(st.permutations(range(shape[0]))):
            sink.write(its_shape.whole(range(b, b + 1)), qkv[b : b + 1])
        sink.commit()
    assert path.read_bytes() == input_bytes(qkv)


@given(shape=shapes, data=st.data())
def test_any_rows_are_read_and_written_in_their_place(path, shape, data):
    """Of Q, or of K and V one below the other; the answer has its place where Q has."""
    qkv, shape = numbered(*shape), Shape(*shape)
    matrices, there = data.draw(st.sampled_from([("Q", qkv[:, 0]), ("KV", qkv[:, 1:].reshape(shape.B, -1, shape.d))]))
    b = data.draw(st.integers(0, shape.B - 1))
    start = data.draw(st.integers(0, there.shape[1] - 1))
    stop = data.draw(st.integers(start + 1, there.shape[1]))
    chunk, want = Chunk(matrices, range(b, b + 1), range(start, stop)), there[b, start:stop]
    floats = np.empty(want.size, np.float32)
    write_input(path, qkv)
    with InputFile(path) as source:
        source.read_into(chunk, floats)
    np.testing.assert_array_equal(floats, want.ravel())
    assert shape.place(shape.input_rows(chunk).start) == (b, matrices[start // shape.N], start % shape.N)
    if matrices == "Q":
        rest = [Chunk("Q", range(c, c + 1), range(shape.N)) for c in range(shape.B) if c != b]
        rest += [Chunk("Q", range(b, b + 1), rows) for rows in (range(start), range(stop, shape.N)) if rows]
        with create_output(path.with_suffix(".out"), shape) as sink:
            for other in rest:
                sink.write(other, np.zeros(len(other.rows) * shape.d, np.float32))
            sink.write(chunk, floats)
            sink.commit()
        got = read_output(path.with_suffix(".out"), shape, range(shape.B))
        np.testing.assert_array_equal(got[b, start:stop], want)
        assert np.count_nonzero(got) == np.count_nonzero(want)


@given(shape=shapes, data=st.data())
def test_any_range_of_an_output_is_read_from_its_place(path, shape, data):
    B, N, d = shape
    values = np.arange(B * N * d, dtype=np.float32).reshape(B, N, d)
    write_output(path, values)
    start = data.draw(st.integers(0, B - 1))
    stop = data.draw(st.integers(start + 1, B))
    np.testing.assert_array_equal(read_output(path, Shape(*shape), range(start, stop)), values[start:stop])
    rows, one = slice(N // 3, N), slice(start, start + 1)
    got = read_output(path, Shape(*shape), range(start, start + 1), range(*rows.indices(N)))
    np.testing.assert_array_equal(got, values[one, rows])


@given(shape=shapes, limit=st.integers(1, 2000))
def test_batch_ranges_cover_each_batch_once_within_the_limit(shape, limit):
    shape = Shape(*shape)
    ranges = list(shape.batch_ranges(limit))
    assert [b for batches in ranges for b in batches] == list(range(shape.B))
    assert all(len(batches) == 1 or len(batches) * shape.input_batch_bytes <= limit for batches in ranges)


def test_a_22_gigabyte_file_is_read_at_its_far_end(path):
    B, N, d = 14000, 2048, 64
    last = random_qkv(1, N, d)
    try:
        sparse_input(path, B, N, d)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    with open(path, "r+b") as file:
        file.seek(-last.nbytes, os.SEEK_END)
        file.write(last.tobytes())
    assert path.stat().st_size == 22_020_096_012
    with InputFile(path) as source:
        np.testing.assert_array_equal(source.read(range(B - 1, B)), last)
        assert not source.read(range(B - 2, B - 1)).any()


def test_the_output_of_a_huge_input_is_written_at_its_far_end(path):
    shape = Shape(14000, 2048, 64)
    values = np.ones((1, 2048, 64), np.float32)
    try:
        with create_output(path, shape) as sink:
            sink.write(shape.whole(range(13999, 14000)), values)
            sink.commit()
    except InputOutputError as error:
        pytest.skip(f"no room for 7 GB here: {error}")
    assert path.stat().st_size == shape.output_bytes == 7_340_032_000
    np.testing.assert_array_equal(read_output(path, shape, range(13999, 14000)), values)


# Refusing what is wrong


def refusal(path: Path) -> BadInput:
    with pytest.raises(BadInput) as caught:
        InputFile(path)
    assert caught.value.hint
    return caught.value


@given(shape=shapes, data=st.data())
def test_a_file_cut_off_anywhere_is_refused(path, shape, data):
    whole = input_bytes(numbered(*shape))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refusal(path)


@given(shape=shapes, tail=st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(path, shape, tail):
    path.write_bytes(input_bytes(numbered(*shape)) + tail)
    assert f"{len(tail)} bytes too long" in str(refusal(path))


@given(header=st.tuples(int32, int32, int32), length=st.integers(0, 400))
def test_any_header_is_refused_or_fits_the_size(path, header, length):
    B, N, d = header
    path.write_bytes(struct.pack("<3i", *header) + bytes(length))
    if min(header) >= 1 and d <= 256 and length == 12 * B * N * d:
        InputFile(path).close()
    else:
        refusal(path)


@given(content=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_foreign_bytes_are_refused(path, content):
    path.write_bytes(b"\x7f" + content)  # B = 127 or more: no content of 200 bytes can be an input file
    refusal(path)


@given(shape=shapes)
def test_a_big_endian_file_is_recognised(path, shape):
    path.write_bytes(input_bytes(numbered(*shape), order=">"))
    assert "big-endian" in refusal(path).hint


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ((0, 4, 4), "B = 0, not from 1 to 2147483647."),
        ((4, 0, 4), "N = 0, not from 1 to 2147483647."),
        ((4, 4, 0), "d = 0, not from 1 to 256."),
        ((-1, 4, 4), "B = -1, not from 1 to"),
        ((4, -(2**31), -7), "N = -2147483648, not from 1 to 2147483647 and d = -7, not from 1 to 256."),
        ((1, 1, 257), "d = 257, not from 1 to 256."),
    ],
)
def test_an_impossible_header_is_named(path, header, complaint):
    path.write_bytes(struct.pack("<3i", *header))
    assert complaint in str(refusal(path))


def test_the_largest_header_needs_more_bytes_than_there_are(path):
    path.write_bytes(struct.pack("<3i", 2**31 - 1, 2**31 - 1, 256))
    assert f"needs {12 + 12 * (2**31 - 1) ** 2 * 256} bytes, the file has 12." in str(refusal(path))


def test_the_running_python_is_not_an_input_file():
    refusal(Path(sys.executable))


@pytest.mark.parametrize("name", ["", ".", "missing.in", "x.in/inside"])
def test_a_path_that_leads_to_no_file_is_refused(path, name, monkeypatch):
    path.write_bytes(b"")
    monkeypatch.chdir(path.parent)
    refusal(name)


def test_a_fifo_without_a_writer_is_refused_at_once(path):
    os.mkfifo(path)
    assert "not a regular file" in str(refusal(path))


def test_a_file_that_shrinks_while_read_is_refused(path):
    write_input(path, numbered(2, 3, 4))
    with InputFile(path) as source:
        os.truncate(path, 100)
        with pytest.raises(BadInput, match="became shorter"):
            source.read(range(2))


@pytest.mark.parametrize("size", [0, 4 * 24 - 1, 4 * 24 + 4])
def test_an_output_of_another_size_is_refused(path, size):
    path.write_bytes(bytes(size))
    with pytest.raises(BadInput, match=f"has {size} bytes; .* has 96"):
        read_output(path, Shape(2, 3, 4), range(2))


@pytest.mark.parametrize("size", [0, 1, 6])
def test_a_file_that_holds_no_floats_has_no_flat_shape(path, size):
    path.write_bytes(bytes(size))
    with pytest.raises(BadInput):
        flat_shape(path)


# Writing: whole or not at all


SHAPE = Shape(2, 3, 4)
VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def write_all(path: Path) -> None:
    with create_output(path, SHAPE) as sink:
        sink.write(SHAPE.whole(range(2)), VALUES)
        sink.commit()


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_output_is_its_floats_and_nothing_else(path):
    write_all(path)
    assert path.read_bytes() == VALUES.astype("<f4").tobytes()


def test_nothing_appears_under_the_name_before_commit(path):
    with create_output(path, SHAPE) as sink:
        sink.write(SHAPE.whole(range(2)), VALUES)
        assert not path.exists()
        sink.commit()
    assert path.exists() and not leftovers(path.parent)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_no_temporary(path, error):
    path.write_text("old")
    with pytest.raises(error), create_output(path, SHAPE) as sink:
        sink.write(SHAPE.whole(range(1)), VALUES[:1])
        raise error
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == [path.name]


def test_several_write_one_file_and_the_one_that_made_it_commits(path):
    with create_output(path, SHAPE) as first:
        shared = first.share()
        assert os.stat(shared).st_size == SHAPE.output_bytes
        with create_output(path, SHAPE, shared) as second:
            second.write(SHAPE.whole(range(1, 2)), VALUES[1:])
            second.commit()
        first.write(SHAPE.whole(range(1)), VALUES[:1])
        assert not path.exists()
        first.commit()
    assert path.read_bytes() == VALUES.tobytes() and not leftovers(path.parent)


def test_one_of_several_that_gives_up_leaves_the_file_to_the_one_that_made_it(path):
    with create_output(path, SHAPE) as first:
        create_output(path, SHAPE, first.share()).discard()
        assert leftovers(path.parent)
    assert not leftovers(path.parent)


def test_what_is_unfinished_can_be_removed_at_once(path):
    with create_output(path, SHAPE) as sink:
        remove_half_written()
        assert not leftovers(path.parent)
        sink.write(SHAPE.whole(range(2)), VALUES)  # by a thread that does not know yet
    write_all(path)
    remove_half_written()
    assert path.exists()


def test_a_batch_of_the_wrong_size_is_not_written(path):
    with create_output(path, SHAPE) as sink, pytest.raises(ValueError, match="48 bytes for 6 rows"):
        sink.write(SHAPE.whole(range(2)), VALUES[:1])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_of_the_umask(path, umask, mode):
    old = os.umask(umask)
    try:
        write_all(path)
    finally:
        os.umask(old)
    assert permissions(path) == mode


def test_a_replaced_file_keeps_its_permissions(path):
    path.touch()
    path.chmod(0o640)
    write_all(path)
    assert permissions(path) == 0o640


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_stays_and_its_target_is_written(path, tmp_path, exists):
    target = tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
    path.symlink_to(target)
    write_all(path)
    assert path.is_symlink()
    assert target.read_bytes() == VALUES.tobytes()


def test_a_loop_of_symlinks_cannot_be_written(path):
    path.symlink_to(path)
    with pytest.raises(CannotCreate):
        create_output(path, SHAPE)


def test_a_folder_cannot_be_written(tmp_path):
    with pytest.raises(CannotCreate, match="it is a folder"):
        create_output(tmp_path, SHAPE)


@pytest.mark.parametrize("name", ["o" * 255, "ü" * 127])
def test_the_longest_file_names_can_be_written(tmp_path, name):
    write_all(tmp_path / name)
    assert os.listdir(tmp_path) == [name]


def test_a_device_is_written_through_and_stays_a_device():
    write_all(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_large_case_that_is_not_there_is_said_to_be_made(tmp_path):
    (tmp_path / "manifest.toml").touch()
    assert "make testcases" in refusal(tmp_path / "t10.in").hint
    assert refusal(tmp_path / "other" / "t10.in").hint == "check the path."
