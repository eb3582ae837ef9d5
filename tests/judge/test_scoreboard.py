"""Who is best by each of the three rules; and views in which no submission can be more than text."""

from __future__ import annotations

import csv
import html
import io
import json
import re

import pytest
from support import flashcli

from flashcli.judge import rules, scoreboard, views
from flashcli.judge.judging import Result
from flashcli.judge.results import record


def result(submission: str, case: str, seconds: float | None, device: str = "GPU", detail: str = "") -> Result:
    """Accepted in so many seconds; or wrong, if None."""
    verdict = "wrong answer" if seconds is None else "accepted"
    seconds = 0.5 if seconds is None else seconds
    return Result(submission, case, 2, 8, 4, seconds, verdict, detail, 10.0, device, [seconds])


RESULTS = [
    *(result("steady", case, 4.0) for case in "abc"),
    *(result("quick", case, seconds) for case, seconds in zip("abc", (1.0, 1.0, None), strict=True)),
    *(result("mixed", case, seconds) for case, seconds in zip("abc", (8.0, 8.0, 1.0), strict=True)),
    result("late", "a", 2.0),  # judged on one case only
]


@pytest.mark.parametrize(
    ("ranking", "order", "scores"),
    [
        ("passed", ["steady", "mixed", "quick", "late"], [12, 17, 2, 2]),
        ("penalty", ["quick", "steady", "mixed", "late"], [12, 12, 17, 22]),
        ("relative", ["quick", "mixed", "steady", "late"], [2 / 3, 1.25 / 3, 0.75 / 3, 0.5 / 3]),
    ],
)
def test_rankings(ranking, order, scores):
    [board] = scoreboard.boards(RESULTS, ranking)
    assert [standing.score for standing in board.standings] == pytest.approx(scores)
    assert {s.submission for s in board.standings[:2]} == set(order[:2])
    assert [s.submission for s in board.standings[2:]] == order[2:]


def test_equals_share_a_rank():
    [board] = scoreboard.boards([result("x", "a", 1.0), result("y", "a", 1.0), result("z", "a", 2.0)], "passed")
    assert [standing.rank for standing in board.standings] == [1, 1, 3]


def test_devices_are_never_mixed():
    """A time on one is neither ranked with, nor the best of, another."""
    both = [result("x", "a", 2.0, "H200"), result("y", "a", 1.0, "GTX 1080"), result("x", "a", 8.0, "GTX 1080")]
    first, second = scoreboard.boards(both, "relative")
    assert (first.device, [s.score for s in first.standings]) == ("H200", [1.0])
    assert (second.device, [s.score for s in second.standings]) == ("GTX 1080", [1.0, 0.125])


def test_a_later_result_replaces_an_earlier_one():
    """Its time must not count as the best of the case either."""
    [board] = scoreboard.boards([result("x", "a", 1.0), result("x", "a", 4.0), result("y", "a", 2.0)], "relative")
    assert {standing.submission: standing.score for standing in board.standings} == {"y": 1.0, "x": 0.5}


@pytest.mark.parametrize("ranking", rules.RANKINGS)
def test_who_has_nothing_right_comes_last_and_has_no_rank(ranking):
    """A rank that all of them shared, the first if nobody else is there, would say that they have done something."""
    results = [result("x", "a", None), result("y", "a", None), result("slow", "a", 1000.0)]
    [board] = scoreboard.boards(results, ranking)
    assert [(one.submission, one.rank) for one in board.standings] == [("slow", 1), ("x", None), ("y", None)]
    [alone] = scoreboard.boards(results[:1], ranking)
    assert scoreboard.lines(alone)[1][:4] == ["-", "x", "0 of 1", "-"]
    assert json.loads(views.json_text([alone]))[0]["standings"][0]["rank"] is None


def test_points_come_before_the_number_of_cases_and_are_shown_if_they_differ():
    many = [result("many", case, 1.0) for case in "ab"] + [result("many", "c", None)]
    heavy = [result("heavy", case, None) for case in "ab"] + [result("heavy", "c", 9.0)]
    [plain] = scoreboard.boards(many + heavy, "passed")
    weighted = [one._replace(points=5.0) if one.case == "c" else one for one in many + heavy]
    [board] = scoreboard.boards(weighted, "passed")
    assert [one.submission for one in plain.standings] == ["many", "heavy"]
    assert [one.submission for one in board.standings] == ["heavy", "many"]
    assert "points" not in scoreboard.lines(plain)[0] and scoreboard.lines(board)[1][2:4] == ["1 of 3", "5 of 7"]
    [relative] = scoreboard.boards(weighted, "relative")
    assert [one.score for one in relative.standings] == pytest.approx([5 / 7, 2 / 7])


def test_the_most_memory_of_any_case_is_shown_if_it_is_known():
    [board] = scoreboard.boards([result("x", "a", 1.0), result("x", "b", 1.0)._replace(memory=3 * 2**30)], "passed")
    assert scoreboard.lines(board) == [
        ["rank", "submission", "accepted", "time", "memory"],
        ["1", "x", "2 of 2", "2.000 s", "3072.0 MiB"],
    ]
    assert f'"memory","a","b"\n"GPU","passed",1,"x",2,2.0,2.0,2.0,{3 * 2**30},1.0,1.0\n' in views.csv_text([board])


NASTY = ["<script>alert(1)</script>", "a|b", "=HYPERLINK(1)", "[x](http://x)", "`c`", '"quoted", with comma']


def nasty() -> list[scoreboard.Board]:
    return scoreboard.boards([result(name, "a", 1.0 + place) for place, name in enumerate(NASTY)], "passed")


