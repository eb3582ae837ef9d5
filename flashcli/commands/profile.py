from __future__ import annotations

import click

from flashcli.commands import options
from flashcli.kernels.attention import KERNELS
from flashcli.terminal import as_json

PROFILED = ("t10",)  # of the report's cases the one that its lowest rungs have


@click.command(
    epilog=options.examples(
        "flashcli profile --kernel wgmma --shape 10,2048,64",
        "flashcli profile --kernel float4 --kernel restructured --json profile.json",
    )
)
@click.option(
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    type=options.KERNEL_TYPE,
    help="Profile this kernel; repeatable. All by default; see `flashcli kernels`.",
)
@options.case_option
@options.shape_option
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The input is made from this number."
)
@as_json.json_option
def command(kernels: tuple[str, ...], cases: tuple[str, ...], shapes: tuple, seed: int, json_path: str | None) -> None:
    """Tell what the GPU's counters say of kernels, through Nsight Compute: what the course's report had of nvprof.

    One launch of each function of a kernel is counted. Where counters cannot be had, this shows what the compiler
    knows, and the exit code is 69; without a GPU, what it knows for an H200.
    """
    from flashcli.errors import BackendUnavailable
    from flashcli.measure import machine, profiling, records
    from flashcli.measure.rows import Row

    chosen = options.named_shapes(cases, shapes, PROFILED)
    record = records.Record(machine.circumstances())
    try:
        record.circumstances |= machine.gpu_circumstances()
        profiler = profiling.Profiler.of_first_gpu()
    except BackendUnavailable as error:
        profiler = profiling.Profiler.of_no_gpu(error)
        options.notice("no usable GPU: this is what the compiler knows of an H200.")
    for case, shape in chosen.items():
        for name in kernels or KERNELS:
            record.rows += profiler.rows(Row.about(case, shape, name), seed)
            click.echo(f"{case} {name} done", err=True)
    if profiler.unavailable:
        record.circumstances["counters"] = str(profiler.unavailable)
    as_json.present(record.written(), records.texts(records.profile_tables(record.rows)), json_path)
    if profiler.unavailable:
        raise profiler.unavailable
