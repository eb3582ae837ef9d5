"""The entry point: start what takes long, run the command line, and leave quickly.

Until `main` has begun, an interrupt is Python's own to tell of, with a traceback: so nothing is imported before that
Python has not imported itself, `__future__` included.
"""

import os
import sys

ONE_BLAS_THREAD = ("run", "compare", "inspect")  # run has threads of its own, the others no matrix products


def prepare_run(arguments: list[str]) -> None:
    """Make `flashcli run` start and end sooner; called before even click is imported."""
    # A queue between host and GPU takes 8 ms to make and 5 ms to take down, and the driver makes eight. One is enough,
    # but for a trace: copies would wait in it for the events that time them, and overlap nothing.
    if not any(argument.split("=")[0] == "--trace" for argument in arguments):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(argument.endswith(("cpu", "sequential", "--emulate")) for argument in arguments):
        import functools

        from flashcli.gpu.warm_up import warm_up
        from flashcli.run.launchers import devices_wanted

        try:
            warm_up(functools.partial(devices_wanted, arguments, os.environ))
        except RuntimeError:
            """No thread can be started. Whoever needs one will say so."""


def main() -> None:
    import _signal  # what `signal` is made of: it is there at once

    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # for as long as it takes to listen: no traceback
    from flashcli.process import signals

    signals.listen()  # before anything that takes time
    if sys.argv[1:2] and sys.argv[1] in ONE_BLAS_THREAD:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # to start more takes time, and may fail
    if sys.argv[1:2] == ["run"]:
        prepare_run(sys.argv[2:])
    else:
        os.environ.setdefault("FLASHCLI_QUICK", "0")  # what is measured, judged or profiled are full builds
    try:
        from flashcli.cli import main as run_command_line
        from flashcli.process import exits

        exits.watch_libraries()
    except ModuleNotFoundError:
        raise
    except (ImportError, OSError, MemoryError) as error:
        told = f"Error: cannot start: too little memory or too few file handles ({error}).\nHint: see ulimit -a.\n"
        os.write(2, told.encode())
        os._exit(71)
    code = run_command_line()
    # Unloading CUDA and Python piece by piece takes 0.1 s, and the system frees everything anyway. But a launcher may
    # take leaving at once for a crash.
    exits.leave(code, quickly="mpi4py" not in sys.modules)


if __name__ == "__main__":
    main()
