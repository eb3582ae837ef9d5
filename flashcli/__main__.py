"""The entry point: start what takes long, run the command line, and leave quickly."""

from __future__ import annotations

import os
import sys


def main() -> None:
    if sys.argv[1:2] == ["run"]:  # its BLAS has one thread for each of ours: to start more takes time
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The driver and a context take 0.2 s of somebody else's time: begin before even click is imported.
    if sys.argv[1:2] == ["run"] and not any(arg.endswith(("cpu", "sequential")) for arg in sys.argv):
        from flashcli.backends.warm_up import warm_up

        warm_up(sys.argv[2:])
    from flashcli.cli import main as run_command_line

    code = run_command_line()
    if "mpi4py" in sys.modules:
        sys.exit(code)  # a launcher may take leaving at once for a crash
    os._exit(code)  # unloading CUDA and Python piece by piece takes 0.1 s, and the system frees everything anyway


if __name__ == "__main__":
    main()
