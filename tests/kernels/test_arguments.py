"""What a kernel is told: Python packs it as the kernels read it."""

from __future__ import annotations

import re

from emulator import claims

from flashcli.asked.attention import Operand, call, contiguous
from flashcli.compiler.compiler import SOURCES
from flashcli.kernels.arguments import Attention, Strides, argument, of_batches

HEADER = SOURCES / "attention" / "arguments.h"


def fields_in_the_header() -> list[str]:
    """The names of all fields, in order: what stands before a comma or semicolon, but for the names of the structs."""
    text = re.sub(r"//.*|typedef float .*", "", HEADER.read_text())
    return re.findall(r"(\w+)\s*[,;]", text.replace("} Strides;", "").replace("} Attention;", ""))


def test_the_header_has_the_fields_that_python_has():
    assert fields_in_the_header() == [name for struct in (Strides, Attention) for name, _ in struct._fields_]


def test_every_field_is_where_python_puts_it(emulated, tmp_path):
    claims.check(tmp_path, "attention/arguments.h", claims.of_fields(Attention) + claims.of_fields(Strides))


def test_arguments_are_where_their_names_say():
    given = of_batches((4096, 0, 0, 8192), 10, apart=(600, 0, 0, 70), B=3, M=5, N=7, scale=0.5)
    assert (given.Q, given.K, given.O) == (4096, None, 8192)
    assert [getattr(given.q, name) for name in ("batch", "head", "row")] == [600, 0, 10]
    assert [getattr(given.o, name) for name in ("batch", "head", "row")] == [70, 0, 10]
    assert [getattr(given, name) for name in ("B", "H", "Hkv", "M", "N", "q_start", "scale")] == [3, 1, 1, 5, 7, 0, 0.5]


def test_arguments_of_arrays_are_where_their_names_say():
    q, k = Operand((2, 4, 5, 8), (320, 8, 32, 1), "float32"), contiguous((2, 2, 7, 8), "float32")
    mask = contiguous((2, 1, 1, 7), "bool")
    given = argument(
        call(q, k, k, bias=contiguous((4, 1, 7), "float32"), mask=mask, causal=True, scale=0.5, q_start=2), chunk=3
    )
    assert [getattr(given.q, name) for name in ("batch", "head", "row")] == [320, 8, 32]
    assert [getattr(given.k, name) for name in ("batch", "head", "row")] == [112, 56, 8]
    assert [getattr(given.bias_strides, name) for name in ("batch", "head", "row")] == [0, 7, 0]
    assert [getattr(given.mask_strides, name) for name in ("batch", "head", "row")] == [7, 0, 0]
    names = ("B", "H", "Hkv", "M", "N", "q_start", "scale", "bias_column", "chunk")
    assert [getattr(given, name) for name in names] == [2, 4, 2, 5, 7, 2, 0.5, 1, 3]
