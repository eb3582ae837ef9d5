from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from flashcli import as_json, errors, parameters
from flashcli.commands import options
from flashcli.commands.scoreboard import board_option, check_formats, rank_option, write_boards
from flashcli.files.tolerance import TOLERANCE


@click.command()
@click.argument("place", default="testcases", metavar="[DIR|RULES.toml]")
@click.option(
    "--exe", "programs", multiple=True, metavar="PROGRAM",
    help="Judge this program, run as PROGRAM IN OUT, instead of flashcli; or a folder of submissions. May be repeated.",
)  # fmt: skip
@click.option("--build", metavar="COMMAND", help="Make each submission by this, in a copy of its folder.")
@click.option(
    "--case", "names", multiple=True, metavar="NAME", help="Only these, such as t01 or 't[01-10]'; repeatable."
)
@click.option(
    "--time-limit",
    type=parameters.FiniteRange(0, min_open=True),
    help="Seconds a case; the rules' or manifest's by default.",
)
@click.option(
    "--tolerance",
    type=parameters.FiniteRange(0),
    help=f"Allowed |got - want|, absolute plus relative to |want|; the rules' by default, else {TOLERANCE:g}.",
)
@click.option("--runs", type=click.IntRange(1), help="Runs of each case; the median of their times counts.")
@click.option(
    "--seed", type=click.IntRange(0), help="Make the inputs from it; programs of others get a new one each time."
)
@click.option("--results", metavar="FILE", help="Write a line of JSON for each result to FILE, as they come.")
@click.option("--resume", is_flag=True, help="Go on with the judging in the file of --results.")
@rank_option
@board_option
@options.backend_option
@options.kernel_option
@as_json.json_option
def command(
    place: str,
    programs: tuple[str, ...],
    names: tuple[str, ...],
    seed: int | None,
    results: str | None,
    resume: bool,
    boards: tuple[str, ...],
    backend: str,
    kernel: str | None,
    json_path: str | None,
    **overrides: object,
) -> None:
    """Run the test cases of DIR (default: testcases) and check each output. Exit code 1 if any case fails.

    Prints a line a case: name, (B, N, d), wall time of the whole command, verdict; for several programs, a scoreboard
    too. Other people's programs get new inputs each time, a clean environment and limits, but no sandbox: judge only
    what you would run. The README describes RULES.toml.
    """
    _check_platform()
    from flashcli.files.outputs import check_creatable, check_distinct
    from flashcli.judge import sandbox, scoreboard
    from flashcli.judge.judging import Judging
    from flashcli.judge.results import as_line

    if overrides["build"] and not programs:
        raise errors.UsageError("--build is for the programs of --exe, and there are none.", "name them by --exe.")
    check_formats(boards)
    check_distinct(*boards, results)
    as_json.check_apart(json_path, *boards, results)
    for board in boards:
        check_creatable(board)
    rules = _rules(place, overrides, names)
    submissions = _submissions(programs, rules, backend, kernel)
    cases = _cases(rules, by_option=bool(names))
    sandbox.check_launcher(rules.launcher)
    device = sandbox.device_name(rules)
    log, seed, found = _log(results, resume, rules, seed, bool(programs), device)
    done = frozenset((result.submission, result.case) for result in found)
    with _scratch() as scratch, log:
        judging = Judging(rules, scratch, seed, device, _prepare)
        ready = [_built(entry, rules, scratch, cases, done) for entry in submissions]
        for number, result in enumerate(judging.results(cases, ready, done)):
            if number == 0 and not programs:
                _check_usable(result)
            found.append(result)
            if results:
                log.add(as_line(result))
            if json_path != as_json.STDOUT:
                about = number == 0 and not programs
                click.echo(_line(result, len(submissions) > 1 and result.submission, about))
    standings = scoreboard.boards(found, rules.ranking)
    judged = {(entry.name, case.name) for entry in submissions for case in cases}  # not all that was in the file
    asked_for = [result for result in found if (result.submission, result.case) in judged]
    code = _summarise(asked_for, standings, len(submissions) > 1, json_path)
    write_boards(standings, boards)
    raise SystemExit(code)


def _check_platform() -> None:
    if sys.platform != "linux":
        hint = "`flashcli run` and `flashcli compare` work here."
        raise errors.BackendUnavailable("the judge needs Linux, by whose means it watches the programs.", hint)


def _rules(place: str, overrides: dict[str, object], names: tuple[str, ...]):
    """The rules of a file, or the defaults for a folder of cases; what the command line says goes before both."""
    from flashcli.judge import rules

    path = Path(place)
    found = rules.load(path) if path.suffix == ".toml" and not path.is_dir() else rules.Rules(cases=path)
    given = {name: value for name, value in overrides.items() if value is not None}
    per_case = {pattern: {k: v for k, v in table.items() if k not in given} for pattern, table in found.case.items()}
    return replace(found, case=per_case, select=names or found.select, **given)


