from __future__ import annotations

from typing import Any

import click

from flashcli.commands import decode_options, options
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.decode import KERNELS as DECODERS
from flashcli.terminal import as_json

PROFILED = ("t10",)  # of the report's cases the one that its lowest rungs have


@click.command(
    epilog=options.examples(
        "flashcli profile --kernel wgmma --shape 10,2048,64",
        "flashcli profile --decode 8,64,8,128 --lengths 4096",
        "flashcli profile --kernel float4 --kernel restructured --json profile.json",
    )
)
@click.option(
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    type=click.Choice([*KERNELS, *DECODERS]),
    help="Profile this kernel; repeatable. All by default; see `flashcli kernels`.",
)
@options.case_option
@options.shape_option
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The input is made from this number."
)
@decode_options.case_options
@as_json.json_option
def command(
    kernels: tuple[str, ...], cases: tuple[str, ...], shapes: tuple, seed: int, decode: Any, json_path: str | None
) -> None:
    """Tell what the GPU's counters say of kernels, through Nsight Compute: what the course's report had of nvprof.

    One launch of each function of a kernel is counted. Where counters cannot be had, this shows what the compiler
    knows, and the exit code is 69; without a GPU, what it knows for an H200.
    """
    from flashcli.measure import machine, profiling, records

    ladder = DECODERS if decode else KERNELS
    if decode and (cases or shapes):
        raise UsageError("--decode goes with neither --case nor --shape.", "leave out the one or the other.")
    if others := [name for name in kernels if name not in ladder]:
        told = f"{others[0]} is no kernel of {'paged decode' if decode else 'attention'}."
        raise UsageError(told, f"choose one of {', '.join(ladder)}.")
    chosen = {} if decode else options.named_shapes(cases, shapes, PROFILED)
    record = records.Record(machine.circumstances())
    try:
        record.circumstances |= machine.gpu_circumstances()
        profiler = profiling.Profiler.of_first_gpu()
    except BackendUnavailable as error:
        profiler = profiling.Profiler.of_no_gpu(error)
        options.notice("no usable GPU: this is what the compiler knows of an H200.")
    for name in (kernels or DECODERS) if decode else ():
        record.rows += profiler.of_decode(decode, name)
        click.echo(f"{name} done", err=True)
    for case, shape in chosen.items():
        for name in kernels or KERNELS:
            record.rows += profiler.of_attention(case, shape, name, seed)
            click.echo(f"{case} {name} done", err=True)
    if profiler.unavailable:
        record.circumstances["counters"] = str(profiler.unavailable)
    as_json.present(record.written(), records.texts(records.profile_tables(record.rows)), json_path)
    if profiler.unavailable:
        raise profiler.unavailable
