"""What a submission may do to the judge: each thing ends in a verdict, and the judging goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import possible, until
from support import environment, script, supervisors

from flashcli.judge import containment
from flashcli.judge.scratch import Scratch, remove
from flashcli.judge.submissions import Submission, find
from flashcli.judge.supervision import Request
from flashcli.judge.supervisor import CAPTURED


@pytest.fixture
def verdicts(compiled, case, judging, tmp_path):
    """Judge a program, and after it one that is right; the first one's result."""

    def judge(program: Path, **rules: object):
        submissions = [Submission("bad", (str(program),)), Submission("good", (str(compiled("right")),))]
        made = judging(**rules)
        bad, good = made.results([case], submissions)
        assert good.verdict == "accepted", "the judging goes on"
        [supervisor] = supervisors()
        assert not containment.descendants(supervisor), "nothing runs any more"
        assert not any(files for _, _, files in os.walk(made.scratch.folder)), "nothing is left behind"
        return bad

    return judge


def test_a_fork_bomb(compiled, verdicts):
    start = time.perf_counter()
    bad = verdicts(compiled("fork_bomb"), processes=50, time_limit=10)
    assert bad.verdict == "runtime error" and bad.detail == "more than 50 processes"
    assert time.perf_counter() - start < 5


def test_ten_gigabytes_of_output(compiled, verdicts):
    most_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, of this and all earlier tests
    bad = verdicts(compiled("prints"), time_limit=1.5, grace=0.1)
    assert bad.verdict in ("accepted", "time limit exceeded")
    assert 0 < len(bad.printed) <= CAPTURED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < most_before + 2**20


def test_sigterm_ignored(compiled, verdicts):
    start = time.perf_counter()
    bad = verdicts(compiled("hangs"), time_limit=0.3, grace=0.3)
    assert (bad.verdict, bad.seconds) == ("time limit exceeded", 0.3)
    assert 0.6 <= time.perf_counter() - start < 5


def test_sigterm_heard(tmp_path, verdicts):
    """The grace time is for those that clean up; those that do are not waited for any longer."""
    program = script(tmp_path / "polite", f"#!/bin/sh\ntrap 'touch {tmp_path}/heard; exit 0' TERM\nsleep 60 & wait\n")
    start = time.perf_counter()
    assert verdicts(program, time_limit=0.3, grace=30).verdict == "time limit exceeded"
    assert (tmp_path / "heard").exists() and time.perf_counter() - start < 5


def test_a_file_outside(compiled, tmp_path, verdicts):
    """Nothing prevents it; it does no harm to the judging."""
    outside = compiled("outside", TARGET=tmp_path / "outside.txt")
    assert verdicts(outside).verdict == "accepted"
    assert (tmp_path / "outside.txt").read_text() == "I was here"


def test_an_input_deleted(compiled, verdicts):
    """It was a link of its own."""
    assert verdicts(compiled("deletes_input")).verdict == "accepted"


def test_an_input_damaged(compiled, verdicts):
    bad = verdicts(compiled("damages_input"))
    assert (bad.verdict, bad.detail) == ("runtime error", "it removed its input file")


def test_a_given_input_damaged(compiled, case, judging):
    """The judge's file is not what the program gets."""
    list(case.prepare())
    before = case.input.read_bytes()
    given = case.__class__("c1", case.shape, None, case.input, None, 20.0)
    programs = [Submission(name, (str(compiled(name)),)) for name in ("damages_input", "right")]
    assert [result.verdict for result in judging().results([given], programs)] == ["runtime error", "accepted"]
    assert case.input.read_bytes() == before


def test_children_left_behind(compiled, tmp_path, verdicts, survivors, way):
    bad = verdicts(compiled("leaves_children", PIDS=tmp_path / "pids"), containment=way)
    assert bad.verdict == "accepted" and bad.seconds < 10
    assert len((tmp_path / "pids").read_text().split()) == 3 and not survivors()


def test_a_file_too_large(compiled, verdicts):
    bad = verdicts(compiled("big_file"), file_size=2**20)
    assert (bad.verdict, bad.detail) == (
        "runtime error",
        "killed by SIGXFSZ, for it wrote a file larger than the rules allow",
    )


def test_too_much_memory(compiled, verdicts):
    assert verdicts(compiled("hungry"), memory=2**30).verdict == "accepted"
    bad = verdicts(compiled("hungry"), memory=2**28)
    assert (bad.verdict, bad.detail) == ("runtime error", "exit code 8: out of memory")


@pytest.mark.parametrize(
    ("text", "limit", "between"),
    [
        ("exec $hungry 0", 30, (2**25, 2**27)),
        ("$hungry 60 & until [ -e $big ]; do sleep 0.01; done", 30, (2**25, 2**27)),
        ("$hungry 60 & sleep 60", 1.5, (2**25, 2**27)),
        ("exit 3", 30, (1, 2**24)),
    ],
)
def test_the_most_memory_of_any_process_is_told(supervision, way, tmp_path, text, limit, between):
    """Also of one that is killed, whose end the kernel tells nobody in a namespace."""
    big = tmp_path / "big"
    use = f"import sys, time; x = b'x' * 2**25; open('{big}', 'w'); time.sleep(int(sys.argv[1]))"
    hungry = script(tmp_path / "hungry", f"#!{sys.executable} -IS\n{use}\n")
    found = run(supervision, ["sh", "-c", f"hungry={hungry}; big={big}; {text}"], time_limit=limit, containment=way)
    assert between[0] < found.memory < between[1]


