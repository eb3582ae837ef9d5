"""Faults in the middle of a run, injected into a process of its own that streams 20 chunks of one batch each, on the
CPU, on a GPU that computes in NumPy and on a real one: what is said, with which exit code, and what is left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
from support import (
    FAULTY,
    SOON,
    Finished,
    environment,
    flashcli,
    leftovers,
    python,
    random_qkv,
    read_floats,
    sampled,
    sparse_input,
)
from tolerances import assert_accurate

QKV = random_qkv(20, 60, 32)
OLD = b"the old output"
THREADS_ARE_LEFT = 99

# The command line with small chunks. FAULT patches what is to fail. No thread outlives the command.
PROGRAM = (
    FAULTY
    + """
import flashcli.files.outputs, flashcli.files.cut, flashcli.run.stream as stream
flashcli.files.cut.CHUNK_BYTES = {chunk_bytes}
{fault}
from flashcli.cli import main
code = main()
os._exit(code if threading.enumerate() == [threading.main_thread()] else {threads_are_left})
"""
)


CPU = ["--backend", "cpu"]
CUDA = ["--backend", "cuda", "--kernel", "q_in_registers"]


@pytest.fixture(params=["cpu", "fake_gpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> list[str]:
    """The options that choose it."""
    if request.param == "cpu":
        return CPU
    request.getfixturevalue(request.param)
    return CUDA


@pytest.fixture
def out(out: Path) -> Path:
    """Alone in its folder, and there already."""
    out.write_bytes(OLD)
    return out


def command(given: Path, out: Path, backend: list[str], fault: str) -> list[str]:
    program = PROGRAM.format(chunk_bytes=QKV[0].nbytes, fault=fault, threads_are_left=THREADS_ARE_LEFT)
    return ["-c", program, "run", str(given), str(out), *backend]


def run(given: Path, out: Path, backend: list[str], fault: str = "", **options: object) -> Finished:
    return python(*command(given, out, backend, fault), timeout=60, **options)


def assert_untouched(out: Path) -> None:
    assert os.listdir(out.parent) == [out.name]
    assert out.read_bytes() == OLD


def assert_right(out: Path) -> None:
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


def test_without_a_fault_it_is_20_chunks(given, out, backend):
    trace = out.with_name("trace.json")
    assert run(given, out, [*backend, "--trace", trace]).code == 0
    assert all(trace.read_text().count(f'"{step} batches') == 20 for step in ("read", "compute", "write"))
    assert_right(out)


# Files that fail


FULL = "os.pwrite = nth(7, lambda: throw(OSError(28, 'No space left on device')), os.pwrite)"


def test_a_disk_that_fills_up(given, out, backend):
    run(given, out, backend, FULL).assert_error(74, f"cannot write '{out}': no space left on device")
    assert_untouched(out)


def test_a_disk_that_is_full_from_the_start(given, out, backend):
    """Shows before anything is read."""
    full = "no_room = lambda: throw(OSError(28, 'No space left on device'))"
    unread = "os.preadv = nth(1, lambda: throw(AssertionError()), os.preadv)"
    fault = f"{full}\n{unread}\nflashcli.files.outputs._reserve = lambda *args: no_room()"
    run(given, out, backend, fault).assert_error(74, f"cannot write '{out}': no space left on device")
    assert_untouched(out)


def test_a_limit_on_the_size_of_files(given, out, backend):
    limit = (7 * QKV[0, 0].nbytes + 100,) * 2  # within the eighth chunk
    done = run(given, out, backend, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    done.assert_error(74, f"cannot write '{out}': file too large")
    assert_untouched(out)


def test_a_disk_that_is_full_only_on_closing(given, out, backend):
    # As network file systems have it. The descriptor is closed then, whatever close() says.
    fault = """
def close(fd, close=os.close):
    regular = os.readlink(f"/proc/self/fd/{fd}").endswith(".tmp")
    close(fd)
    if regular:
        raise OSError(122, "Disk quota exceeded")
os.close = close
"""
    run(given, out, backend, fault).assert_error(74, f"cannot write '{out}': disk quota exceeded")
    assert_untouched(out)


def test_an_input_cut_off_while_it_is_read(given, out, backend):
    fault = f"os.preadv = nth(7, lambda: os.truncate({str(given)!r}, 12 + {6 * QKV[0].nbytes}), os.preadv)"
    run(given, out, backend, fault).assert_error(65, f"'{given}' became shorter while it was read.")
    assert_untouched(out)


def test_an_input_that_cannot_be_read_any_further(given, out, backend):
    fault = "os.preadv = nth(7, lambda: throw(OSError(5, 'Input/output error')), os.preadv)"
    run(given, out, backend, fault).assert_error(74, f"cannot read '{given}': input/output error.")
    assert_untouched(out)


@pytest.mark.parametrize("instead", ["", "open(folder, 'w').close()"], ids=["removed", "replaced by a file"])
def test_an_output_folder_that_goes_away(given, out, backend, instead):
    fault = f"""
