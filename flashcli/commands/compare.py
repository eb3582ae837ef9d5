from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import click

from flashcli import errors
from flashcli.asked.shape import Shape
from flashcli.commands import options, standard
from flashcli.terminal import as_json, parameters

if TYPE_CHECKING:
    from flashcli.files.verify import Comparison


@click.command(
    epilog=options.examples(
        "flashcli compare t01.out testcases/t01.ref --input testcases/t01.in",
        "flashcli compare mine.out theirs.out --shape 10,2048,64 --tolerance 1e-5",
        "flashcli compare - theirs.out --json compared.json  # what stdin has",
    )
)
@click.argument("got", type=parameters.FILE_OR_STREAM)
@click.argument("want", type=parameters.FILE_OR_STREAM)
@options.tolerance_option
@click.option("--shape", type=parameters.SHAPE, help="The shape of both outputs, such as 10,2048,64.")
@click.option(
    "--input",
    "input_path",
    metavar="FILE",
    type=parameters.FILE_OR_STREAM,
    help="Take the shape from this input file.",
)
@as_json.json_option
def command(
    got: str, want: str, tolerance: float, shape: Shape | None, input_path: str | None, json_path: str | None
) -> None:
    """Compare the output file GOT with the output file WANT; one of them can be -, stdin. Exit code 1 if they differ.

    An output file does not say its shape. It is taken from --shape or --input, or from an input file beside WANT with
    the same name and the ending .in; without any, places are given as (0, element, 0). Two answers of
    `flashcli decode` do say their shapes: their `out` and `lse` are compared. A number of `out` in float16 or bfloat16
    may be off by 2^-10 or 2^-7 of the largest in its row besides: that is what rounding to these types costs.
    """
    from flashcli.files import verify
    from flashcli.files.decode import tensors as decode_file

    got_path, want_path, input_path = standard.to_read(got, want, input_path)
    as_json.check_apart(json_path, got_path, want_path, input_path)
    if any(map(decode_file.has_tensors, (got_path, want_path))):
        _compare_answers(got_path, want_path, (got, want), tolerance, shape or input_path, json_path)
    shape = shape or _find_shape(want_path, input_path)
    result = verify.compare_files(got_path, want_path, shape, tolerance)
    as_json.present(result.record(), "\n".join(_lines(result, got, want)), json_path)
    raise SystemExit(0 if result.matches else errors.MISMATCH)


def _compare_answers(
    got_path: str, want_path: str, names: tuple[str, str], tolerance: float, shape: object, json_path: str | None
) -> NoReturn:
    from flashcli.files.decode.verify import compare_answers

    if shape:
        raise errors.UsageError("answers of `flashcli decode` say their shapes.", "leave out --shape and --input.")
    found = compare_answers(got_path, want_path, tolerance)
    lines = [f"{name}: {line}" for name, result in found.items() for line in _lines(result, *names)]
    as_json.present({name: result.record() for name, result in found.items()}, "\n".join(lines), json_path)
    raise SystemExit(0 if all(result.matches for result in found.values()) else errors.MISMATCH)


def _find_shape(want: str, input_path: str | None) -> Shape:
    from flashcli.files.fileformat import InputFile, flat_shape

    beside = os.path.splitext(want)[0] + ".in"
    if input_path is None and beside != want and os.path.exists(beside):
        input_path = beside
    if input_path is None:
        return flat_shape(want)
    with InputFile(input_path) as source:
        return source.shape


def _lines(result: Comparison, got: str, want: str) -> Iterator[str]:
    from flashcli.files.verify import place_text

    verdict, limit = "match" if result.matches else "DIFFER", f"{result.tolerance:g}"
    counts, rounding = f"{result.mismatches} of {result.count} elements", ""
    if result.unit:
        rounding = f" + {result.unit:g}·(largest |want| of the row)"
    yield f"{got} and {want} {verdict}: {counts} off by more than {limit} + {limit}·|want|{rounding}"
    yield f"max abs error: {result.max_abs:.3e}"
    yield f"max rel error: {result.max_rel:.3e} of 1 + |want|"
    yield f"relative L2 error: {result.relative_l2:.3e}"
    left_out = "; these errors leave them out" if result.got_nonfinite or result.want_nonfinite else ""
    yield f"NaN or Inf: {result.got_nonfinite} in {got}, {result.want_nonfinite} in {want}{left_out}"
    if result.worst:
        yield f"worst at {place_text(result.worst)}"
    for place in result.places:
        yield f"  off at {place_text(place)}"
