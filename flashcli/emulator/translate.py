"""CUDA as C++ for a CPU: each ``asm`` statement and each launch as a call of a function.

An instruction's function is in cuda.h. Its name is the instruction's, and its arguments are the statement's operands.
Instructions that cuda.h does not have end the process when they are come to. Lines keep their numbers, and places in
messages are those of the source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from flashcli.errors import BadInput
from flashcli.files.regular import read_regular

CUDA = Path(__file__).with_name("cuda.h")
KERNEL = re.compile(
    r'extern "C" __global__ void\s+(IN_CLUSTERS )?(?:__launch_bounds__\([^{]*?\)\s+)?'
    r"(\w+)\(const (?:__\w+ )?(\w+) (\w+)\)"
)
# On one line, so that the lines after it keep their numbers.
LAUNCH = (
    'static void {name}(const {argument}); extern "C" __attribute__((visibility("default"))) '
    "void launch_{name}(const {argument} *a, unsigned grid, unsigned threads, int shared, long first, long last, "
    "bool backwards) {{ const emulator::Grid some = {{{{grid, 1, 1}}, {{threads, 1, 1}}, shared, {cluster}, "
    "first, last, backwards}}; emulator::launch(some, [](const void *a) {{ {name}(*(const {argument} *)a); }}, a); }} "
    "static void {name}(const {argument} {called})"
)
ASM = re.compile(r"\basm\s*(?:volatile\s*|__volatile__\s*)?\(")
CONSTRAINT = re.compile(r'"[=+]?[a-z]"\s*(?=\()')
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
NO_CODE = re.compile(r"//(?:\\\n|[^\n])*|/\*.*?\*/", re.DOTALL)
TEXT = re.compile(rf"{NO_CODE.pattern}|{STRING.pattern}|'(?:\\[^'\n]*|[^'\\\n])'", re.DOTALL)
BLANK = " \t\n\\"  # in macros, lines end with that
PREDICATE = (".reg", "setp")  # begin what only prepares the instruction that comes last
WORD = re.compile(r"\b__noinline__\b(?!\s*\))")  # a macro of it would reach into C++'s own headers
DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:(?:__align__|alignas)\(\w+\)\s+)?([\w\s:]+?)\s+(\w+)\s*\[\s*\]\s*;")
ROOM = r"DYNAMIC_SHARED \1 *const \2 = reinterpret_cast<\1 *>(emulator::dynamic_shared);"
INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)(["<])([^">\n]+)[">]', re.MULTILINE)
# Headers of CUDA's, of which cuda.h and program.h have what is known here.
KNOWN = re.compile(
    r"cuda(_runtime|_runtime_api|_device_runtime_api|_profiler_api)?\.h|(device_launch_parameters|math_constants"
    r"|math_functions|vector_types|vector_functions|driver_types|device_functions|sm_\d+_\w+)\.h(pp)?"
)


class Source(NamedTuple):
    """A file that is to be translated: its text, and the files that its includes lead to, by what stands there."""

    text: str
    includes: dict[str, Path]


def sources(first: Path, include: list[Path]) -> dict[Path, Source]:
    """A source and all that it includes from its own folder or from those of ``include``, by path."""
    found: dict[Path, Source] = {}
    left = [first]
    while left:
        path = left.pop()
        if path not in found:
            text = read_regular(path).decode(errors="surrogateescape").replace("\r\n", "\n")
            leads = {}
            for _, quote, name in INCLUDE.findall(text):
                candidates = [folder / name for folder in ([path.parent] if quote == '"' else []) + include]
                if there := next(filter(Path.is_file, candidates), None):
                    leads[name] = there
            found[path] = Source(text, leads)
            left += leads.values()
    return found


def write(found: Mapping[Path, Source], folder: Path, macros: Mapping[str, object] | None = None) -> Path:
    """The first of the sources, translated, in ``folder``, with those beside it that it includes.

    With ``macros``, which may be none, it is of a library, with a ``launch_NAME`` for each kernel; else of a program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {path: f"{number}-{path.name}" for number, path in enumerate(found)}
    called: set[str] = set()
    texts = {}
    for path, source in found.items():
        own = {name: names[there] for name, there in source.includes.items()}
        try:
            text = translated(_including(source.text, own), called)
        except (IndexError, ValueError) as error:  # a bracket that does not close
            raise BadInput(f"{str(path)!r} is no CUDA: a bracket is not closed.", "does nvcc compile it?") from error
        texts[path] = f'#line 1 "{path}"\n' + (text if macros is None else KERNEL.sub(_launched, text))
    known = set(re.findall(r"^(?:inline )?void (\w+)\(", CUDA.read_text("utf-8"), re.MULTILINE))
    others = [
        f'template <class... T> void {name}(T &&...) {{ emulator::fail("there is no {name} here"); }}'
        for name in sorted(called - known)
    ]
    first = next(iter(found))
    header = "program.h" if macros is None else "cuda.h"
    defined = [f"#define {name} {value}" for name, value in (macros or {}).items()]  # after the header has been read
    texts[first] = "\n".join([f'#include "{header}"', "namespace ptx {", *others, "}", *defined, texts[first]])
    names[first] = "kernel.cpp"
    for path, text in texts.items():
        (folder / names[path]).write_text(text, "utf-8", errors="surrogateescape")
    return folder / names[first]


