from __future__ import annotations

import importlib
import os

ONE_OF_MANY = "PYTEST_XDIST_WORKER" in os.environ  # of as many as there are cores: each computes on a single thread
if ONE_OF_MANY:  # before NumPy and PyTorch begin, here and in what is started from here; threads of OpenMP spin
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("FLASHCLI_QUICK", "0")  # first calls are answered by full builds, as later ones are
# Matplotlib keeps its list of fonts with a user: one made while a package was being installed lacked most of them.
os.environ.setdefault("MPLCONFIGDIR", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "matplotlib"))

import compileall
import fcntl
import gc
import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import sanitizing
import tolerances
from emulator.driver import EmulatedDriver, machine_code
from fake_driver import Driver
from support import (
    ENGINES,
    FAKE_NVCC,
    FAKE_PYCUDA,
    ROOT,
    THOROUGH,
    Engine,
    can_draw,
    give_up_roots_powers,
    python_path,
    reasons_of,
    script,
    write_input,
)
from threadpoolctl import threadpool_limits

from flashcli.arrays import memory, on_gpu
from flashcli.compiler import compiler
from flashcli.cpu.workers import usable_cores
from flashcli.emulator import machine, translate
from flashcli.errors import FlashError
from flashcli.gpu import boxes, place, prepared
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu.pycuda import devices
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.boxes import addressed

KEPT_FOR = 14 * 24 * 3600  # seconds: what nobody has read for so long is not wanted any more

# Examples overwrite one file in tmp_path, which is what the health check warns about; a first one may compile a kernel.
hypothesis.settings.register_profile(
    "flashcli",
    deadline=None,
    max_examples=40 if THOROUGH else 15,
    suppress_health_check=[
        hypothesis.HealthCheck.function_scoped_fixture,
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,  # by kernels that do not take every d
    ],
)
hypothesis.settings.load_profile("flashcli")


