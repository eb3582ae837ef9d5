from __future__ import annotations

import click

from flashcli import parameters
from flashcli.commands import options

NAMES = ["uniform", "normal", "tiny", "large", "outlier", "equal", "negative"]  # a test holds it to distributions.py


@click.command(
    epilog=options.examples(
        "flashcli generate t.in --shape 10,2048,64",
        "flashcli generate t.in --shape 2,128,32 --seed 7 --reference t.ref",
        "flashcli generate hard.in --shape 2,500,64 --distribution outlier",
    )
)
@click.argument("output_path", metavar="OUT")
@click.option("--shape", type=parameters.SHAPE, required=True, help="The shape of Q, K and V, such as 10,2048,64.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same seed gives the same file.")
@click.option(
    "--distribution",
    type=click.Choice(NAMES),
    default="uniform",
    show_default=True,
    help="How the values of Q, K and V are drawn; uniform is in [-3, 3], as in the course.",
)
@click.option("--reference", "reference_path", metavar="REF", help="Write the answer, computed in float64, to REF too.")
def command(output_path: str, shape, seed: int, distribution: str, reference_path: str | None) -> None:
    """Make the input file OUT: B batches of Q, K and V with N rows of d random numbers each.

    The same shape, seed and distribution give the same file anywhere.
    """
    from flashcli.files.distributions import generate
    from flashcli.files.outputs import check_distinct

    check_distinct(output_path, reference_path)
    with options.progress(shape.B, output_path) as bar:
        for count in generate(output_path, shape, seed, distribution, reference_path):
            bar.update(count)
    click.echo(f"{output_path}: (B, N, d) = {shape}, {distribution}, seed {seed}, {shape.input_bytes} bytes")
