from __future__ import annotations

import click

from flashcli.commands import options


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--header-only", is_flag=True, help="Do not read the values.")
@options.json_option
def command(path: str, header_only: bool, as_json: bool) -> None:
    """Show the shape of an input file, the range of its values, and whether it keeps to the course's bounds."""
    from flashcli.files.summary import summarise

    record = summarise(path, header_only)
    if as_json:
        options.print_json(record)
        return
    click.echo(f"(B, N, d): ({record['B']}, {record['N']}, {record['d']})")
    click.echo(f"size: {record['bytes']} bytes, as the header says")
    if not header_only:
        for name in "QKV":
            low, high = record[f"{name}_min"], record[f"{name}_max"]
            click.echo(f"{name}: {low:.7g} to {high:.7g}" if low <= high else f"{name}: no numbers at all")
        click.echo(f"NaN or Inf: {record['nonfinite']}" + (f", first {record['place']}" if record["place"] else ""))
    broken = record["course_bounds_broken"]
    kept = "kept by the header" if header_only else "kept"
    click.echo("course bounds: " + (f"broken by {', '.join(broken)}" if broken else kept))
