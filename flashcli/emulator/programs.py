"""A program in CUDA compiled for the CPU: what `nvcc -o PROGRAM SOURCES` makes for a GPU."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from flashcli.compiler import cache
from flashcli.emulator import machine, translate
from flashcli.errors import BadInput, CannotCreate, UsageError, explained
from flashcli.files.outputs import check_distinct, write_whole
from flashcli.terminal.messages import say

PROGRAM = machine.HERE / "program.cpp"
# A call at each access to memory, and where an index, an address or a divisor may not be; see program.cpp.
WATCHED = ("-O1", "-gdwarf-4", "-fsanitize=thread", "-fsanitize=bounds,alignment,null,integer-divide-by-zero")
# Options of nvcc that mean nothing here, and those of them whose value may be the next word.
WITHOUT_MEANING = ("-O", "-g", "-G", "-lineinfo", "-use_fast_math", "--use_fast_math", "-W", "-w", "-rdc", "-t")
VALUE_FOLLOWS = (
    "-arch", "--gpu-architecture", "-gencode", "--generate-code", "-code", "-Xptxas", "--ptxas-options", "-cudart",
    "--cudart", "-ccbin", "-maxrregcount", "--maxrregcount", "-std", "--std", "-x",
)  # fmt: skip
HINT = "see docs/emulator.md for what there is of CUDA: no cuBLAS, and no cuda_fp16.h."
OLDER = ("c++03", "c++11", "c++14", "c++17")  # than what cuda.h needs, or as old
PASSED_ON = ("-D", "-U", "-l", "-L")


class Order(NamedTuple):
    """The sources and options of a program, as nvcc is given them."""

    sources: list[Path]
    out: Path
    include: list[Path]
    passed_on: list[str]
    ignored: list[str]


def order(words: list[str]) -> Order:
    """The order that nvcc's command line is; UsageError where it is for something else than a whole program."""
    given = Order([], Path("a.out"), [], [], [])
    left = iter(words)

    def value(word: str, option: str) -> str:
        following = word.removeprefix(option).removeprefix("=") or next(left, "")
        if not following:
            raise UsageError(f"{option} lacks its value.", "see `flashcli emulate --help`.")
        return following

    for word in left:
        if word in ("-c", "-dc", "-ptx", "-cubin", "-fatbin", "--compile", "-E"):
            hint = "name all sources at once, with -o PROGRAM."
            raise UsageError(f"{word}: only whole programs can be emulated.", hint)
        if not word.startswith("-"):
            given.sources.append(Path(word))
        elif word.startswith("-o"):
            given = given._replace(out=Path(value(word, "-o")))
        elif word.startswith("-I"):
            given.include.append(Path(value(word, "-I")))
        elif word.startswith(PASSED_ON):
            given.passed_on.append(word[:2] + value(word, word[:2]))
        elif option := next((one for one in ("-Xcompiler", "--compiler-options") if word.startswith(one)), None):
            given.passed_on.extend(value(word, option).split(","))
        elif option := next((one for one in VALUE_FOLLOWS if word.split("=")[0] == one), None):
            meant = value(word, option)
            if option in ("-std", "--std") and meant not in OLDER:
                given.passed_on.append(f"-std={meant}")
        elif not word.startswith(WITHOUT_MEANING):
            given.ignored.append(word)
    if not given.sources:
        raise UsageError("there is no source to compile.", "flashcli emulate hw4.cu -o hw4")
    for source in given.sources:
        check_distinct(source, given.out)
    return given


def build(given: Order) -> None:
    """Compile and link a program; BadInput with the compiler's words where its sources are at fault."""
    machine.compiler()
    with tempfile.TemporaryDirectory() as own:
        objects = [_object(given, source, Path(own, str(n))) for n, source in enumerate(given.sources)]
        whole = [PROGRAM, PROGRAM.with_suffix(".h"), machine.BLOCK, translate.CUDA]
        with machine.made(
            cache.folder(), ".o", whole, "", lambda to: machine.run("-O2", "-c", "-o", to, "-x", "c++", PROGRAM)
        ) as program:
            _compile(given, *objects, program, "-o", f"{own}/program", *given.passed_on)
        with explained("create", str(given.out), CannotCreate):
            write_whole(given.out, Path(own, "program").read_bytes())
            mode = given.out.stat().st_mode
            given.out.chmod(mode | (mode & 0o444) >> 2)  # who may read may run it


def _object(given: Order, source: Path, folder: Path) -> Path:
    with explained("read", str(source)):
        found = translate.sources(source, given.include)
    translated = translate.write(found, folder)
    include = [f"-I{there}" for there in (folder, *given.include)]
    options = [word for word in given.passed_on if not word.startswith(("-l", "-L"))]
    here = f"-ffile-prefix-map={os.getcwd()}=."  # places are told as from here
    _compile(given, *WATCHED, here, *include, *options, "-c", translated, "-o", folder / "made.o")
    return folder / "made.o"


def _compile(given: Order, *arguments: object) -> None:
    command = [*machine.compiler(), *machine.OPTIONS, f"-I{machine.HERE}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        say(done.stderr.rstrip())
        names = ", ".join(map(str, given.sources))
        raise BadInput(f"{names} cannot be compiled for the CPU: see above.", HINT)