def pytest_configure(config: pytest.Config) -> None:
    tolerances.cache = getattr(config, "cache", None)
    if ONE_OF_MANY:
        threadpool_limits(1)  # a plugin may have begun NumPy before


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for some tests wait."""
    return len(usable_cores()) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    """Tests start many hundreds of processes: none should have to compile what it imports, and all can be stopped.

    What a shell starts in the background ignores Ctrl-C, and so would all that it starts.
    """
    for number, heed in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, heed)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compileall.compile_dir(ROOT / "flashcli", quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: a third of a collection's time was looking for garbage in it."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)  # so that nobody puts in order what is left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, where all tests are run, those that need a GPU if there is none, and outside of CI some cases of many.

    Of more than six cases of a test a third is left, of more than 24 a sixth; on a GPU all are.
    """
    if not _whole_suite(config):
        return
    cases: dict[str, list[pytest.Item]] = {}
    dropped = set()
    for item in items:
        if not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        elif cuda_driver.problem():
            dropped.add(item)
    for some in cases.values() if not THOROUGH else ():
        each = 1 if len(some) <= 6 else 3 if len(some) <= 24 else 6
        # Not one after each two, or five: they might have one value of an argument only.
        dropped |= {item for i, item in enumerate(some) if (i + i // each) % each}
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def _whole_suite(config: pytest.Config) -> bool:
    """Whether nobody has said which tests are to run."""
    return [Path(arg).resolve() for arg in config.args] == [ROOT / "tests"] and not config.option.markexpr


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell in one line for each reason how many tests were skipped for it; pytest's own -rs has one for each place."""
    for line in reasons_of(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)
    if _whole_suite(config) and (problem := cuda_driver.problem()):
        terminalreporter.write_line(f"left out: what needs a GPU, for {problem}.")


@pytest.fixture(scope="session")
def gpu() -> tuple[int, int]:
    """The compute capability of the first GPU; skips where there is none."""
    try:
        found = devices()
    except FlashError as error:
        pytest.skip(str(error))
    if not found:
        pytest.skip("the driver finds no GPU")
    return found[0][1]


@pytest.fixture(scope="session")
def emulated(pytestconfig: pytest.Config) -> Path:
    """Where libraries of kernels for the CPU are kept, for all processes and runs; skips where none can be made."""
    try:
        machine.compiler()
    except FlashError as error:
        pytest.skip(str(error))
    folder = pytestconfig.cache.mkdir("emulated")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in folder.iterdir():
            if path.is_file() and path.stat().st_atime < time.time() - KEPT_FOR:
                path.unlink()
        _compile_quickly(translate.CUDA, folder)
        with machine.block(folder):
            return folder


def _compile_quickly(header: Path, folder: Path) -> None:
    """Have the C++ compiler read a header once for all kernels: from then on it finds it as it left it in ``folder``.

    A third of the time that a kernel takes to compile is that header's. Nearly every test compiles a kernel of its own
    and launches it on little: -Og compiles as fast as -O0 and runs a quarter faster, and -O1 takes a third longer for
    nothing, for most of a run is in block.cpp.
    """
    machine.LEVEL = "-Og"
    key = hashlib.sha256(repr((header.read_text(), machine.OPTIONS)).encode()).hexdigest()[:20]
    made = folder / key / f"{header.name}.gch"
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        machine.run(machine.LEVEL, "-x", "c++-header", header, "-o", f"{made}.tmp")
        os.rename(f"{made}.tmp", made)
    quick_linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []
    machine.OPTIONS = (*machine.OPTIONS, f"-I{made.parent}", *quick_linker)


@pytest.fixture(scope="session")
def matplotlib() -> None:
    if not can_draw():
        pytest.skip("Matplotlib is not installed, or not whole")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The CPU backend, the sequential program, then each kernel that runs on this machine's GPU."""
    if request.param == "sequential":
        if compiler.find_cc() is None:
            pytest.skip("there is no C compiler here")
    elif request.param != "cpu":
        capability = request.getfixturevalue("gpu")
        if not KERNELS[request.param].runs_on(capability):
            pytest.skip(f"{request.param} does not run on compute capability {capability}")
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.fixture
def resources() -> Callable[[compiler.Compilable, str], dict[str, compiler.Resources]]:
    """compiler.resources(), where there is nvcc."""
    if compiler.find_nvcc() is None:
        pytest.skip("there is no nvcc here")
    return compiler.resources


def _forget_pycuda() -> dict[str, object]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "pycuda"}


@pytest.fixture
def pycuda_stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """``pycuda_stub(init, driver)`` puts a package pycuda of these two sources first on the path of all processes.

    What the CUDA driver itself finds there, or misses, is ``problem``.
    """

    def install(init: str, driver: str = "", problem: str = "") -> None:
        folder = tmp_path / "stub" / "pycuda"
        folder.mkdir(parents=True)
        driver_says = f"import flashcli.gpu.driver\nflashcli.gpu.driver.problem = lambda: {problem!r}\n"
        (folder / "__init__.py").write_text(driver_says + init)
        monkeypatch.setattr(cuda_driver, "problem", lambda: problem)  # and to be undone, if the stub is imported here
        (folder / "driver.py").write_text(driver)
        monkeypatch.setenv("PYTHONPATH", python_path(folder.parent))
        monkeypatch.syspath_prepend(folder.parent)

    real = _forget_pycuda()
    yield install
    _forget_pycuda()
    sys.modules.update(real)


@pytest.fixture
def no_pycuda(pycuda_stub) -> None:
    """A machine without a GPU on which PyCUDA is not installed."""
    missing = "raise ModuleNotFoundError(\"No module named 'pycuda'\", name='pycuda')"
    pycuda_stub(missing, problem="there is no NVIDIA driver here (libcuda was not found)")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[object]:
    """tests/fake_pycuda as PyCUDA, here and in child processes, and `FAKE_NVCC`. Gives the driver."""
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_PYCUDA))
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", FAKE_NVCC)))
    monkeypatch.syspath_prepend(FAKE_PYCUDA)
    monkeypatch.setattr(cuda_driver, "problem", lambda: "")
    real = _forget_pycuda()
    yield importlib.import_module("pycuda.driver")
    _forget_pycuda()
    sys.modules.update(real)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """tests/fake_driver.py in the place of NVIDIA's bindings, and a compiler that gives its options as machine code."""
    fake = Driver()
    for name in ("_primary", "_places"):
        monkeypatch.setattr(place, name, {})
    for module in (place, prepared, memory, on_gpu):
        monkeypatch.setattr(module, "bindings", lambda: fake)
    monkeypatch.setattr(boxes, "encoded", addressed)
    monkeypatch.setattr(compiler, "cubin", lambda build, arch: " ".join(compiler.options(build)).encode())
    prepared.prepare.cache_clear()
    yield fake
    prepared.prepare.cache_clear()


@pytest.fixture
def hopper(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> place.Place:
    """The fake driver's GPU, one of Hopper's, also for what compute-sanitizer is shown."""
    driver.capability = 9, 0
    monkeypatch.setattr(sanitizing, "bindings", lambda: driver)
    return place.place_of_device(0)


@pytest.fixture
def emulated_place(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> place.Place:
    """An emulated GPU of Hopper's, also for what compute-sanitizer is shown."""
    driver = EmulatedDriver()
    for module in (place, prepared, sanitizing):
        monkeypatch.setattr(module, "bindings", lambda: driver)
    monkeypatch.setattr(place, "_primary", {})
    monkeypatch.setattr(boxes, "encoded", addressed)
    monkeypatch.setattr(compiler, "cubin", lambda build, arch: machine_code(build, emulated))
    return place.place_of_device(0)


@pytest.fixture
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The test module's QKV as an input file."""
    return write_input(tmp_path / "x.in", request.module.QKV)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where an output goes, in a folder of its own."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder / "x.out"


@pytest.fixture
def ordinary_user(tmp_path: Path) -> dict[str, object]:
    """Options for support.flashcli() under which permissions hold, even for root."""
    if os.geteuid() != 0:
        return {}
    secret = tmp_path / "secret"
    secret.touch(mode=0)
    options = {"preexec_fn": give_up_roots_powers}
    if subprocess.run(["cat", secret], capture_output=True, **options).returncode == 0:
        pytest.skip("running as root, which reads and writes everything here")
    secret.unlink()
    return options
