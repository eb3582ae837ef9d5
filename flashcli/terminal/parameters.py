"""Types of command-line options: shapes, sizes, devices, numbers."""

from __future__ import annotations

import math
from typing import Any

import click

from flashcli.asked.shape import Shape, shape_problem
from flashcli.terminal import sizes


def is_count(text: str) -> bool:
    """Whether a text is a whole number in digits, and not so many of them that Python would refuse to read it."""
    return text.isdecimal() and len(text) <= 10


class BytesType(click.ParamType):
    """A number of bytes, in the grammar of `flashcli.terminal.sizes`."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return sizes.parse(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a number of bytes, such as 2G or 512M.", param, context)


BYTES = BytesType()
ALL = "all"


class DevicesType(click.ParamType):
    """Numbers of GPUs, or `ALL`."""

    name = "all|N,N,.."

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, ...] | str:
        if value == ALL:
            return ALL
        parts = str(value).split(",")
        if not all(map(is_count, parts)) or len({*map(int, parts)}) < len(parts):
            self.fail(f"{value!r} is neither 'all' nor different numbers of GPUs, such as 0,1.", param, context)
        return tuple(map(int, parts))


DEVICES = DevicesType()


class ShapeType(click.ParamType):
    """B,N,d as a `Shape`."""

    name = "B,N,d"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> Shape:
        if isinstance(value, Shape):
            return value
        try:
            shape = Shape(*(int(part) for part in str(value).strip("() ").split(",")))
        except (TypeError, ValueError):
            self.fail(f"{value!r} is not three numbers B,N,d, such as 10,2048,64.", param, context)
        if problem := shape_problem(shape):
            self.fail(f"{problem}.", param, context)
        return shape


SHAPE = ShapeType()


class FiniteRange(click.FloatRange):
    """Numbers from a range, but neither NaN, which no comparison finds outside of it, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, param, context)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, context)
        return number


class TextType(click.types.StringParamType):
    """Any text. Shells complete it as the name of a file, which most are."""

    def __init__(self, or_stream: bool = False) -> None:
        """``or_stream`` says that it can be -, which stands for stdin or stdout."""
        self._or_stream = or_stream

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if value == "-" and not self._or_stream:
            self.fail("- stands for stdin or stdout, but this names a file (a file - is ./-).", param, context)
        return super().convert(value, param, context)

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list:
        from click.shell_completion import CompletionItem  # here, because only shells ask

        return [CompletionItem(incomplete, type="file")]


TEXT = TextType()
FILE_OR_STREAM = TextType(or_stream=True)
