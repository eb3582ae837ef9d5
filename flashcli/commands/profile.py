from __future__ import annotations

import json as json_format

import click

from flashcli.commands import options
from flashcli.kernels.attention import KERNELS

CASES = ("t10",)  # of the report's cases the one that its lowest rungs have


@click.command()
@click.option(
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    type=options.KERNEL,
    help="One of `flashcli kernels`; may be repeated; all by default.",
)
@options.case_option
@options.shape_option
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the input.")
@click.option("--json", metavar="[FILE]", is_flag=False, flag_value="-", help="Write the record to FILE, or print it.")
def command(kernels: tuple[str, ...], cases: tuple[str, ...], shapes: tuple, seed: int, json: str | None) -> None:
    """Profile rungs with the GPU's counters, through Nsight Compute: the metrics that the report took with nvprof.

    One launch of each function of a rung is counted. Where counters cannot be had, what the compiler knows is shown,
    and the exit code is 69.
    """
    from flashcli.backends import cuda
    from flashcli.files.outputs import check_creatable, write_whole
    from flashcli.kernels import occupancy
    from flashcli.measure import bench, profiling, records

    chosen = options.named_shapes(cases, shapes, CASES)
    if json not in (None, "-"):
        check_creatable(json)
    record = {"circumstances": bench.circumstances() | bench.gpu_circumstances(), "rows": []}
    driver = cuda.load_driver()
    device = driver.Device(0)
    sms = device.get_attribute(driver.device_attribute.MULTIPROCESSOR_COUNT)
    profiler = profiling.Profiler(device.compute_capability(), sms, occupancy.multiprocessor(driver))
    for case, shape in chosen.items():
        for name in kernels or KERNELS:
            for row in profiler.rows(name, shape, seed):
                record["rows"].append({"case": case, **vars(shape), "contender": name, **row})
            click.echo(f"{case} {name} done", err=True)
    if profiler.unavailable:
        record["circumstances"]["counters"] = str(profiler.unavailable)
    text = json_format.dumps(options.finite(record), indent=1) + "\n"
    if json == "-":
        click.echo(text, nl=False)
    else:
        click.echo(records.profile_text(record["rows"]))
    if json not in (None, "-"):
        write_whole(json, text)
    if profiler.unavailable:
        raise profiler.unavailable
