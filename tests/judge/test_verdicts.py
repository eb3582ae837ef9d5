"""Each submission in programs/ gets the verdict it deserves, from the command line and on fresh inputs."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from support import flashcli, random_qkv, script, write_input, write_output

from flashcli.files.verify import reference
from flashcli.judge.answers import answer
from flashcli.judge.judging import derived_seed
from flashcli.judge.submissions import Submission

PLACE = "(batch, row, column)"


def judge(*args, code: int) -> list[dict]:
    done = flashcli("judge", *args, "--json", "-")
    assert done.code == code, done.err
    return json.loads(done.out)["cases"]


@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("right", "accepted", ""),
        ("wrong_by_one", "wrong answer", f"1 of 384 elements, largest error 0.01, first at {PLACE} = (1, 5, 7)"),
        ("crash", "runtime error", "killed by SIGSEGV: so far, so good"),
        ("gives_up", "runtime error", "exit code 3: �[31mno GPU�[0m found"),
        ("nothing", "no output", "it ended well, but wrote no file"),
        ("half", "wrong size", "768 bytes, not 1536"),
    ],
)  # fmt: skip
def test_verdicts(compiled, cases, name, verdict, detail):
    [found] = judge(cases, "--exe", compiled(name), "--case", "c1", code=0 if verdict == "accepted" else 1)
    assert found["verdict"] == verdict
    assert found["detail"].startswith(detail) and bool(found["detail"]) == bool(detail)


def test_too_slow_for_one_limit_but_not_for_another(compiled, cases, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('cases = "cases"\ntime_limit = 0.25\n[case.c2]\ntime_limit = 20\n')
    first, second = judge(rules, "--exe", compiled("slow"), code=1)
    assert (first["verdict"], first["detail"]) == ("time limit exceeded", "stopped after 0.25 s")
    assert first["seconds"] == 0.25
    assert second["verdict"] == "accepted" and 0.5 <= second["seconds"] < 5


def test_a_copied_reference_is_no_answer(compiled, testcases):
    """It is the right one for the committed inputs, which is why inputs are made anew."""
    cheats = compiled("cheats", REFERENCES=testcases)
    [found] = judge(testcases, "--exe", cheats, "--case", "t01", code=1)
    assert found["verdict"] == "wrong answer"


def test_the_same_seed_gives_the_same_inputs_and_another_others(cases, tmp_path):
    spy = script(tmp_path / "spy", '#!/bin/sh\nsha256sum < "$1"\nexit 1\n')
    details = [
        [found["detail"] for found in judge(cases, "--exe", spy, *seed, code=1)]
        for seed in (["--seed", 5], ["--seed", 5], ["--seed", 6], [], [])
    ]
    assert details[0] == details[1]
    assert len({*map(tuple, details)}) == 4
    assert details[0][0] != details[0][1]


def test_the_seed_is_told(cases, compiled):
    done = flashcli("judge", cases, "--case", "c1", "--exe", compiled("right"))
    seed = int(done.err.split("--seed ")[1].split()[0])
    again = flashcli("judge", cases, "--case", "c1", "--exe", compiled("right"), "--seed", seed)
    assert f"seed {seed};" in again.err and again.code == 0


def test_each_run_has_a_new_input_and_is_checked(compiled, case, judging, tmp_path):
    """A program that keeps its first answer, which was right, is found out by the second run."""
    text = f'#!/bin/sh\nk={tmp_path}/kept\n[ -e $k ] || {compiled("right")} "$1" $k\ncp $k "$2"\n'
    [found] = judging(runs=2).results([case], [Submission("keeps", (str(script(tmp_path / "keeps", text)),))])
    assert found.verdict == "wrong answer" and len(found.runs) == 2
    assert len({derived_seed(3, name, run) for name in ("c1", "c2") for run in range(2)}) == 4


def test_several_runs_give_their_median(compiled, cases):
    [found] = judge(cases, "--exe", compiled("right"), "--case", "c1", "--runs", 3, code=0)
    assert len(found["runs"]) == 3 and found["seconds"] == sorted(found["runs"])[1]


def test_given_inputs_are_used_as_they_are(compiled, tmp_path):
    """Without a manifest there is no seed: the teacher's own files are what is to be computed."""
    qkv = random_qkv(2, 9, 4)
    write_input(tmp_path / "a.in", qkv)
    right = np.stack([reference(batch) for batch in qkv])
    write_output(tmp_path / "a.ref", right)
    assert judge(tmp_path, "--exe", compiled("right"), code=0)
    write_output(tmp_path / "a.ref", right + 1)
    assert judge(tmp_path, "--exe", compiled("right"), code=1)