def _submissions(programs: tuple[str, ...], rules, backend: str, kernel: str | None):
    from flashcli.judge import submissions

    if not programs:
        return [submissions.own_program(backend, kernel)]
    if backend != "auto" or kernel is not None:
        raise errors.UsageError("--backend and --kernel are for flashcli itself, not for --exe.", "leave them out.")
    return submissions.find(programs, rules)


def _cases(rules, by_option: bool):
    from flashcli.files import testcases
    from flashcli.judge.rules import matches, unmatched

    cases = testcases.load(rules.cases)
    names = [case.name for case in cases]
    if unknown := unmatched(rules.select, names):
        kind = errors.UsageError if by_option else errors.BadInput
        raise kind(f"there is no case {', '.join(unknown)} in {str(rules.cases)!r}.", "see its manifest.toml.")
    if unknown := unmatched(rules.case, names):
        raise errors.BadInput(
            f"the rules are for a case {unknown[0]} that {str(rules.cases)!r} lacks.", "correct them."
        )
    return [case for case in cases if not rules.select or any(matches(case.name, one) for one in rules.select)]


def _log(path: str | None, resume: bool, rules, seed: int | None, others: bool, device: str):
    """The open file of results, the seed of the inputs (None: the cases' own), and the results that are in the file."""
    from flashcli.judge import results

    if resume and not path:
        raise errors.UsageError("--resume needs the file to go on with.", "name it by --results.")
    go_on = resume and Path(path).exists()
    conditions, found = results.read(Path(path)) if go_on else ({}, [])
    if seed is None:
        seed = conditions.get("seed") if go_on else secrets.randbelow(2**31) if others else None
    if seed is not None:
        options.notice(f"inputs made from seed {seed}; --seed {seed} makes the same again.")
    if not path:
        return contextlib.nullcontext(), seed, found
    conditions = results.circumstances(rules, seed, device)
    return (results.go_on if go_on else results.create)(Path(path), conditions), seed, found


@contextlib.contextmanager
def _scratch():
    """A folder for everything the judging needs for a while, gone afterwards."""
    from flashcli.judge.sandbox import remove

    folder = Path(tempfile.mkdtemp(prefix="flashcli-judge-"))
    try:
        yield folder
    finally:
        remove(folder)


def _built(entry, rules, scratch: Path, cases: list, done: frozenset):
    from flashcli.judge.submissions import build

    if not rules.build or entry.trusted or all((entry.name, case.name) in done for case in cases):
        return entry
    return build(entry, rules, scratch)


def _prepare(case) -> None:
    with options.progress(case.shape.B, f"generating {case.name}") as bar:
        for count in case.prepare():
            bar.update(count)


def _check_usable(result) -> None:
    """flashcli's own first run: a backend or kernel that cannot be had here is no verdict, and no better next time."""
    for kind in (errors.UsageError, errors.BackendUnavailable):
        if result.detail.startswith(f"exit code {kind.exit_code}: Error: "):
            lines = result.printed.splitlines()
            said = dict(line.split(": ", 1) for line in lines if line.startswith(("Error: ", "Hint: ")))
            raise kind(said["Error"], said.get("Hint", ""))


def _line(result, name: str | bool, about: bool) -> str:
    """One result; ``name`` tells whose, if several are judged; ``about`` adds what flashcli says of its backend."""
    shape = f"({result.B}, {result.N}, {result.d})"
    detail = f": {result.detail}" if result.detail else ""
    whose = f"{name}  " if name else ""
    line = f"{result.case}  {shape:<17}{result.seconds:8.2f} s  {whose}{result.verdict}{detail}"
    said = [text for text in result.printed.splitlines() if text.startswith(("Notice:", "backend:"))] if about else []
    return "\n".join([*said, line])


def _summarise(found: list, standings: list, several: bool, json_path: str | None) -> int:
    """Print it; returns the exit code."""
    from flashcli.judge import scoreboard
    from flashcli.judge.judging import ACCEPTED
    from flashcli.judge.results import record

    accepted = sum(result.verdict == ACCEPTED for result in found)
    summary = {"accepted": accepted, "cases": [record(result) for result in found]}
    seconds = sum(result.seconds for result in found)
    text = f"{accepted} of {len(found)} accepted, {seconds:.2f} s in all"
    if several:
        summary["boards"] = scoreboard.as_record(standings)
        text += f"\n\n{scoreboard.text(standings)}"
    as_json.present(summary, text, json_path)
    return 0 if accepted == len(found) else errors.MISMATCH
