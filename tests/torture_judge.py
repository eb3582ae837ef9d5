"""Judgings that are killed at random, and gone on with by --resume. `make torture` prints a summary.

However often that happens, nothing that the judge has started runs on, the file of results can be read, and in the end
it has each result once, with the verdict that it would have had; and no folder of the judge's is left.
"""

from __future__ import annotations

import collections
import json
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import torturing
from support import command, environment, script

NUMBERS = [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
CASES = "".join(f"[c{number}]\nshape = [1, {8 * number}, 4]\nseed = 1\n" for number in (1, 2, 3))
SUBMISSIONS = {
    "fails": ("exit 3", "runtime error"),
    "hangs": ("trap '' TERM; sleep 60 & sleep 60", "time limit exceeded"),
    "leaves": ("for i in 1 2 3; do (setsid sleep 60 &) & done", "no output"),
    "stops": ("kill -STOP $$", "time limit exceeded"),
    "late": ('(sleep 0.2; cp "$1" "$2") & exit 0', "no output"),
    "links": ('ln -f "$(readlink "$1")" "$2"', "runtime error"),
    "zeros": ('n=$(($(stat -Lc %s "$1") / 3 - 4)); head -c $n /dev/zero > "$2"', "wrong answer"),
}
MOST = 8  # times that a judging is hurt


class Torture(torturing.Tally):
    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.folder, self.random = folder, random.Random(seed)
        (folder / "cases").mkdir()
        (folder / "cases" / "manifest.toml").write_text(CASES)
        (folder / "course").mkdir()
        for name, (text, _) in SUBMISSIONS.items():
            (folder / "course" / name).mkdir()
            script(folder / "course" / name / "source", f"#!/bin/sh\n{text}\n")
        (folder / "rules.toml").write_text(
            'cases = "cases"\nbuild = "sleep 0.05; cp source hw4"\ntime_limit = 0.3\ngrace = 0.1\n'
        )
        start = time.monotonic()
        self.once(folder / "first.jsonl", [], None)
        self.seconds = time.monotonic() - start

    def judging(self, number: int) -> None:
        """A judging from its beginning to its end, with what happens to it on the way."""
        results = self.folder / f"{number}.jsonl"
        for _ in range(MOST):
            hurt = self.random.choice(NUMBERS), self.random.uniform(0, 1.1 * self.seconds)
            resume = ["--resume"] if results.exists() and results.stat().st_size else []
            if self.once(results, resume, hurt) == 1:
                break
        else:
            self.once(results, ["--resume"], None)
        found = [json.loads(line) for line in results.read_text().splitlines()[1:]]
        verdicts = collections.Counter((line["submission"], line["case"], line["verdict"]) for line in found)
        cases = (f"c{case}" for case in (1, 2, 3))
        wanted = collections.Counter((name, case, SUBMISSIONS[name][1]) for case in cases for name in SUBMISSIONS)
        if verdicts != wanted:
            self.wrong.append(f"{results.name}: {sorted((verdicts - wanted) + (wanted - verdicts))}")
        if left := sorted(path.name for path in self.folder.glob("*flashcli-judging-*")):
            self.wrong.append(f"{results.name}: left {left}")

    def once(self, results: Path, resume: list[str], hurt: tuple[signal.Signals, float] | None) -> int:
        """Run the judge; its exit code."""
        words = command(
            "judge", self.folder / "rules.toml", "--exe", self.folder / "course", "--results", results, *resume
        )
        with subprocess.Popen(
            words, env=environment(TMPDIR=str(self.folder)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as judge:  # fmt: skip
            if hurt:
                time.sleep(hurt[1])
                judge.send_signal(hurt[0])
            said = judge.communicate(timeout=120)[1].decode()
        what = hurt[0].name if hurt else "nothing"
        self.outcomes[f"{what}: exit code {judge.returncode}"] += 1
        if judge.returncode not in (1, *((-hurt[0], 128 + hurt[0]) if hurt else ())):
            self.wrong.append(f"{what} after {hurt and hurt[1]} s: exit code {judge.returncode}: {said[-300:]}")
        if "Traceback" in said and "flashcli/" in said:
            self.wrong.append(f"{what} after {hurt and hurt[1]} s: {said[-300:]}")
        deadline = time.monotonic() + 10
        while (left := self.running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if left:
            self.wrong.append(f"{what} after {hurt and hurt[1]} s: {left} run on")
        return judge.returncode

    def running(self) -> list[str]:
        """The programs that run for this judge, whose folders are their HOME."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"HOME={self.folder}/".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
            except OSError:
                continue
        return found


def main(judgings: int, seed: int) -> Torture:
    print(f"{judgings} judgings, killed or interrupted, and gone on with:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Path(folder), seed)
        for number in range(judgings):
            torture.judging(number)
    return torture


if __name__ == "__main__":
    torturing.end(main, __doc__, judgings=40)
