"""Rules files: what they may say, and one clear sentence for whatever they may not."""

from __future__ import annotations

import pytest
from support import flashcli

from flashcli.commands import scoreboard as command
from flashcli.errors import BadInput
from flashcli.judge import rules, views

EVERYTHING = """
cases = "cases"
select = ["t[01-10]", "x?"]
time_limit = 10
grace = 0.5
penalty = 100
tolerance = 1e-3
runs = 3
ranking = "relative"
exe = "bin/hw4"
build = "make hw4"
build_time_limit = 60
readable = ["/home/course/venv"]
launcher = ["srun", "-N1", "-n1", "--gres=gpu:1"]
memory = "8 GiB"
file_size = 1000
processes = 64

[environment]
OMP_NUM_THREADS = "4"

[case."t[08-10]"]
time_limit = 30
[case.t10]
tolerance = 1e-2
points = 5
"""


def load(tmp_path, text: str):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return rules.load(path)


def test_everything_that_can_be_said(tmp_path):
    found = load(tmp_path, EVERYTHING)
    assert found.cases == tmp_path / "cases"
    assert found.launcher == ("srun", "-N1", "-n1", "--gres=gpu:1")
    assert found.memory == 8 * 2**30
    assert found.environment == {"OMP_NUM_THREADS": "4"}
    assert set(found.__dict__) == set(rules.CHECKS), "every rule has a check, so that it can be in a file"


def test_overrides_of_single_cases(tmp_path):
    found = load(tmp_path, EVERYTHING)
    values = [
        [getattr(found.for_case(n), k) for k in ("time_limit", "tolerance", "points")] for n in ("t01", "t08", "t10")
    ]
    assert values == [[10, 1e-3, None], [30, 1e-3, None], [30, 1e-2, 5]]


def test_an_empty_file_has_the_defaults(tmp_path):
    assert load(tmp_path, "") == rules.Rules(cases=tmp_path / "testcases")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("t01", ["t01"], ["t1", "t011"]),
        ("t[01-10]", ["t01", "t09", "t10"], ["t00", "t11", "t1"]),
        ("t[8-11]", ["t8", "t11"], ["t08", "t12"]),
        ("[1-2]x[1-2]*", ["1x1", "2x2y"], ["1x3", "x1"]),
        ("t?[ab]", ["t1a", "txb"], ["t1c", "ta"]),
        ("T01", [], ["t01"]),
    ],
)
def test_patterns(pattern, yes, no):
    assert all(rules.matches(name, pattern) for name in yes)
    assert not any(rules.matches(name, pattern) for name in no)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time_limt = 3", "there is no key 'time_limt'"),
        ("select = 't01'", "select must be a list of patterns of case names"),
        ("time_limit = 0", "time_limit must be a number of seconds above 0, not 0"),
        ("time_limit = inf", "time_limit must be"),
        ("time_limit = true", "time_limit must be"),
        ("tolerance = nan", "tolerance must be"),
        ("points = 0", "points must be a number above 0, not 0"),
        ("runs = 1.5", "runs must be a whole number above 0"),
        ("ranking = 'best'", "ranking must be one of passed, penalty, relative, not 'best'"),
        ("launcher = 'srun -N1'", "launcher must be a list of words"),
        ("memory = '8 XB'", "memory must be a number of bytes"),
        ("memory = -1", "memory must be"),
        ("exe = '../hw4'", "exe must be the name of a file"),
        ("[environment]\nA = 1", "environment must be a table of texts"),
        ("environment = 3", "environment must be a table of texts"),
        ("readable = ['venv']", "readable must be a list of absolute paths"),
        ("case = 3", "case must be tables by pattern"),
        ("[case]\nt01 = 3", "case.t01: 3 is not a table"),
        ("[case.t01]\nlauncher = ['x']", "case.t01: there is no key 'launcher'"),
        ("[case.t01]\ntime_limit = -1", "case.t01: time_limit must be"),
        ("select = ['t01", "rules file"),
        ("\x00", "rules file"),
    ],
)
def test_bad_files(tmp_path, text, said):
    with pytest.raises(BadInput) as error:
        load(tmp_path, text)
    assert said in str(error.value)
    assert "time_limit" in error.value.hint


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="is not a rules file"):
        rules.load(tmp_path / "rules.toml")


def test_bad_rules_on_the_command_line(tmp_path, cases):
    path = tmp_path / "rules.toml"
    path.write_text("time_limt = 3")
    flashcli("judge", path).assert_error(65, "'time_limt'")
    flashcli("judge", tmp_path / "none.toml").assert_error(65, "none.toml", "no such file")
    path.write_text('cases = "cases"\nlauncher = ["srum", "-N1"]')
    flashcli("judge", path).assert_error(69, "'srum'")
    path.write_text('cases = "cases"\nselect = ["c1", "c[3-4]"]')
    flashcli("judge", path).assert_error(65, "c[3-4]")
    path.write_text('cases = "cases"\n[case.c9]\ntime_limit = 1')
    flashcli("judge", path).assert_error(65, "c9")
    flashcli("judge", cases, "--case", "c3").assert_error(2, "c3")


def test_what_the_command_line_says_of_rankings_and_formats_is_so():
    assert tuple(rules.RANKINGS) == command.RANKINGS
    assert set(views.WRITERS) == set(command.FORMATS)