def _including(text: str, names: Mapping[str, str]) -> str:
    def written(include: re.Match[str]) -> str:
        before, _, name = include.groups()
        if name in names:
            return f'{before}"{names[name]}"'
        return "" if KNOWN.fullmatch(name) else include[0]

    return INCLUDE.sub(written, text)


def translated(text: str, called: set[str]) -> str:
    """C++ in the place of CUDA; the names of instructions are added to ``called``."""
    text = TEXT.sub(lambda one: "\n" * one[0].count("\n") + " " if NO_CODE.fullmatch(one[0]) else one[0], text)
    text = CONSTRAINT.sub("", WORD.sub("__attribute__((noinline))", text))
    parts: list[str] = []
    at = 0
    for match in ASM.finditer(text):
        end = match.end()
        template, *operands = _split(text, end, ":")
        name = _name("".join(STRING.findall(template)))
        given = [one for part in operands[:2] for one in map(_on_one_line, _split(part + ")", 0, ",")) if one]
        called.add(name)
        parts += [text[at : match.start()], f"ptx::{name}({', '.join(given)})"]
        at = end + sum(map(len, (template, *operands))) + len(operands) + 1
        parts.append("\\\n" * text.count("\\\n", match.start(), at) or "\n" * text.count("\n", match.start(), at))
    return DYNAMIC.sub(ROOM, _launches("".join([*parts, text[at:]])))


def _on_one_line(operand: str) -> str:
    return re.sub(r"\s*\\?\n\s*", " ", operand).strip(BLANK)


def _launched(kernel: re.Match[str]) -> str:
    clustered, name, argument, called = kernel.groups()
    launch = LAUNCH.format(name=name, argument=argument, called=called, cluster="CLUSTER" if clustered else 1)
    return launch + "\n" * kernel[0].count("\n")


def _launches(text: str) -> str:
    """The text with ``kernel<<<grid, block, ..>>>(..)`` as calls of `emulator::Launch`, in program.h."""
    parts: list[str] = []
    at = 0
    quoted = [match.span() for match in TEXT.finditer(text)]
    for match in re.finditer("<<<", text):
        if any(begin <= match.start() < end for begin, end in quoted):
            continue
        begin = _kernel_before(text, match.start())
        end = _closing(text, match.end())
        opens = text.index("(", end)
        closes = opens + 1 + len(_split(text, opens + 1, "\0")[0])
        bounds = (begin, match.start()), (match.end(), end), (opens + 1, closes)
        kernel, shape, given = (text[first:last].strip(" ") for first, last in bounds)
        call = f"[=](const auto &...given) {{ {kernel}(given...); }}"
        also = f", {given}" if given else ""
        said = " ".join(kernel.split()).replace("\\", "").replace('"', "'")
        parts += [text[at:begin], f'emulator::Launch("{said}", {shape})({call}{also})']
        at = closes + 1
    return "".join([*parts, text[at:]])


def _kernel_before(text: str, at: int) -> int:
    """Where the name of a kernel begins that ends there, with its template arguments."""
    at = len(text[:at].rstrip())
    if text[at - 1] == ">":
        angles, others = 0, 0
        while True:
            at -= 1
            others += (text[at] in ")]}") - (text[at] in "([{")
            angles += not others and (text[at] == ">") - (text[at] == "<")
            if not angles:
                break
            if at == 0:
                raise ValueError
        at = len(text[:at].rstrip())
    return at - len(re.search(r"[\w:]*$", text[:at])[0])  # type: ignore[index]


def _closing(text: str, at: int) -> int:
    """Where the >>> is that ends the shape of a launch."""
    depth = 0
    while depth or not text.startswith(">>>", at):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return at


def _name(template: str) -> str:
    """The name of the function for the last instruction, with the special register that it reads."""
    statements = [line.strip(" {}") for line in template.replace(r"\n", ";").split(";")]
    instructions = [line for line in statements if line and not line.startswith(PREDICATE)]
    if not instructions:
        return "nothing"
    opcode = re.sub(r"^@!?\w+ ", "", instructions[-1]).split()[0]
    return re.sub(r"\W", "_", "_".join([opcode, *re.findall(r"%%([\w.]+)", template)]))


def _split(text: str, at: int, separator: str) -> list[str]:
    """The parts from there to the bracket that closes, between separators that are in no brackets and no string."""
    parts: list[str] = []
    depth, quoted, begin = 0, False, at
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
