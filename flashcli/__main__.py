"""The entry point: start what takes long, run the command line, and leave quickly."""

from __future__ import annotations

import os
import sys


def prepare_run(arguments: list[str]) -> None:
    """What makes `flashcli run` start and end sooner, before even click is imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # it has a thread for each of ours: to start more takes time
    # A queue between host and GPU takes 8 ms to make and 5 ms to take down, and the driver makes eight. One is enough:
    # chunks come one after the other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(argument.endswith(("cpu", "sequential")) for argument in arguments):
        import functools

        from flashcli.gpu.warm_up import warm_up
        from flashcli.run.launchers import devices_wanted

        warm_up(functools.partial(devices_wanted, arguments, os.environ))


def forget_dead_streams() -> None:
    """Python would end with a code of its own where it cannot write the rest of a message."""
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (AttributeError, OSError, ValueError):
            setattr(sys, name, None)


def main() -> None:
    from flashcli import signals

    signals.listen()  # before anything that takes time
    if sys.argv[1:2] == ["run"]:
        prepare_run(sys.argv[2:])
    from flashcli.cli import main as run_command_line

    code = run_command_line()
    if "mpi4py" in sys.modules:
        forget_dead_streams()
        sys.exit(code)  # a launcher may take leaving at once for a crash
    os._exit(code)  # unloading CUDA and Python piece by piece takes 0.1 s, and the system frees everything anyway


if __name__ == "__main__":
    main()
