from __future__ import annotations

import click

from flashcli.commands import options


class Nvccs(click.Command):
    """A command whose words are all left to it: options such as -arch=sm_61 are not of the form that click knows."""

    def parse_args(self, context: click.Context, words: list[str]) -> list[str]:
        own = [word for word in words if word in ("-h", "--help", "--debug")]
        return super().parse_args(context, own or ["--", *words])


@click.command(
    cls=Nvccs,
    epilog=options.examples(
        "flashcli emulate hw4.cu -o hw4",
        "flashcli emulate main.cu kernels.cu -I include -o hw4",
    ),
)
@click.argument("words", metavar="SOURCE.cu.. -o PROGRAM", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> None:
    """Compile a CUDA program for the CPU, where each of its threads is emulated: for homework without a GPU.

    Takes nvcc's place, as in make NVCC='flashcli emulate', and its options: -o, -I, -D, -U, -l, -L and -Xcompiler mean
    the same, those for GPUs nothing. The program is slow. It ends at the first fault that is seen, and tells the line:
    an access out of bounds, a race, a barrier that not all threads come to, an address that is not aligned.
    """
    from flashcli.emulator import programs

    given = programs.order(list(words))
    programs.build(given)
    if given.ignored:
        options.notice(f"ignored: {' '.join(given.ignored)}")
