"""The speed of other GPUs beside an H200's: peak rates on paper, what is chosen by them, and what is measured."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support import ROOT, sampled

from flashcli.commands import bench
from flashcli.errors import UsageError
from flashcli.gpu.place import place_of_device
from flashcli.kernels import choice, speed
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.kernels.tuning import cost
from flashcli.measure import tune

# Name, compute capability, multiprocessors, MHz, GB/s; TFLOP/s of fp32 and of fp16 added in fp32, as makers tell them.
GPUS = (
    ("NVIDIA GeForce GTX 1080", (6, 1), 20, 1733, 320, 8.9, 0),
    ("NVIDIA GeForce GTX 1660 SUPER", (7, 5), 22, 1785, 336, 5.0, 0),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1410, 1555, 19.5, 312),
    ("NVIDIA RTX A6000", (8, 6), 84, 1800, 768, 38.7, 155),
    ("NVIDIA GeForce RTX 3060", (8, 6), 28, 1777, 360, 12.7, 25.5),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, 936, 35.6, 71),
    ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 2535, 288, 22.1, 44),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, 1008, 82.6, 165.2),
    ("NVIDIA GeForce RTX 5060 Ti", (12, 0), 36, 2572, 448, 23.7, 47.4),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, 1792, 104.8, 209.5),
)
IDS = [gpu[0].removeprefix("NVIDIA ") for gpu in GPUS]


def problem_on(gpu, d, B=64, **more):
    name, capability, sms, mhz, rate, *_ = gpu
    there = speed.speed(capability, name, sms, mhz, rate * 1e9)
    return capability, Problem(
        B, 2048, 2048, d, sms=sms, in_place=True, batch_invariant=True, speed=there._replace(**more)
    )  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS, ids=IDS)
def test_peak_rates_are_those_that_makers_tell(gpu):
    name, capability, sms, mhz, _, fp32, fp16 = gpu
    assert 2 * sms * mhz * speed.lanes(capability) / 1e6 == pytest.approx(fp32, rel=0.03)
    assert 2 * sms * mhz * speed.products(capability, name) / 1e6 == pytest.approx(fp16, rel=0.03)


def test_the_page_tells_what_is_chosen_there():
    page = (ROOT / "docs/gpus.md").read_text()
    for gpu, short in zip(GPUS, IDS, strict=True):
        names = [choice.choose(*problem_on(gpu, d)).name for d in cost.HEADS]
        assert f"| {short} | {' | '.join(names)} |" in page


@pytest.mark.parametrize("gpu", GPUS, ids=IDS)
def test_bytes_depend_on_the_gpu_but_not_on_company_or_its_size(gpu):
    for d in cost.HEADS:
        capability, problem = problem_on(gpu, d)
        ways = [problem._replace(B=B, sms=sms) for B in (1, 30, 10_000) for sms in (10, 82)]
        assert len({choice.choose(capability, way).name for way in ways}) == 1


def test_a_hopper_gpu_has_an_h200s_speed():
    assert speed.speed((9, 0), "NVIDIA H100 PCIe", 114, 1755, 2e12) == speed.H200


@pytest.mark.parametrize("arch, d", sampled([("sm_86", 64), ("sm_89", 128), ("sm_120", 32)], 3))
def test_sums_in_fp16_spill_no_register(resources, arch, d):
    _, problem = problem_on(GPUS[5], d)
    assert dict(KERNELS["mma"].tiling(problem).macros) == {"HALF_CORRECTIONS": 1}
    found = resources(Build(KERNELS["mma"], problem), arch)
    assert not any(one.spilled or one.warnings for one in found.values())


def test_only_a_geforce_adds_corrections_in_fp16():
    halved = {name for gpu, name in zip(GPUS, IDS, strict=True) if problem_on(gpu, 64)[1].halves_corrections}
    assert halved == {name for name in IDS if "RTX" in name and "A6000" not in name}
    assert not problem_on(GPUS[5], 64)[1]._replace(precision="fp16").halves_corrections
    assert not KERNELS["mma"].tiling(Problem(1, 64, 64, 64)).macros  # files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_was_measured_decides_and_is_forgotten(folder):
    name = GPUS[5][0]
    capability, problem = problem_on(GPUS[5], 16)
    assert choice.choose(capability, problem).name == "register_tiled"
    tune.keep("another", {"mma": {32: 2.0}})
    tune.keep(name, {"mma": {16: 0.5}, "register_tiled": {16: 0.5}})
    tuned = problem._replace(speed=speed.speed(capability, name, 82, 1695, 936e9))
    assert tuned.speed.measured == (("mma", 16, 0.5), ("register_tiled", 16, 0.5))
    assert choice.choose(capability, tuned).name == "mma"
    tune.keep(name, {})
    assert speed.measured(name) == () and speed.measured("another") == (("mma", 32, 2.0),)


@pytest.mark.parametrize("damage", ["", "[]", '{"this": 3}', '{"this": {"mma": 3}}', '{"this": {"mma": {"x": "y"}}}'])
def test_a_damaged_file_has_measured_nothing(folder, damage):
    (folder / speed.MEASURED).write_text(damage)
    assert speed.measured("this") == ()
    tune.keep("this", {"mma": {16: 1.5}})
    assert speed.measured("this") == (("mma", 16, 1.5),)


def test_tuning_finds_the_factor_of_a_gpu_that_takes_three_times_as_long(driver, monkeypatch, folder):
    monkeypatch.setattr(tune, "compile_for", lambda arch, builds: None)

    def three_times(place, kernel, problem):
        fixed, pairs, pair = cost.parts(KERNELS[kernel], problem)
        return (fixed + 3 * pairs * pair) / 1e6

    monkeypatch.setattr(tune, "_seconds", three_times)
    found = list(tune.tune(place_of_device(0)))
    every = {(name, d) for name in ("mma", "register_tiled") for d in cost.HEADS}
    every |= {("mma_short", d) for d in (16, 32, 64)}
    assert {(name, d) for name, d, *_ in found} == every and len(found) == len(every)
    assert [factor for *_, factor in found] == pytest.approx([3] * len(found))


def test_a_run_is_timed_by_events_and_its_memory_given_back(driver, monkeypatch, folder):
    monkeypatch.setattr(tune, "bindings", lambda: driver)
    elapsed = iter([50.0, 30.0, 40.0])
    driver.cuEventElapsedTime = lambda start, end: (0, next(elapsed))
    driver.cuEventSynchronize = lambda event: (0,)
    assert tune._seconds(place_of_device(0), "mma", Problem(1, 16, 16, 32)) == 0.003
    assert [kernel for kernel, *_ in driver.launches].count("attention") == 3 * (1 + 10) and not driver.allocated


def test_the_file_is_json_that_a_person_can_read(folder):
    tune.keep("this", {"mma": {64: 1.25}})
    assert json.loads((folder / speed.MEASURED).read_text()) == {"this": {"mma": {"64": 1.25}}}


def test_the_command_keeps_what_it_finds_and_forgets_it(driver, monkeypatch, folder):
    monkeypatch.setattr(tune, "tune", lambda place: iter([("mma", 64, 0.001, 1.5), ("mma", 128, 0.002, 1.25)]))
    done = CliRunner().invoke(bench.command, ["--tune"])
    assert done.exit_code == 0 and "Times of kernels on Fake GPU are kept" in done.output
    assert speed.measured("Fake GPU") == (("mma", 64, 1.5), ("mma", 128, 1.25))
    assert CliRunner().invoke(bench.command, ["--untune"]).exit_code == 0 and speed.measured("Fake GPU") == ()


def test_tuning_takes_no_other_options(driver):
    for other in (["--case", "t01"], ["--kernel", "mma"], ["--untune"]):
        with pytest.raises(UsageError, match=r"no meaning for tune|no meaning for untune"):
            CliRunner().invoke(bench.command, ["--tune", *other], catch_exceptions=False)
