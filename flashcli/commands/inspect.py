from __future__ import annotations

from collections.abc import Iterator

import click

from flashcli.asked.shape import Shape
from flashcli.commands import options, standard
from flashcli.errors import UsageError
from flashcli.terminal import as_json, parameters

ANSWER = """out: {shape} of {type}, {out_min:.7g} to {out_max:.7g}
lse: {lse_min:.7g} to {lse_max:.7g}, -inf of {see_nothing} queries that see nothing
NaN or Inf: {nonfinite}"""


@click.command(
    epilog=options.examples(
        "flashcli inspect testcases/t01.in",
        "flashcli inspect huge.in --header-only",
        "flashcli inspect t01.out --shape 2,128,32 --json -",
    )
)
@click.argument("path", metavar="FILE", type=parameters.FILE_OR_STREAM)
@click.option("--header-only", is_flag=True, help="Read B, N and d only, not the values.")
@click.option("--shape", type=parameters.SHAPE, help="FILE is an output of this shape, which it does not say itself.")
@as_json.json_option
def command(path: str, header_only: bool, shape: Shape | None, json_path: str | None) -> None:
    """Show the shape of an input file, the range of its values, and whether it keeps to the course's bounds.

    FILE can be -, which is stdin. An input file of `flashcli decode`, whose cache may be larger than memory, is shown
    by sizes and lengths; its answer, and an output with its --shape, by the range of values.
    """
    from flashcli.files.decode.tensors import has_tensors
    from flashcli.files.summary import summarise, summarise_output

    if shape and header_only:
        raise UsageError("an output, which --shape is for, has no header.", "leave out --header-only.")
    [path] = standard.to_read(path)
    as_json.check_apart(json_path, path)
    if has_tensors(path):
        if shape:
            raise UsageError(
                "--shape is for outputs of `flashcli run`; other files say their shapes.", "leave out --shape."
            )
        _inspect_decode(path, json_path)
        return
    record = summarise_output(path, shape) if shape else summarise(path, header_only)
    lines = _of_output(record) if shape else _lines(record, header_only)
    as_json.present(record, "\n".join(lines), json_path)


def _inspect_decode(path: str, json_path: str | None) -> None:
    from flashcli.files.decode.tensors import read_decode
    from flashcli.files.decode.verify import summarise_answer
    from flashcli.run.decode import sizes, what

    if answer := summarise_answer(path):
        as_json.present(answer, ANSWER.format(**answer), json_path)
        return
    asked, _ = read_decode(path, options.notice)
    record = what(asked)
    told = (
        "sequences: {tokens} tokens, {shortest} to {longest} each\n"
        "cache: {pages} pages of {page} tokens of {cache_type} ({layout}), {cache_bytes} bytes of it used\n"
        "queries: {query_type}, scale {scale:.7g}"
    )
    lines = f"{sizes(record)}\n{told.format(**record)}"
    as_json.present(record, lines + "".join(f", {one}" for one in _besides(record)), json_path)


def _besides(record: dict) -> Iterator[str]:
    """Name the rarer options that a paged decode file asks for, such as ALiBi, a window or block-sparse attention."""
    if record["alibi"]:
        yield "ALiBi"
    if record["softcap"]:
        yield "a softcap of {softcap:.7g}".format(**record)
    if record["sinks"]:
        yield "sinks"
    if not record["causal"]:
        yield "no causal mask"
    if record["sliding_window"]:
        yield "a window of {sliding_window}".format(**record)
    if sparse := record["block_sparse"]:
        yield "block-sparse ({})".format(", ".join(f"{name} {value}" for name, value in sparse.items()))
    if (record["k_scale"], record["v_scale"]) != (1, 1):
        yield "k_scale {k_scale:.7g}, v_scale {v_scale:.7g}".format(**record)


def _values(record: dict, names: str) -> Iterator[str]:
    for name in names:
        low, high = record[f"{name}_min"], record[f"{name}_max"]
        yield f"{name}: {low:.7g} to {high:.7g}" if low <= high else f"{name}: no numbers at all"
    yield f"NaN or Inf: {record['nonfinite']}" + (f", first {record['place']}" if record["place"] else "")


def _of_output(record: dict) -> Iterator[str]:
    yield "(B, N, d): ({B}, {N}, {d})".format(**record)
    yield f"size: {record['bytes']} bytes, as an output of this shape has"
    yield from _values(record, "O")


def _lines(record: dict, header_only: bool) -> Iterator[str]:
    yield "(B, N, d): ({B}, {N}, {d})".format(**record)
    yield f"size: {record['bytes']} bytes, as the header says"
    if not header_only:
        yield from _values(record, "QKV")
    broken = record["course_bounds_broken"]
    kept = "kept by the header" if header_only else "kept"
    yield "course bounds: " + (f"broken by {', '.join(broken)}" if broken else kept)