def test_what_a_program_sees(compiled, verdicts, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    leak = os.dup(1)
    os.set_inheritable(leak, True)
    try:
        detail = verdicts(compiled("looks_around"), environment={"EXTRA": "7"}).printed
    finally:
        os.close(leak)
    files, folder, *variables = detail.replace(";", "").removeprefix("files ").replace("folder ", "").split()
    seen = dict(variable.split("=", 1) for variable in variables)
    assert files == "3"
    assert "SECRET_TOKEN" not in seen and "PYTHONPATH" not in seen
    assert seen["EXTRA"] == "7" and seen["CUDA_VISIBLE_DEVICES"] == "1"
    assert seen["HOME"] == seen["TMPDIR"] == folder and "/run-" in folder
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ('i=$(readlink "$1"); rm "$i"; mkfifo "$i"', "it replaced its input file by a FIFO"),
        ('i=$(readlink "$1"); rm "$i"; ln -s "$VICTIM" "$i"', "it replaced its input file by a link"),
        ('i=$(readlink "$1"); rm "$i"; mkdir "$i"', "it replaced its input file by a folder"),
        ('i=$(readlink "$1"); rm "$i"', "it removed its input file"),
        ('chmod 0 "$(readlink "$1")"', "it changed its input file"),
        ('i=$(dirname "$(readlink "$1")"); rm -r "$i"; ln -s "$(dirname "$VICTIM")" "$i"', "it changed its input file"),
        ('i=$(dirname "$(readlink "$1")"); rm -r "$i"; mkfifo "$i"', "it removed its input file"),
        ('s=$(dirname "$HOME"); rm -rf "$s"; echo > "$s"', "it damaged the judge's folder"),
        ('s=$(dirname "$HOME"); rm -rf "$s"; ln -s "$(dirname "$VICTIM")" "$s"', "it damaged the judge's folder"),
        ('s=$(dirname "$HOME"); rm -rf "$s"; mkfifo "$s"', "it damaged the judge's folder"),
        ('chmod 0 "$(dirname "$HOME")"', "it damaged the judge's folder"),
        ('chmod 777 "$(dirname "$HOME")"', "it damaged the judge's folder"),
    ],
)
def test_attacks_on_its_input_and_the_judges_folder(tmp_path, verdicts, text, detail):
    """Each is its own verdict; nothing outside is written or removed, and nobody else loses by it."""
    victim = tmp_path / "home" / "c1.in"
    victim.parent.mkdir()
    victim.write_text("mine")
    bad = verdicts(script(tmp_path / "odd", f"#!/bin/sh\n{text}\n"), environment={"VICTIM": str(victim)})
    assert (bad.verdict, bad.detail) == ("runtime error", detail)
    assert victim.read_text() == "mine" and list(victim.parent.iterdir()) == [victim]


def test_a_program_that_another_has_damaged_is_built_again(compiled, case, judging, tmp_path):
    for name in ("1-vandal", "2-good"):
        (tmp_path / name).mkdir()
    script(tmp_path / "1-vandal" / "hw4", '#!/bin/sh\nfor p in "$HOME"/../build-*/hw4; do : > "$p"; done\n')
    (tmp_path / "2-good" / "hw4").write_bytes(compiled("right").read_bytes())
    (tmp_path / "2-good" / "hw4").chmod(0o755)
    judging = judging(build=":", runs=1)
    submissions = find([str(tmp_path / "2-good"), str(tmp_path / "1-vandal")], judging.rules)
    second = replace(case, name="c2")
    first, vandal, again, _ = judging.results([case, second], submissions)
    assert (first.verdict, vandal.verdict, again.verdict) == ("accepted", "no output", "accepted")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('mkfifo "$2"', "no output"),
        ('mkdir "$2"', "no output"),
        ('ln -s /dev/zero "$2"', "no output"),
        ('ln -s "$1" "$2"', "no output"),
        ('mknod "$2" c 1 5', "no output"),
        ('d="$HOME"; for i in $(seq 300); do d="$d/deeper"; done; mkdir -p "$d"', "no output"),
        ('mkdir "$HOME/closed" && chmod 0 "$HOME/closed"', "no output"),
        ("kill -KILL $$", "runtime error"),
        ("printf '\\377\\000\\033[2J'; exit 1", "runtime error"),
    ],
)
def test_odd_things(tmp_path, verdicts, text, verdict):
    assert verdicts(script(tmp_path / "odd", f"#!/bin/sh\n{text}\n")).verdict == verdict


