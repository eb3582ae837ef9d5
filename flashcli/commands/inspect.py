from __future__ import annotations

import click

from flashcli.commands import options


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--header-only", is_flag=True, help="Do not read the values.")
@options.json_option
def command(path: str, header_only: bool, as_json: bool) -> None:
    """Show the shape of an input file, the range of its values, and whether it keeps to the course's bounds."""
    from flashcli.summary import summarise

    record = summarise(path, header_only)
    if as_json:
        options.print_json(record)
        return
    click.echo(f"(B, N, d): ({record['B']}, {record['N']}, {record['d']})")
    click.echo(f"size: {record['bytes']} bytes, as the header says")
    if not header_only:
        for name in "QKV":
            click.echo(f"{name}: {record[f'{name}_min']:.7g} to {record[f'{name}_max']:.7g}")
        click.echo(f"NaN or Inf: {record['nonfinite']}" + (f", first {record['place']}" if record["place"] else ""))
    broken = record["course_bounds_broken"]
    click.echo("course bounds: " + (f"broken by {', '.join(broken)}" if broken else "kept"))