def test_an_output_of_nan_alone_has_no_largest_error(cases, tmp_path):
    text = "#!/bin/sh\nhead -c 1536 /dev/zero | tr '\\0' '\\377' > \"$2\"\n"
    [found] = judge(cases, "--exe", script(tmp_path / "nan", text), "--case", "c1", code=1)
    assert found["detail"].startswith("384 of 384 elements, 384 NaN or Inf, first at ")


def test_a_large_case_is_checked_in_every_batch(monkeypatch, case):
    """Rows are sampled there, and which ones is not to be known."""
    monkeypatch.setattr("flashcli.judge.answers.ALL_ROWS", 0)
    monkeypatch.setattr("flashcli.judge.answers.SAMPLED_ROWS", 8)
    list(case.prepare())
    from flashcli.files.fileformat import InputFile

    with InputFile(case.input) as source:
        o = np.stack([reference(qkv) for qkv in source.read(range(2))]).astype(np.float32)
    output = case.input.with_suffix(".out")
    compare = answer(case, secret=1)
    assert compare(write_output(output, o), 1e-4).matches and compare(output, 1e-4).count == 2 * 4 * 8
    for batch in range(2):
        damaged = o.copy()
        damaged[batch] = np.nan
        assert compare(write_output(output, damaged), 1e-4).mismatches == 4 * 8
    checked = [{place["row"] for place in answer(case, secret)(output, 0.0).places} for secret in range(8)]
    assert len(set(map(tuple, checked))) > 1


def test_a_folder_of_submissions_each_built_in_a_copy(compiled, cases, tmp_path):
    course = tmp_path / "course"
    for name in ("alice", "bob", "carol"):
        (course / name).mkdir(parents=True)
    (course / "alice" / "hw4.c").write_text("int main(void) { return 5; }\n")
    (course / "bob" / "hw4.c").write_text("int main(void) { return }\n")
    (course / "carol" / "hw4").write_bytes(compiled("right").read_bytes())
    (course / "carol" / "hw4").chmod(0o755)
    before = sorted(course.rglob("*"))
    build = "test -e hw4 || cc -o hw4 hw4.c"
    found = judge(cases, "--exe", course, "--build", build, "--case", "c1", code=1)
    verdicts = {entry["submission"]: (entry["verdict"], entry["detail"]) for entry in found}
    assert verdicts["alice"] == ("runtime error", "exit code 5")
    assert verdicts["bob"][0] == "build failed" and verdicts["bob"][1].startswith("exit code 1: ")
    assert verdicts["carol"] == ("accepted", "")
    assert sorted(course.rglob("*")) == before


def test_a_program_that_was_not_built_asks_for_the_build(cases, tmp_path):
    (tmp_path / "course" / "alice").mkdir(parents=True)
    (tmp_path / "course" / "alice" / "hw4.c").touch()
    found = judge(cases, "--exe", tmp_path / "course", code=1)
    told = ("build failed", "there is no program hw4; is --build missing?")
    assert [(entry["verdict"], entry["detail"]) for entry in found] == [told, told]
    done = flashcli("judge", cases, "--exe", tmp_path / "course" / "alice")
    done.assert_error(65, "no submissions")
    assert "is --build missing?" in done.err


def test_the_folder_of_one_submission_is_built_too(compiled, cases, tmp_path):
    (tmp_path / "alice").mkdir()
    (tmp_path / "alice" / "source").write_bytes(compiled("right").read_bytes())
    build = "cp source hw4; chmod +x hw4"
    for place, folder in ((tmp_path / "alice", "."), (tmp_path, "alice")):
        done = flashcli("judge", cases, "--exe", folder, "--build", build, "--case", "c1", "--json", "-", cwd=place)
        assert [entry["submission"] for entry in json.loads(done.out)["cases"]] == ["alice"]
        assert done.code == 0
    assert not (tmp_path / "alice" / "hw4").exists()


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (
            "cc hw4.c\\nhw4.c:1: warning: x\\nhw4.c:2: error: y\\nmake: *** [Makefile:2: hw4] Error 1",
            "hw4.c:2: error: y",
        ),
        ("make[1]: *** error: x\\nhw4.c:1: Fatal Error: y\\nhw4.c:2: error: z", "hw4.c:1: Fatal Error: y"),
        ("hw4.c:1: warning: x\\nmake: *** No rule to make target", "make: *** No rule to make target"),
    ],
)
def test_a_failed_build_tells_the_first_error_and_keeps_the_rest(cases, tmp_path, printed, told):
    (tmp_path / "alice").mkdir()
    results = tmp_path / "results.jsonl"
    build = f"printf '{printed}'; exit 2"
    where = "--exe", tmp_path / "alice" / "hw4", "--case", "c1", "--results", results
    [found] = judge(cases, *where, "--build", build, code=1)
    assert (found["verdict"], found["detail"]) == ("build failed", f"exit code 2: {told}")
    assert json.loads(results.read_text().splitlines()[1])["printed"] == printed.replace("\\n", "\n")


