"""A kernel as C++ for a CPU: its sources with each ``asm`` statement as a call of the function in cuda.h that does it.

That function's name is the instruction's, and its arguments are the statement's operands. Instructions that cuda.h does
not have end the process when they are come to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

CUDA = Path(__file__).parent / "cuda.h"
KERNEL = re.compile(
    r'extern "C" __global__ void\s+(IN_CLUSTERS )?(?:__launch_bounds__\([^{]*?\)\s+)?(\w+)\(const (?:__\w+ )?(\w+) a\)'
)
LAUNCH = """static void {name}(const {argument});
extern "C" __attribute__((visibility("default")))
void launch_{name}(const {argument} *a, int grid, int threads, int shared, bool backwards) {{
    const auto call = [](const void *a) {{ {name}(*(const {argument} *)a); }};
    emulator::launch(call, a, grid, threads, shared, {cluster}, backwards);
}}
static void {name}(const {argument} a)"""
ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
CONSTRAINT = re.compile(r'"[=+]?[a-z]"\s*(?=\()')
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
BLANK = " \t\n\\"  # in macros, lines end with that
PREDICATE = (".reg", "setp")  # begin what only prepares the instruction that comes last
ROOM = r"static thread_local \1 *const \2 = reinterpret_cast<\1 *>(emulator::dynamic_shared);"
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];")


def write(source: Path, headers: list[Path], macros: Mapping[str, object], folder: Path) -> Path:
    """A file in ``folder`` to be compiled with its ``launch_NAME`` for each kernel, and beside it what it includes."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {path.name: path.read_text() for path in headers} | {"kernel.cpp": source.read_text()}
    called: set[str] = set()
    for name, text in texts.items():
        texts[name] = translated(text, called)
    known = set(re.findall(r"^(?:inline )?void (\w+)\(", CUDA.read_text(), re.MULTILINE))
    others = [
        f'template <class... T> void {name}(T &&...) {{ emulator::fail("there is no {name} here"); }}'
        for name in sorted(called - known)
    ]
    defined = [f"#define {name} {value}" for name, value in macros.items()]  # after cuda.h has been read
    begin = ['#include "cuda.h"', "namespace ptx {", *others, "}", *defined]
    texts["kernel.cpp"] = "\n".join([*begin, texts["kernel.cpp"]])
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "kernel.cpp"


def translated(text: str, called: set[str]) -> str:
    """C++ in the place of CUDA; the names of instructions are added to ``called``."""
    text = DYNAMIC.sub(ROOM, CONSTRAINT.sub("", text))
    parts, at = [], 0
    for match in ASM.finditer(text):
        end = match.end()
        template, *operands = _split(text, end, ":")
        name = _name("".join(STRING.findall(template)))
        given = [one.strip(BLANK) for part in operands[:2] for one in _split(part + ")", 0, ",") if one.strip(BLANK)]
        parts += [text[at : match.start()], f"ptx::{name}({', '.join(given)})"]
        at = end + sum(map(len, (template, *operands))) + len(operands) + 1
        called.add(name)
    return KERNEL.sub(_launched, "".join([*parts, text[at:]]))


def _launched(kernel: re.Match[str]) -> str:
    clustered, name, argument = kernel.groups()
    return LAUNCH.format(name=name, argument=argument, cluster="CLUSTER" if clustered else 1)


def _name(template: str) -> str:
    """Of the last instruction in it, with the special register that it reads."""
    statements = [line.strip(" {}") for line in template.replace(r"\n", ";").split(";")]
    instructions = [line for line in statements if line and not line.startswith(PREDICATE)]
    if not instructions:
        return "nothing"
    opcode = re.sub(r"^@!?\w+ ", "", instructions[-1]).split()[0]
    return re.sub(r"\W", "_", "_".join([opcode, *re.findall(r"%%([\w.]+)", template)]))


def _split(text: str, at: int, separator: str) -> list[str]:
    """The parts from there to the bracket that closes, between separators that are in no brackets and no string."""
    parts, depth, quoted, begin = [], 0, False, at
    while True:
        c = text[at]
        if c == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "([{":
            depth += 1
        elif not quoted and c in ")]}":
            if depth == 0:
                return [*parts, text[begin:at]]
            depth -= 1
        elif not quoted and depth == 0 and c == separator:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