@pytest.mark.parametrize(
    ("text", "verdict", "detail"),
    [
        ("kill -STOP $$", "time limit exceeded", "stopped after 1.5 s"),
        ("kill -STOP 1; kill -TERM 1; kill -KILL 1; exit 5", "runtime error", "exit code 5"),
        ("kill -KILL -1 2> /dev/null; exit 6", "runtime error", "exit code 6"),
        ('ln "$(readlink "$1")" "$HOME/kept"', "runtime error", "it changed its input file"),
        ('ln -f "$(readlink "$1")" "$2"', "runtime error", "it changed its input file"),
        ('(sleep 0.3; echo late > "$2") & exit 0', "no output", "it ended well, but wrote no file"),
        ("echo left > /dev/shm/$LEFT; exit 7", "runtime error", "exit code 7"),
    ],
)
def test_attacks_from_a_namespace(tmp_path, verdicts, text, verdict, detail):
    """Signals to whatever it sees, files it keeps a hold of, and what it hopes to do or to leave after its end."""
    if not possible("namespace"):
        pytest.skip("there is no namespace here, and without one these signals would reach others")
    left = f"flashcli-test-{os.getpid()}"
    program = script(tmp_path / "odd", f"#!/bin/sh\n{text}\n")
    found = verdicts(program, containment="namespace", time_limit=1.5, grace=0.1, environment={"LEFT": left})
    assert (found.verdict, found.detail) == (verdict, detail)
    assert not os.path.exists(f"/dev/shm/{left}")


SPIES = (
    f"#!{sys.executable} -IS"
    + """
import ctypes, os
libc = ctypes.CDLL(None)
parent = os.getppid()
above = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
for pid in filter(None, (parent, above, {judge})):
    for name in ("mem", "environ", "fd/0", "fd/1"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_NONBLOCK))
            print("opened", name, "of", pid)
        except OSError:
            pass
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("attached to", pid)
try:
    import time; time.clock_settime(time.CLOCK_REALTIME, time.time())
    print("set the clock")
except OSError:
    pass
"""
)


def test_no_program_looks_into_the_judges_processes(supervision, way, tmp_path):
    """It could tell them another time than it took, and read what is right. The judge hides when it begins."""
    judge = subprocess.Popen(
        [sys.executable, "-c", "from flashcli.judge.containment import hide; hide(); print(flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    judge.stdout.readline()
    spies = script(tmp_path / "spies", SPIES.replace("{judge}", str(judge.pid)))
    found = run(supervision, [str(spies)], containment=way, limits={"core": 0}, processes=100)
    judge.communicate(b"\n")
    assert (found.returncode, found.printed) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("generation", [0, 1], ids=["the first process", "the supervisor"])
def test_who_watches_a_program_can_be_hurt_by_it_and_nothing_runs_on(
    supervision, way, tmp_path, survivors, monkeypatch, number, generation
):
    monkeypatch.setattr("flashcli.judge.supervision.KILL_PATIENCE", 0.2)
    text = f"""#!{sys.executable} -IS
import os, subprocess, time
pids = [os.getppid()]
pids.append(int(open(f"/proc/{{pids[0]}}/stat").read().rpartition(")")[2].split()[1]))
subprocess.Popen(["sleep", "60"])
pids[{generation}] and os.kill(pids[{generation}], {int(number)})
time.sleep(60)
"""
    bad = script(tmp_path / "bad", text)
    request = Request([str(bad)], str(tmp_path), {"HOME": f"{tmp_path}/x", "PATH": os.environ["PATH"]}, 0.5)
    request.containment = way
    assert supervision.run(request).stopped in ("time", "lost")
    assert until(lambda: not survivors(), 5)
    assert run(supervision, ["true"], containment=way).returncode == 0, "another takes its place"


def test_a_program_that_is_none(tmp_path, verdicts):
    bad = verdicts(script(tmp_path / "odd", "#!/no/such/interpreter\n"))
    assert bad.verdict == "runtime error" and "there is no '/no/such/interpreter'" in bad.detail


def test_a_program_removed_meanwhile(tmp_path, verdicts):
    assert verdicts(tmp_path / "gone").verdict == "runtime error"


def run(supervision, command: list[str], time_limit: float = 10.0, **more: object):
    return supervision.run(Request(command, None, dict(os.environ), time_limit, **more))


def test_the_time_is_exact(supervision):
    """It begins when the command is started, and ends when the kernel tells that it has ended."""
    times = [run(supervision, ["sleep", "0.101"]).seconds for _ in range(3)]
    assert 0.101 <= min(times) < 0.125


def test_limits_are_set_and_none_above_what_the_system_allows(supervision):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = {"nofile": most + 1, "core": 0, "fsize": 3 * 2**20, "as": None}
    text = "ulimit -H -n; ulimit -H -c; ulimit -H -f; ulimit -H -v"
    done = run(supervision, ["bash", "-c", text], processes=100, limits=limits)
    assert done.printed.split() == [str(most), "0", "3072", "unlimited"]


def test_a_judges_folder_is_removed_by_nobody_else_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Scratch() as first:
        with Scratch() as second:
            first.mend()
            assert first.folder.exists() and second.folder.exists()
        assert first.intact()
    assert not list(tmp_path.iterdir())


def test_removing_goes_through_no_link(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("folder", "link"):
        remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine" / "file").exists()