def test_markdown_has_no_markup_of_submissions():
    text = views.markdown(nasty())
    body = text.splitlines()[4:]
    assert [line.count("|") for line in body] == [5] * len(NASTY)
    assert not set("<>[]`*@") & set("".join(body))


def test_markdown_calls_nobody_and_links_to_nothing():
    """GitHub makes mentions and links of text that nobody has marked up."""
    names = ["@somebody", "www.evil.example", "http://evil.example", "a@evil.example", "#1"]
    text = views.markdown(scoreboard.boards([result(name, "a", 1.0) for name in names], "passed"))
    assert not [name for name in names if name in text]
    shown = html.unescape(text)
    assert not re.search(r"[@#]\w", shown), "a sign of no width is between"
    assert not re.search(r"www\.|://", text.partition("|")[2]), "written so that no address is seen in the source"


def test_a_missing_time_comes_last():
    [board] = scoreboard.boards([result("none", "a", None)._replace(seconds=None), result("x", "a", 3.0)], "passed")
    assert [(s.submission, s.seconds) for s in board.standings] == [("x", 3.0), ("none", None)]
    assert json.loads(views.json_text([board]))[0]["standings"][1]["seconds"] is None
    assert list(csv.DictReader(io.StringIO(views.csv_text([board]))))[1]["time"] == ""


@pytest.mark.parametrize("start", ["=", "+", "-", "@", " =", "\t=", "\uff1d"])
def test_no_cell_of_csv_is_a_formula(start):
    """Nor a heading: the names of cases are some."""
    text = views.csv_text(scoreboard.boards([result(f"{start}cmd", f"{start}case", 1.0)], "passed"))
    cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
    assert f"'{start}cmd" in cells and f"'{start}case" in cells


def test_texts_of_csv_stand_in_quotes():
    """Where a semicolon divides cells, what follows one in a name would be a cell of its own."""
    text = views.csv_text(scoreboard.boards([result("a;=cmd", "c;=cmd", 1.0)], "passed"))
    assert '"a;=cmd"' in text and '"c;=cmd"' in text


def test_times_that_no_clock_could_tell_from_nothing():
    for ranking in ("passed", "penalty", "relative"):
        found = scoreboard.boards([result("x", "a", 0.0), result("y", "a", 1e-300)], ranking)
        assert all(write(found) for write in views.WRITERS.values())


def test_csv_can_be_read_back_and_has_no_formulas():
    rows = list(csv.DictReader(io.StringIO(views.csv_text(nasty()))))
    assert [row["submission"] for row in rows] == [("'" if name[0] == "=" else "") + name for name in NASTY]
    assert float(rows[0]["a"]) == 1.0
    [failed] = csv.DictReader(io.StringIO(views.csv_text(scoreboard.boards([result("x", "a", None)], "passed"))))
    assert failed["a"] == "wrong answer"


def test_json_has_every_result():
    [board] = json.loads(views.json_text(scoreboard.boards(RESULTS, "passed")))
    assert len(board["results"]) == len(RESULTS) and board["standings"][0]["submission"] == "steady"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "results.jsonl"
    begins = {"judging": {"secret": "known to the judge"}}
    path.write_text("\n".join(json.dumps(line) for line in [begins, *map(record, RESULTS)]) + "\n")
    return path


def test_an_anonymous_board_has_pseudonyms_that_stay(file, tmp_path):
    boards = [tmp_path / f"board{suffix}" for suffix in views.WRITERS]
    words = [word for path in boards for word in ("--board", path)]
    first, second = (flashcli("scoreboard", file, "--anonymous", *words) for _ in range(2))
    assert first.code == 0 and first.out == second.out
    assert len(set(re.findall(r"anon-[0-9a-f]{8}", first.out))) == 4
    for text in (first.out, *(path.read_text() for path in boards)):
        assert not [name for name in ("steady", "quick", "mixed", "known to") if name in text]
    file.write_text(file.read_text().replace("known to the judge", "another"))
    assert flashcli("scoreboard", file, "--anonymous").out != first.out, "they cannot be found out from the names"


def test_an_anonymous_board_tells_nothing_that_a_program_has_said(file, tmp_path):
    line = record(result("steady", "a", None, detail="exit code 1: I am steady"))
    with file.open("a") as more:
        more.write(json.dumps(line) + "\n")
    flashcli("scoreboard", file, "--anonymous", "--board", tmp_path / "b.html")
    assert "I am" not in (tmp_path / "b.html").read_text()


def test_pseudonyms_of_results_without_a_secret_are_new_each_time(file):
    file.write_text(file.read_text().replace("secret", "nothing"))
    first, second = (flashcli("scoreboard", file, "--anonymous") for _ in range(2))
    assert first.code == 0 and first.out != second.out and "Notice: " in first.err


def test_a_file_from_an_earlier_judge_can_be_read(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines[1:]:
        del line["points"], line["memory"]
    before = flashcli("scoreboard", file)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert flashcli("scoreboard", file).out == before.out and before.code == 0


def test_the_command(file, tmp_path):
    boards = [tmp_path / f"board{suffix}" for suffix in views.WRITERS]
    done = flashcli("scoreboard", file, "--rank", "penalty", *(word for path in boards for word in ("--board", path)))
    assert done.code == 0 and done.out.splitlines()[1].split() == ["rank", "submission", "accepted", "time", "score"]
    assert all("steady" in path.read_text() for path in boards)


def test_a_board_that_cannot_be_written(file, tmp_path):
    flashcli("scoreboard", file, "--board", tmp_path / "none" / "b.md").assert_error(73, "none/b.md")
    assert flashcli("scoreboard", file, "--board", tmp_path / "b.pdf").code == 2