def test_a_build_that_hangs_and_one_that_makes_nothing(cases, tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('cases = "cases"\nbuild_time_limit = 0.3\ngrace = 0.1\n')
    (tmp_path / "alice").mkdir()
    program = tmp_path / "alice" / "hw4"
    for build, detail in (("sleep 60 & sleep 60", "stopped after 0.3 s"), ("true", "it made no program hw4")):
        start = time.perf_counter()
        [first, _] = judge(rules, "--exe", program, "--build", build, code=1)
        assert (first["verdict"], first["detail"]) == ("build failed", detail)
        assert time.perf_counter() - start < 10


def test_several_programs_get_a_scoreboard(compiled, cases):
    done = flashcli("judge", cases, "--exe", f"right={compiled('right')}", "--exe", f"half={compiled('half')}")
    assert done.code == 1
    lines = done.out.splitlines()
    assert len(lines) == 4 + 1 + 1 + 2 + 3
    assert (
        len({line.index(verdict) for line, verdict in zip(lines[:4], 2 * ["accepted", "wrong size"], strict=True)}) == 1
    )
    assert lines[4].startswith("1 of 2 submissions have all cases accepted, ")
    assert lines[-3].split() == ["rank", "submission", "accepted", "time", "memory"]
    assert lines[-2].startswith("1     ") and "right" in lines[-2] and "2 of 2" in lines[-2]
    assert lines[-1].startswith("-     ") and "half" in lines[-1] and "0 of 2" in lines[-1]


def test_a_program_here_needs_no_path(cases, compiled, tmp_path):
    compiled("right", into=tmp_path)
    for name in ("right", "./right"):
        assert flashcli("judge", cases, "--exe", name, cwd=tmp_path).code == 0
    flashcli("judge", cases, "--exe", "none", cwd=tmp_path).assert_error(2, "cannot be run", "no such file")


def test_a_board_that_cannot_be_written_is_found_out_before_judging(cases, compiled, tmp_path, ordinary_user):
    arguments = "judge", cases, "--exe", compiled("right"), "--board"
    done = flashcli(*arguments, tmp_path / "none" / "b.md")
    done.assert_error(73, "cannot write", "b.md")
    assert not done.out
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    done = flashcli(*arguments, locked / "b.md", **ordinary_user)
    done.assert_error(77, "cannot write", "b.md")
    assert not done.out
    flashcli(*arguments, tmp_path / "b.md", "--case", "none").assert_error(2, "no case")
    assert not (tmp_path / "b.md").exists()


def test_the_summary_does_not_wait_for_the_boards(cases, tmp_path):
    (tmp_path / "boards").mkdir()
    vandal = script(tmp_path / "vandal", f"#!/bin/sh\nrm -rf {tmp_path}/boards\n")
    done = flashcli("judge", cases, "--exe", vandal, "--board", tmp_path / "boards" / "b.md")
    done.assert_error(73, "cannot write", "b.md")
    assert done.out.splitlines()[-1].startswith("0 of 2 accepted, ")


def test_wrong_usage(compiled, cases, tmp_path):
    right = compiled("right")
    flashcli("judge", cases, "--exe", tmp_path / "none").assert_error(2, "cannot be run", "no such file")
    flashcli("judge", cases, "--exe", cases / "manifest.toml").assert_error(2, "permission denied")
    flashcli("judge", cases, "--exe", right, "--exe", right).assert_error(2, "two submissions")
    flashcli("judge", cases, "--exe", cases).assert_error(65, "no submissions")
    flashcli("judge", cases, "--exe", "", cwd=tmp_path).assert_error(2, "--exe names nothing")
    flashcli("judge", cases, "--resume", "--exe", right).assert_error(2, "--resume")
    assert flashcli("judge", cases, "--exe", right, "--board", "x.pdf").code == 2


def test_numbers_of_twice_the_size_are_told_as_such(cases, tmp_path):
    doubles = script(tmp_path / "doubles", '#!/bin/sh\nhead -c 3072 /dev/zero > "$2"\n')
    [found] = judge(cases, "--exe", doubles, "--case", "c1", code=1)
    assert found["detail"] == "3072 bytes, not 1536, twice as many: float64, not float32?"
