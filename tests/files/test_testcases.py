"""The test cases of the repository, and what a manifest may say."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support import ROOT, flashcli, input_bytes, read_floats
from tolerances import float64

from flashcli.asked.shape import Shape
from flashcli.errors import BadInput, NoPermission
from flashcli.files.distributions import draw
from flashcli.files.testcases import Case, load

FOLDER = ROOT / "testcases"
COMMITTED = ["t01", "t02", "t03", "t04", "t05", "t06"]
REPORT = {
    "t10": (10, 2048, 64),
    "t11": (13600, 128, 32),
    "t22": (500, 2048, 64),
    "t29": (4, 32768, 32),
    "t30": (2, 32768, 64),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in load(FOLDER)}


def shape(case: Case) -> tuple[int, ...]:
    return tuple(vars(case.shape).values())


def test_there_are_thirty(cases):
    assert list(cases) == [f"t{number:02}" for number in range(1, 31)]


def test_no_two_have_the_same_seed(cases):
    assert len({case.seed for case in cases.values()}) == 30


@pytest.mark.parametrize("name", REPORT)
def test_the_cases_of_the_report_have_its_shapes(cases, name):
    assert shape(cases[name]) == REPORT[name]


def test_all_shapes_are_those_of_the_course(cases):
    for case in cases.values():
        B, N, d = shape(case)
        assert 2 <= B <= 14000 and d in (32, 64) and N in [128 * 2**k for k in range(9)]
        assert B * N * d < 56_000_000 or case.name == "t22"


def test_they_begin_with_the_smallest_of_the_course(cases):
    assert shape(cases["t01"]) == (2, 128, 32)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_case_is_what_its_seed_makes(cases, name):
    case = cases[name]
    qkv = draw(case.shape, range(case.shape.B), case.seed)
    assert case.input == FOLDER / f"{name}.in"
    assert case.input.read_bytes() == input_bytes(qkv)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_reference_is_the_float64_answer(cases, name):
    case = cases[name]
    qkv = draw(case.shape, range(case.shape.B), case.seed)
    want = float64(qkv)
    np.testing.assert_allclose(read_floats(case.reference, want.shape), want, rtol=2**-23, atol=1e-12)


def test_the_committed_files_are_under_3_megabytes():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert {path.stem for path in files if path.suffix == ".ref"} == set(COMMITTED)
    assert sum(path.stat().st_size for path in files) < 3e6


@pytest.mark.parametrize(
    "manifest",
    [
        "not toml at all",
        "[t01]\nseed = 1\n",
        "[t01]\nshape = [1, 2]\nseed = 1\n",
        "[t01]\nshape = [1, 2, 300]\nseed = 1\n",
        "[t01]\nshape = [1, 2.5, 3]\nseed = 1\n",
        '[t01]\nshape = [1, 2, "3"]\nseed = 1\n',
        "[t01]\nshape = [1, 2, 3]\nseed = -1\n",
        '[t01]\nshape = [1, 2, 3]\nseed = "x"\n',
        "[t01]\nshape = [1, 2, 3]\n",
        "t01 = 3\n",
        'time_limit = "long"\n',
        "time_limit = nan\n",
        "time_limit = 0\n",
    ],
)
def test_a_bad_manifest_is_bad_input(tmp_path, manifest):
    (tmp_path / "manifest.toml").write_text(manifest)
    with pytest.raises(BadInput, match="is not a manifest of test cases"):
        load(tmp_path)


def test_a_manifest_that_is_no_text_is_bad_input(tmp_path):
    (tmp_path / "manifest.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="is not a manifest"):
        load(tmp_path)


def test_a_given_input_of_another_shape_is_not_overwritten(tmp_path):
    (tmp_path / "manifest.toml").write_text("[t01]\nshape = [2, 8, 4]\nseed = 1\n")
    given = tmp_path / "t01.in"
    given.write_bytes(input_bytes(np.zeros((1, 3, 8, 4), np.float32)))
    before = given.read_bytes()
    with pytest.raises(BadInput, match=r"t01\.in' has shape \(1, 8, 4\), not \(2, 8, 4\)"):
        load(tmp_path)
    assert given.read_bytes() == before


@pytest.fixture(params=["", "[t01]\nshape = [1, 8, 4]\nseed = 1\n"], ids=["files", "manifest"])
def folder(request, tmp_path):
    """One case with its input and reference, in a folder with a manifest and in one without."""
    if request.param:
        (tmp_path / "manifest.toml").write_text(request.param)
    (tmp_path / "t01.in").write_bytes(input_bytes(np.zeros((1, 3, 8, 4), np.float32)))
    (tmp_path / "t01.ref").write_bytes(bytes(4 * 8 * 4))
    return tmp_path


@pytest.mark.parametrize("name", ["t01.in", "t01.ref"])
def test_a_damaged_file_is_blamed_before_anything_runs(folder, name):
    load(folder)
    os.truncate(folder / name, 50)
    with pytest.raises(BadInput, match=rf"^'{folder}/{name}' (is|has) .*50"):
        load(folder)


@pytest.mark.parametrize("name", ["t01.in", "t01.ref"])
def test_a_file_that_cannot_be_read_is_no_permission(folder, name, ordinary_user):
    (folder / name).chmod(0)
    flashcli("judge", folder, **ordinary_user).assert_error(NoPermission.exit_code, name, "permission denied")


def test_a_manifest_without_cases_is_bad_input(tmp_path):
    (tmp_path / "manifest.toml").write_text("time_limit = 3\n")
    with pytest.raises(BadInput, match="has no cases"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[t01]\nshape = [2, 3]\nseed = 1", "t01: shape must be three whole numbers, [B, N, d], not [2, 3]."),
        ("[t01]\nshape = 3\nseed = 1", "t01: shape must be three whole numbers, [B, N, d], not 3."),
        ("[t01]\nseed = 1", "t01: shape must be three whole numbers, [B, N, d], not None."),
        ("[t01]\nshape = [1, 8, 4]", "t01: seed must be a whole number, 0 or more, not None."),
        ("[t01]\nshape = [1, 8, 4]\nseed = 1\npoints = -1", "t01: points must be a number above 0, not -1."),
        ("t01 = 3", "t01 is no table."),
        ("time_limit = [3]", "time_limit must be a number above 0, not [3]."),
    ],
)
def test_a_manifest_that_is_wrong_is_told_in_a_sentence(tmp_path, text, said):
    (tmp_path / "manifest.toml").write_text(text)
    done = flashcli("judge", tmp_path)
    done.assert_error(BadInput.exit_code, "is not a manifest of test cases", said)
    assert "Error(" not in done.err


@pytest.mark.parametrize(
    "name", ["../../../mine", "/abs/valid", "a/b", ".", "..", ".hidden", "a\\u0000b", "a\\u001bb", "", "x" * 201]
)
def test_a_name_that_leads_elsewhere_is_bad_input(tmp_path, name):
    """It becomes the name of files that are made, and removed."""
    (tmp_path / "manifest.toml").write_text(f'["{name}"]\nshape = [1, 8, 4]\nseed = 1\n')
    flashcli("judge", tmp_path).assert_error(BadInput.exit_code, "is not a manifest of test cases", "name")


def test_a_file_whose_name_cannot_be_shown_is_bad_input(tmp_path):
    (tmp_path / "a\x1b[2Jb.in").write_bytes(input_bytes(np.zeros((1, 3, 8, 4), np.float32)))
    with pytest.raises(BadInput, match="cannot be a case"):
        load(tmp_path)


def test_a_manifest_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.toml")
    with pytest.raises(BadInput, match="is not a regular file"):
        load(tmp_path)


def test_a_copy_is_not_written_through_a_link(folder, tmp_path):
    case = load(folder)[0].__class__("a", Shape(1, 8, 4), None, folder / "t01.in", None, 1.0)
    copy = case.anew(tmp_path / "copies", seed=3)
    (tmp_path / "copies").mkdir()
    (tmp_path / "mine").write_text("mine")
    copy.input.symlink_to(tmp_path / "mine")
    with pytest.raises(BadInput, match="cannot copy"):
        list(copy.prepare())
    assert (tmp_path / "mine").read_text() == "mine"