import shutil
def remove(folder={str(out.parent)!r}):
    shutil.rmtree(folder)
    {instead}
os.pwrite = nth(7, remove, os.pwrite)
"""
    done = run(given, out, backend, fault)
    done.assert_error(73, f"cannot write '{out}': no{'t a' if instead else ' such file or'} directory.")
    assert not out.parent.is_dir()


# Whatever else


@pytest.mark.parametrize(
    "place",
    ["stream._Stream._read", "os.preadv", "os.pwrite", "stream.Timeline.measure"],
    ids=["a reader", "reading", "a writer", "any step"],
)
def test_something_unexpected(given, out, backend, place):
    done = run(given, out, backend, f"{place} = nth(7, lambda: throw(ZeroDivisionError('gremlins')), {place})")
    assert done.code == 70
    assert done.err == (
        "Error: internal error: ZeroDivisionError: gremlins.\nHint: run again with --debug, and report it.\n"
    )
    assert_untouched(out)


def test_no_more_threads(given, out, backend):
    fault = 'stream.Pool = lambda *args: throw(RuntimeError("can\'t start new thread"))'
    run(given, out, backend, fault).assert_error(71, "the system starts no more threads.")
    assert_untouched(out)


def test_no_memory_left_in_a_reader(given, out, backend):
    fault = "os.preadv = nth(7, lambda: throw(MemoryError()), os.preadv)"
    run(given, out, backend, fault).assert_error(71, "out of memory")
    assert_untouched(out)


# A GPU that fails


@pytest.mark.parametrize("step", ["launch", "synchronize"])
def test_a_kernel_that_fails_in_the_seventh_chunk(fake_gpu, monkeypatch, given, out, step):
    monkeypatch.setenv("FAKE_GPU_FAILS", f"{step}:7")
    message = f"kernel q_in_registers failed on Fake GPU: fake failure of {step}."
    run(given, out, CUDA).assert_error(70, message)
    assert_untouched(out)


@pytest.mark.parametrize("backend_name", ["cuda", "auto"])
def test_a_gpu_that_others_have_filled(fake_gpu, monkeypatch, given, out, backend_name):
    monkeypatch.setenv("FAKE_GPU_TAKEN", str(2**30 - 2000))
    done = run(given, out, ["--backend", backend_name])
    done.assert_error(71, "one batch of N = 60, d = 32 needs", "on Fake GPU, 2000 bytes are free.")
    assert_untouched(out)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("context", "Fake GPU has no memory left for a context."),
        ("load", "the GPU has no memory left for kernel q_in_registers."),
    ],
)
def test_a_gpu_that_others_have_filled_to_the_brim(fake_gpu, monkeypatch, given, out, step, message):
    monkeypatch.setenv("FAKE_GPU_LACKS_MEMORY_FOR", step)
    run(given, out, CUDA).assert_error(71, message)
    assert_untouched(out)


def test_less_memory_than_hoped_for_is_enough(fake_gpu, monkeypatch, given, out):
    monkeypatch.setenv("FAKE_GPU_TAKEN", str(2**30 - 9 * QKV[0, 0].nbytes))  # room for two slots of eight
    assert run(given, out, CUDA).code == 0
    assert_right(out)


@pytest.mark.parametrize("number", ["ENOMEM", "EMFILE", "ENFILE"])
@pytest.mark.parametrize("call", ["os.preadv", "os.open"])
def test_what_the_system_has_no_more_of(given, out, number, call):
    code = getattr(errno, number)
    fault = f"{call} = lambda *args, **options: throw(OSError({code}, os.strerror({code})))"
    run(given, out, CPU, fault).assert_error(71, f"cannot read '{given}'")
    assert_untouched(out)


@pytest.mark.parametrize("mebibytes", [40, 80, 110, 150, 190, 230, 270, 310])
@pytest.mark.parametrize("name", ["run", "compare"])
def test_whatever_memory_there_is_the_exit_code_is_right_and_nothing_is_left(given, out, tmp_path, name, mebibytes):
    """OpenBLAS, without memory, ends the process with 1; the limit decides where memory is short.

    A thread that finds none for a buffer of NumPy's is lost: NumPy raises MemoryError there without the GIL (2.4.6,
    `npyiter_allocate_buffers`), and the process crashes. It happens once in some hundred runs.
    """
    limit = (mebibytes * 2**20,) * 2
    other = tmp_path / "other.out"
    other.write_bytes(OLD)
    arguments = ["run", given, out, *CPU] if name == "run" else ["compare", given, given]
    done = flashcli(*arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
    if done.code == -signal.SIGSEGV:
        assert out.read_bytes() == OLD
        return
    if done.code != 0:
        done.assert_error(71)
        assert_untouched(out)
    assert not leftovers(out.parent)


# Signals

SLOW = "os.preadv = lambda *args, read=os.preadv: time.sleep(0.3) or read(*args)"


@contextlib.contextmanager
def started(arguments: list[str], begun: Callable[[], object]) -> Iterator[subprocess.Popen]:
    """A run that has begun what it is to be stopped in."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(arguments, env=environment(), stdout=pipe, stderr=pipe)
    while process.poll() is None and not begun():
        time.sleep(0.01)
    try:
        assert process.poll() is None, process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def under_way(given, out, backend):
    """A run of some seconds that has written some chunks and not yet read others."""

    def written() -> bool:
        return any((out.parent / name).stat().st_size for name in leftovers(out.parent))

    with started([sys.executable, *command(given, out, backend, SLOW)], written) as process:
        yield process


