from __future__ import annotations

import os
from typing import Any

import click

from flashcli.asked.shape import Shape
from flashcli.commands import decode_options, options, standard
from flashcli.errors import UsageError
from flashcli.terminal import parameters

# A test holds the names to those of files/distributions.py, which takes longer to import than help should.
DISTRIBUTIONS = {
    "uniform": "between -3 and 3, as in the course",
    "normal": "standard normal",
    "tiny": "between -1e-6 and 1e-6: all weights are alike",
    "large": "between -1e4 and 1e4: exponentials overflow, one weight takes all",
    "outlier": "uniform, with one value of 100 in each of Q, K and V",
    "equal": "the rows of a matrix are alike",
    "negative": "every score is below -120: its exponential is 0 in float32",
}

HELP = """Make the input file OUT: B batches of Q, K and V with N rows of d random numbers each.

The same shape, seed and distribution give the same file anywhere. OUT or REF can be -, which is stdout.

\b
Distributions:
"""


@click.command(
    help=HELP + "\n".join(f"  {name:<10}{text}" for name, text in DISTRIBUTIONS.items()),
    epilog=options.examples(
        "flashcli generate t.in --shape 10,2048,64",
        "flashcli generate t.in --shape 2,128,32 --seed 7 --reference t.ref",
        "flashcli generate x.safetensors --decode 3,8,2,128 --lengths 4096 --queries 1x2,512",
    ),
)
@click.argument("output_path", metavar="OUT", type=parameters.FILE_OR_STREAM)
@click.option("--shape", type=parameters.SHAPE, help="The shape of Q, K and V, such as 10,2048,64.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the random numbers: a file's bytes follow from it and the other options.",
)
@click.option(
    "--distribution",
    metavar="NAME",
    type=click.Choice(list(DISTRIBUTIONS)),
    default="uniform",
    show_default=True,
    help="How the values of Q, K and V are drawn, as listed above.",
)
@click.option(
    "--reference",
    "reference_path",
    metavar="REF",
    type=parameters.FILE_OR_STREAM,
    help="Write the answer, computed in float64, to REF too; of --decode rounded to its type.",
)
@click.option("--force", is_flag=True, help="Overwrite OUT and REF if they are there already.")
@decode_options.case_options
def command(
    output_path: str,
    shape: Shape | None,
    seed: int,
    distribution: str,
    reference_path: str | None,
    force: bool,
    decode: Any,
) -> None:
    from flashcli.files.distributions import generate
    from flashcli.files.outputs import check_distinct

    output_path, reference_path = standard.to_write(output_path, reference_path)
    check_distinct(output_path, reference_path)
    written = [path for path in (output_path, reference_path) if path]
    aside = any(map(standard.is_stdout, written))  # an answer goes there: the report must not
    for path in written:
        if not force and os.path.isfile(path) and not standard.is_stdout(path):
            raise UsageError(f"{path!r} is there already.", "name another file, or overwrite it with --force.")
    if decode:
        if shape or distribution != "uniform":
            raise UsageError(
                "--decode goes with neither --shape nor --distribution.",
                "leave out --shape and --distribution, or --decode.",
            )
        decode_options.make(output_path, decode, reference_path, aside)
        return
    if not shape:
        raise click.MissingParameter(param_type="option", param_hint="'--shape'")
    with options.progress(shape.B, output_path) as bar:
        for count in generate(output_path, shape, seed, distribution, reference_path):
            bar.update(count)
    report = f"{output_path}: (B, N, d) = {shape}, {distribution}, seed {seed}, {shape.input_bytes} bytes"
    click.echo(report, err=aside)
