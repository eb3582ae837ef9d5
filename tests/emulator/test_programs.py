"""CUDA programs on the CPU: what they answer, and what is told of their faults."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from oracle import Asked, plain
from support import ROOT, WITHOUT_UTF_8, flashcli, flashcli_in, python, random_qkv, read_floats, sampled, write_input

from flashcli.emulator import programs, translate
from flashcli.emulator.machine import HERE
from flashcli.errors import UsageError

SOURCES = Path(__file__).with_name("programs")
FAULTS = SOURCES / "faults.cu"
HW4 = ROOT / "testcases/hw4/hw4.cu"
OPTIONS = {HW4: [f"-I{ROOT / 'cuda/attention'}", "-I", ROOT / "cuda", "-arch=native", "-std=c++17", "-O3"]}


@pytest.fixture(scope="session")
def program(emulated) -> Callable[[Path], Path]:
    """A program from its source; kept under a hash of all that is in it and of what makes it."""

    def built(source: Path) -> Path:
        inside = [*translate.sources(source, [ROOT / "cuda/attention", ROOT / "cuda"]), *HERE.glob("*.*")]
        key = hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(inside))).hexdigest()[:20]
        made = emulated / f"{source.stem}-{key}"
        if not made.exists():
            words = [os.path.relpath(source, SOURCES), "-o", made, *OPTIONS.get(source, [])]
            done = flashcli("emulate", *words, env={"FLASHCLI_CACHE_DIR": str(emulated)}, cwd=SOURCES)
            assert (done.code, done.out, done.err) == (0, "", "")
        return made

    return built


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("source", sampled([SOURCES / "rows.cu", HW4, SOURCES / "warps.cu"]), ids=lambda it: it.stem)
def test_programs_in_the_styles_of_students_compute_attention(program, tmp_path, source):
    shape = B, N, d = 2, 70, 32
    qkv = random_qkv(B, N, d)
    done = run(program(source), write_input(tmp_path / "in", qkv), tmp_path / "out")
    assert done.returncode == 0 and "no fault was seen. Times say nothing about a GPU.\n" in done.stderr
    want, _ = plain(Asked(*np.moveaxis(qkv, 1, 0)))
    np.testing.assert_allclose(read_floats(tmp_path / "out", shape), want, atol=1e-5)


def test_the_locale_does_not_change_a_programs_bytes(tmp_path):
    line = 'const char *word = "\u6ce8\u610f";'.encode() + b'  const char *bytes = "\xaa\xff";'
    (tmp_path / "x.cu").write_bytes(line)
    program = (
        "from pathlib import Path; from flashcli.emulator import translate\n"
        "translate.write(translate.sources(Path('x.cu'), []), Path())"
    )
    assert python("-c", program, env=WITHOUT_UTF_8, cwd=tmp_path).err == ""
    assert line in (tmp_path / "kernel.cpp").read_bytes()


@pytest.mark.parametrize(
    ("launch", "name", "shape", "rest"),
    [
        ("f<<<1, n>>>(a, b);", "f", "1, n", ", a, b);"),
        ("f <<< dim3(1, 2), {3, 4} >>> ();", "f", "dim3(1, 2), {3, 4}", ");"),
        ("x::f<g<2>, (1 > 0 ? 2 : 3)><<<a >> 1, b>>>(c);", "x::f<g<2>, (1 > 0 ? 2 : 3)>", "a >> 1, b", ", c);"),
        ("f<<<1, \\\n2>>>(__VA_ARGS__)", "f", "1, \\\n2", ", __VA_ARGS__)"),
    ],
)
def test_a_launch_becomes_a_call(launch, name, shape, rest):
    call = f'emulator::Launch("{name}", {shape})([=](const auto &...given) {{ {name}(given...); }}{rest}'
    assert translate.translated(launch, set()) == call


@pytest.mark.parametrize("text", ['"f<<<1, 2>>>(3)"', "x << 1; "])
def test_what_is_no_launch_stays(text):
    assert translate.translated(text + "// f<<<1, 2>>>(3)\n", set()) == text + " \n"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no_barrier", "a race in shared memory"),
        ("barrier_only_before", "a race in shared memory"),
        ("no_warp_barrier", "a race in shared memory"),
        ("some_at_barrier", "threads of a block are at different __syncthreads()"),
        ("some_at_shuffle", "threads wait for each other"),
        ("beyond", "writes 4 bytes out of bounds: right behind the 256 bytes of cudaMalloc at"),
        ("before", "writes 4 bytes out of bounds: 4 bytes before the 256 bytes of cudaMalloc at"),
        ("index", "index 32 is out of bounds of 'float [32]'"),
        ("beyond_dynamic", "writes 4 bytes out of bounds: behind the end of the 256 bytes of dynamic shared memory"),
        ("not_aligned", "an address is not aligned: it is no multiple of 16"),
        ("of_host", "writes 4 bytes that are not the GPU's"),
        ("between_blocks", "a race between blocks"),
        ("zero", "a division of integers by zero"),
        ("on_the_cpu", "reads 4 bytes of the GPU's memory, on the CPU"),
        ("too_much", "cudaMemcpy: the source is too small"),
        ("exchanged", "cudaMemcpy: the destination is memory of the GPU, not of the host"),
        ("freed", "writes 4 bytes of memory that is free again"),
        ("twice", "cudaFree of an address that cudaMalloc has not given, or that is free already"),
    ],
)
def test_a_fault_ends_the_program_and_is_told_with_its_line(program, name, what):
    done = run(program(FAULTS), name)
    [line] = [n for n, text in enumerate(FAULTS.read_text().splitlines(), 1) if text.endswith(f"// {name}")]
    first, *others, last = done.stderr.splitlines()
    assert done.returncode == 70 and first.endswith("a fault in the program, which ends here with exit code 70")
    assert last.startswith("faults.cu:") and what in last
    assert any(text.lstrip().startswith(f"faults.cu:{line}:") for text in [*others, last]), done.stderr


def test_what_is_no_fault_is_let_pass(program):
    done = run(program(FAULTS), "none")
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
    assert done.stderr.startswith("emulated: 1 launch, 64 threads, on the CPU; no fault was seen.")


def test_a_launch_that_failed_is_told_where_the_program_does_not_ask(program):
    done = run(program(FAULTS), "not_asked")
    [line] = [n for n, text in enumerate(FAULTS.read_text().splitlines(), 1) if text.endswith("// not_asked")]
    said = f"emulated: nobody asked for the error at faults.cu:{line}: invalid configuration argument.\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)


@pytest.mark.parametrize(("name", "error"), [("asked", "invalid configuration"), ("returned", "invalid device")])
def test_an_error_that_the_program_has_is_not_told_again(program, name, error):
    done = run(program(FAULTS), name)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(error)


def test_a_program_asks_what_the_device_has_and_pins_its_memory(program):
    done = run(program(FAULTS), "asked_of_device")
    assert (done.returncode, done.stdout, done.stderr) == (0, "49152 9\n", "")


def test_a_source_is_not_overwritten_by_its_program(tmp_path):
    (tmp_path / "x.cu").write_text("int main() {}\n")
    flashcli("emulate", "x.cu", "-o", "./x.cu", cwd=tmp_path).assert_error(2, "'x.cu' is named twice")
    assert (tmp_path / "x.cu").read_text() == "int main() {}\n"


def test_the_judge_builds_by_it_and_shows_the_fault(emulated, program, tmp_path):
    folder, tools = tmp_path / "work", tmp_path / "bin"
    folder.mkdir(), tools.mkdir()
    flashcli_in(tools)
    (folder / "rows.cu").write_text((SOURCES / "rows.cu").read_text().replace("__syncthreads();", ""))
    program(SOURCES / "rows.cu")  # so that what all programs have is kept
    arguments = "--case", "t01", "--exe", folder / "rows", "--build", f"{tools}/flashcli emulate rows.cu -o rows"
    rules = tmp_path / "rules.toml"
    rules.write_text(f'cases = "{ROOT / "testcases"}"\n[environment]\nFLASHCLI_CACHE_DIR = "{emulated}"\n')
    done = flashcli("judge", rules, *arguments)
    assert done.code == 1 and "runtime error: exit code 70: rows.cu:20: a race in shared memory" in done.out, done.out


def test_options_are_nvccs(tmp_path):
    line = "-std=c++11 -O3 -Xptxas=-v -arch sm_61 -gencode arch=compute_61,code=sm_61 -Iinc -I inc2 -DX=1 -D Y -lm"
    given = programs.order([*line.split(), "-Xcompiler", "-fopenmp,-Wall", "-o", "hw4", "a.cu", "b.cu", "--funny"])
    assert given.sources == [Path("a.cu"), Path("b.cu")] and given.out == Path("hw4")
    assert given.include == [Path("inc"), Path("inc2")] and given.ignored == ["--funny"]
    assert given.passed_on == ["-DX=1", "-DY", "-lm", "-fopenmp", "-Wall"]
    assert programs.order(["a.cu", "-std=c++20"]).passed_on == ["-std=c++20"]
    for words in (["-O3"], ["a.cu", "-o"], ["-c", "a.cu"]):
        with pytest.raises(UsageError):
            programs.order(words)


@pytest.mark.parametrize(
    ("text", "environment", "code", "message"),
    [
        (None, {}, 65, "cannot read 'x.cu': no such file or directory."),
        ("int main() { return nothing; }\n", {}, 65, "x.cu cannot be compiled for the CPU: see above."),
        ("int main() { f<<<1, 1(); }\n", {}, 65, "'x.cu' is no CUDA: a bracket is not closed."),
        ("int main() {}\n", {"CXX": ""}, 69, "the emulator needs a C++ compiler, and there is none."),
    ],
)
def test_what_cannot_be_made_is_told_and_nothing_is_left(emulated, tmp_path, text, environment, code, message):
    if text:
        (tmp_path / "x.cu").write_text(text)
    done = flashcli("emulate", "x.cu", "-o", "x", env={"FLASHCLI_CACHE_DIR": str(emulated)} | environment, cwd=tmp_path)
    done.assert_error(code, message)
    assert "x.cu:1:" in done.err or "see above" not in done.err
    assert not (tmp_path / "x").exists()


def test_a_source_without_an_end_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.cu")
    done = flashcli("emulate", "x.cu", cwd=tmp_path, timeout=20)
    done.assert_error(65, "'x.cu' is not a regular file.")


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_the_homeworks_makefile_takes_it_for_nvcc(tmp_path):
    done = run("make", "-n", "-C", HW4.parent, "-B", "hw4", "NVCC=flashcli emulate")
    [command] = [line for line in done.stdout.splitlines() if line.startswith("flashcli emulate ")]
    assert programs.order(command.split()[2:]).sources == [Path("hw4.cu")]
