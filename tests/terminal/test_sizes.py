"""One way to write a size, for the command line and for rules files."""

from __future__ import annotations

import click
import pytest

from flashcli.judge import rules
from flashcli.terminal import parameters, sizes


@pytest.mark.parametrize(
    ("written", "size"),
    [("4096", 4096), ("7 B", 7), ("2K", 2048), ("512 MiB", 2**29), ("8GB", 2**33), ("8 gib", 2**33), ("1T", 2**40)],
)
def test_the_command_line_and_a_rules_file_read_the_same_sizes(written, size):
    assert parameters.BYTES.convert(written, None, None) == rules.size(written) == size


@pytest.mark.parametrize("written", ["", "0", "0G", "-1", "1.5G", "G", "1 X", "1 GiBs", "9" * 5000])
def test_neither_reads_anything_else(written):
    with pytest.raises(click.BadParameter):
        parameters.BYTES.convert(written, None, None)
    with pytest.raises(ValueError):
        rules.size(written)


def test_what_is_shown_can_be_read_again():
    assert [sizes.text(size) for size in (5, 3 * 2**20 // 2, 9 * 2**30, 10 * 2**30)] == [
        "5 bytes", "1.5 MiB", "9216.0 MiB", "10.00 GiB"
    ]  # fmt: skip