@pytest.fixture
def computing(tmp_path, out):
    """A run in the middle of its only chunk, which would take a minute."""
    given = sparse_input(tmp_path / "long.in", 1, 200_000, 32)
    with started(support.command("run", given, out, *CPU), lambda: leftovers(out.parent)) as process:
        time.sleep(0.3)
        yield process


def unread(pipe: int) -> int:
    """How many bytes wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_signal_while_nobody_reads_the_pipe(given, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # which never reads: the pipe is full after 64 KiB
    try:
        room = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ)
        with started(support.command("run", given, pipe, *CPU), lambda: unread(reader) > room // 2) as process:
            process.terminate()
            assert process.wait(SOON) == 143
    finally:
        os.close(reader)


def assert_stops(process: subprocess.Popen, out: Path, number: int, times: int, code: int, word: str) -> None:
    start = time.monotonic()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.02)
    stdout, stderr = process.communicate(timeout=2 * SOON)
    assert time.monotonic() - start < SOON
    assert (process.returncode, stdout) == (code, b"")
    assert stderr.decode() == f"Error: {word}; nothing is left half-written.\n"
    assert_untouched(out)


SIGNALS = pytest.mark.parametrize(
    ("number", "code", "word"),
    sampled(
        [
            (signal.SIGINT, 130, "interrupted"),
            (signal.SIGQUIT, 131, "terminated"),
            (signal.SIGTERM, 143, "terminated"),
        ]
    ),
)


@SIGNALS
@pytest.mark.parametrize("times", [1, 4], ids=["once", "impatiently"])
def test_a_signal_between_chunks_leaves_no_trace(under_way, out, number, code, word, times):
    assert_stops(under_way, out, number, times, code, word)


@SIGNALS
def test_a_signal_within_a_long_chunk_leaves_no_trace(computing, out, number, code, word):
    assert_stops(computing, out, number, 1, code, word)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_signal_while_the_temporary_file_is_made(given, out, where):
    fault = f"""
def open_stopped(path, *args, make=os.open, **options):
    made = make(path, *args, **options) if {where!r} == "after" or not str(path).endswith(".tmp") else None
    if str(path).endswith(".tmp"):
        os.kill(os.getpid(), 15)
    return made
os.open = open_stopped"""
    done = run(given, out, CPU, fault)
    assert (done.code, done.err) == (143, "Error: terminated; nothing is left half-written.\n")
    assert_untouched(out)


def test_a_signal_after_the_output_has_its_name_says_that_it_is_complete(given, out):
    fault = """
def replace(*names, rename=os.replace):
    rename(*names)
    os.kill(os.getpid(), 15)
os.replace = replace
"""
    trace = out.with_name("trace.json")  # still to be written
    done = run(given, out, [*CPU, "--trace", trace], fault)
    assert (done.code, done.err) == (143, f"Error: terminated, but {str(out)!r} is complete.\n")
    assert_right(out)
    assert os.listdir(out.parent) == [out.name]


def test_a_signal_that_turns_into_another_error_is_told_as_a_signal(given, out):
    fault = """
def broken(*args):
    try:
        os.kill(os.getpid(), 15)
        time.sleep(1)
    except BaseException:
        raise RuntimeError("release unlocked lock")
stream.chunks = broken"""
    done = run(given, out, CPU, fault)
    assert (done.code, done.err) == (143, "Error: terminated; nothing is left half-written.\n")
    assert_untouched(out)


def test_kill_leaves_a_temporary_file_that_the_next_run_ignores(under_way, given, out, backend):
    under_way.kill()
    under_way.communicate(timeout=30)
    assert out.read_bytes() == OLD
    [temporary] = leftovers(out.parent)
    assert sorted(os.listdir(out.parent)) == sorted([out.name, temporary])
    assert flashcli("run", given, out, *backend).code == 0
    assert_right(out)
    assert leftovers(out.parent) == [temporary]
