from __future__ import annotations

import os

import click

from flashcli import as_json, errors, parameters
from flashcli.commands import options


@click.command(
    epilog=options.examples(
        "flashcli compare t01.out testcases/t01.ref --input testcases/t01.in",
        "flashcli compare mine.out theirs.out --shape 10,2048,64 --tolerance 1e-5",
        "flashcli compare a.out b.out --json -",
    )
)
@click.argument("got")
@click.argument("want")
@options.tolerance_option
@click.option("--shape", type=parameters.SHAPE, help="The shape of both outputs, such as 10,2048,64.")
@click.option("--input", "input_path", metavar="FILE", help="Take the shape from this input file.")
@as_json.json_option
def command(got: str, want: str, tolerance: float, shape, input_path: str | None, json_path: str | None) -> None:
    """Compare the output file GOT with the output file WANT. Exit code 1 if they differ.

    An output file does not say its shape. It is taken from --shape or --input, or from an input file beside WANT with
    the same name and the ending .in; without any, places are given as (0, element, 0).
    """
    from flashcli.files import verify

    as_json.check_apart(json_path, got, want, input_path)
    shape = shape or _find_shape(want, input_path)
    result = verify.compare_files(got, want, shape, tolerance)
    as_json.present(result.record(), _text(result, got, want), json_path)
    raise SystemExit(0 if result.matches else errors.MISMATCH)


def _find_shape(want: str, input_path: str | None):
    from flashcli.files.fileformat import InputFile, flat_shape

    beside = os.path.splitext(want)[0] + ".in"
    if input_path is None and beside != want and os.path.exists(beside):
        input_path = beside
    if input_path is None:
        return flat_shape(want)
    with InputFile(input_path) as source:
        return source.shape


def _text(result, got: str, want: str) -> str:
    verdict = "match" if result.matches else "DIFFER"
    lines = [
        f"{got} and {want} {verdict}: {result.mismatches} of {result.count} elements off by more than "
        f"{result.tolerance:g} + {result.tolerance:g}·|want|",
        f"max abs error: {result.max_abs:.3e}",
        f"max rel error: {result.max_rel:.3e}",
        f"relative L2 error: {result.relative_l2:.3e}",
        f"NaN or Inf: {result.got_nonfinite} in {got}, {result.want_nonfinite} in {want}",
    ]
    for place in result.places:
        lines.append(
            "  at (batch, row, column) = ({batch}, {row}, {column}): got {got:.9g}, want {want:.9g}".format(**place)
        )
    return "\n".join(lines)
