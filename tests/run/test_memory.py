"""How much memory there is, by what the system says of the machine and of groups of processes."""

from __future__ import annotations

import pytest

from flashcli.asked.shape import Shape
from flashcli.errors import OutOfMemory
from flashcli.files.cut import Cut
from flashcli.run import memory
from flashcli.run.slots_cpu import CpuBackend

GIB = 2**30
MACHINE = {"/proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {10 * GIB // 1024} kB\n"}
JOB = "/sys/fs/cgroup/slurm/job_1"
SECOND = {
    "/proc/self/cgroup": "0::/slurm/job_1\n",
    "/sys/fs/cgroup/slurm/memory.max": f"{8 * GIB}\n",
    "/sys/fs/cgroup/slurm/memory.current": f"{6 * GIB}\n",
    "/sys/fs/cgroup/slurm/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
    f"{JOB}/memory.max": "max\n",
    f"{JOB}/memory.current": "1\n",
}
FIRST = {
    "/proc/self/cgroup": "12:cpu:/\n4:memory:/job\n",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
    "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 2**63),
        (MACHINE, 10 * GIB),
        (MACHINE | SECOND, 4 * GIB),
        (MACHINE | SECOND | {f"{JOB}/memory.max": f"{3 * GIB}\n"}, 3 * GIB - 1),
        (MACHINE | FIRST, GIB),
        (MACHINE | FIRST | {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1\n"}, 0),
    ],
    ids=["unknown", "a machine", "groups", "groups in groups", "groups of old", "too much taken"],
)
def test_the_least_of_what_is_free(monkeypatch, files, free):
    monkeypatch.setattr(memory, "_lines", lambda path: files.get(path, "").splitlines(keepends=True))
    assert memory.available() == free


def test_this_machine_says_it():
    assert 2**20 < memory.available() < 2**50


@pytest.mark.parametrize(("B", "what"), [(1, "1 batch"), (3, "2 batches")])
def test_k_and_v_that_do_not_fit_are_refused_before_they_are_made(monkeypatch, B, what):
    shape, least = Shape(B, 10**6, 32), min(B, 2) * 2 * 10**6 * 32 * 4
    monkeypatch.setattr(memory, "available", lambda: least - 1)
    with CpuBackend(threads=1) as backend:
        with pytest.raises(OutOfMemory, match=f"out of memory: K and V of {what} take"):
            backend.slots(shape, Cut(whole=False, batches=1, rows=384), 3)
        monkeypatch.setattr(memory, "available", lambda: least)
        assert len(backend.slots(shape, Cut(whole=False, batches=1, rows=384), 3)[1]) == 3
