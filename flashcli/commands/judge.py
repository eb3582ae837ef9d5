from __future__ import annotations

import contextlib
import os
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashcli import errors
from flashcli.commands import options
from flashcli.commands.scoreboard import (
    board_option,
    check_formats,
    feedback_option,
    rank_option,
    write_boards,
)
from flashcli.commands.status_line import StatusLine
from flashcli.files.tolerance import TOLERANCE
from flashcli.terminal import as_json, parameters

if TYPE_CHECKING:
    from flashcli.files.testcases import Case
    from flashcli.judge.judging import Judging, Result
    from flashcli.judge.results import Log
    from flashcli.judge.rules import Rules
    from flashcli.judge.sandbox import Machine
    from flashcli.judge.scoreboard import Board
    from flashcli.judge.submissions import Submission

WIDEST = 30  # columns of a submission's name, behind which verdicts stand below one another
EXAMPLES = options.examples(
    "flashcli judge testcases",
    "flashcli judge testcases --exe ./hw4 --case 't[01-10]'",
    "flashcli judge rules.toml --exe submissions --build make --board board.html",
)


@click.command(epilog=EXAMPLES)
@click.argument("place", default="testcases", metavar="[DIR|RULES.toml]")
@click.option(
    "--exe", "programs", multiple=True, metavar="[NAME=]PATH",
    help="Judge this program, run as PROGRAM IN OUT, instead of flashcli; or a submission's folder, or a folder of "
    "submissions. May be repeated.",
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
    "--give-up", type=click.IntRange(1), metavar="N", help="Run no more cases of what has exceeded N time limits."
)
@click.option(
    "--tolerance",
    type=parameters.FiniteRange(0),
    help=f"Allowed |got - want|, absolute plus relative to |want|; the rules' by default, else {TOLERANCE:g}.",
)
@click.option("--runs", type=click.IntRange(1), help="Runs of each case; the median of their times counts.")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, metavar="N",
    help="Run N submissions at a time, where no GPU is shared; their times are then less exact.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), help="Make the inputs from it; programs of others get a new one each time."
)
@click.option("--results", metavar="FILE", help="Write a line of JSON for each result to FILE, as they come.")
@click.option("--resume", is_flag=True, help="Go on with the judging in the file of --results.")
@rank_option
@board_option
@feedback_option
@options.backend_option
@options.kernel_option
@as_json.json_option
def command(
    place: str,
    programs: tuple[str, ...],
    names: tuple[str, ...],
    jobs: int,
    seed: int | None,
    results: str | None,
    resume: bool,
    boards: tuple[str, ...],
    feedback: str | None,
    backend: str,
    kernel: str | None,
    json_path: str | None,
    **overrides: Any,
) -> None:
    """Run the test cases of DIR (default: testcases) and check each output. Exit code 1 if any case fails.

    Prints a line a case: name, (B, N, d), wall time of the whole command, verdict; for several programs, a scoreboard
    too. Other people's programs get new inputs each time, a clean environment and limits; without a sandbox, judge only
    what you would run. docs/judging.md describes RULES.toml.
    """
    _check_platform()
    from flashcli.files.outputs import check_creatable, check_distinct
    from flashcli.judge import containment, pseudonyms, scoreboard
    from flashcli.judge.feedback import prepare as prepare_feedback
    from flashcli.judge.feedback import write as write_feedback
    from flashcli.judge.judging import Judging
    from flashcli.judge.results import Log
    from flashcli.judge.sandbox import find_machine
    from flashcli.judge.scratch import Scratch
    from flashcli.judge.supervision import Supervision

    if overrides["build"] and not programs:
        raise errors.UsageError("--build is for the programs of --exe, and there are none.", "name programs by --exe.")
    if resume and not results:
        raise errors.UsageError("--resume needs the file to go on with.", "name the file by --results.")
    check_formats(boards)
    check_distinct(*boards, results)
    as_json.check_apart(json_path, *boards, results)
    for board in boards:
        check_creatable(board)
    prepare_feedback(feedback)
    containment.hide()  # the right answers, and the choice of rows that are checked
    rules = _rules(place, overrides, names)
    submissions = _submissions(programs, rules, backend, kernel)
    cases = _cases(rules, by_option=bool(names))
    with Scratch() as scratch, Supervision() as supervision:
        machine = find_machine(
            supervision, rules if programs else replace(rules, sandbox=""), scratch.new_folder("try")
        )
        _check_jobs(jobs, machine, rules)
        with Log(Path(results), resume) if results else contextlib.nullcontext() as log:
            seed, conditions, found = _begun(log, rules, seed, cases, machine, bool(programs))
            judging = Judging(rules, scratch, supervision, seed, machine.device, jobs)
            _run(judging, cases, submissions, found, log, quiet=json_path == as_json.PRINT)
    standings = scoreboard.boards(found, rules.ranking, [conditions])
    judged = {(entry.name, case.name) for entry in submissions for case in cases}  # not all that was in the file
    asked_for = [result for result in found if (result.submission, result.case) in judged]
    code = _summarise(asked_for, standings, len(submissions), json_path)
    write_boards(standings, boards)
    write_feedback(feedback, standings, pseudonyms.key_of([conditions] if results else []))
    raise SystemExit(code)


def _check_platform() -> None:
    if sys.platform != "linux":
        hint = "`flashcli run` and `flashcli compare` work here."
        raise errors.BackendUnavailable("the judge needs Linux, by whose means it watches the programs.", hint)


def _rules(place: str, overrides: dict[str, Any], names: tuple[str, ...]) -> Rules:
    """The rules of a file, or the defaults for a folder of cases; what the command line says goes before both."""
    from flashcli.judge import rules

    path = Path(place)
    found = rules.load(path) if path.suffix == ".toml" and not path.is_dir() else rules.Rules(cases=path)
    given = {name: value for name, value in overrides.items() if value is not None}
    per_case = {pattern: {k: v for k, v in table.items() if k not in given} for pattern, table in found.case.items()}
    return replace(found, case=per_case, select=names or found.select, **given)


def _submissions(programs: tuple[str, ...], rules: Rules, backend: str, kernel: str | None) -> list[Submission]:
    from flashcli.judge import submissions

    if not programs:
        return [submissions.own_program(backend, kernel)]
    if backend != "auto" or kernel is not None:
        raise errors.UsageError(
            "--backend and --kernel are for flashcli itself, not for --exe.",
            "leave out --backend and --kernel, or --exe.",
        )
    return submissions.find(programs, rules)


def _cases(rules: Rules, by_option: bool) -> list[Case]:
    from flashcli.files import testcases
    from flashcli.judge.rules import matches, unmatched

    cases = testcases.load(rules.cases)
    names = [case.name for case in cases]
    if unknown := unmatched(rules.select, names):
        kind: type[errors.FlashError] = errors.UsageError if by_option else errors.BadInput
        raise kind(f"there is no case {', '.join(unknown)} in {str(rules.cases)!r}.", "see its manifest.toml.")
    if unknown := unmatched(rules.case, names):
        raise errors.BadInput(
            f"the rules are for a case {unknown[0]} that {str(rules.cases)!r} lacks.", "correct them."
        )
    chosen = [case for case in cases if not rules.select or any(matches(case.name, one) for one in rules.select)]
    if rules.inputs == "each" and (given := next((case for case in chosen if case.seed is None), None)):
        hint = 'leave out inputs = "each", or give it a seed in a manifest.'
        raise errors.BadInput(f"{given.name} is a file as it is: submissions cannot have different inputs.", hint)
    return chosen


def _check_jobs(jobs: int, machine: Machine, rules: Rules) -> None:
    if jobs > 1 and machine.is_gpu and not rules.launcher:
        hint = "leave out --jobs; or have a launcher give each program a GPU of its own."
        raise errors.UsageError(f"{jobs} programs at a time would share the GPU, and spoil each other's times.", hint)


def _begun(
    log: Log | None, rules: Rules, seed: int | None, cases: list[Case], machine: Machine, others: bool
) -> tuple[int | None, dict[str, Any], list[Result]]:
    """The seed of the inputs (None: the cases' own), the circumstances, and the results that there are already."""
    from flashcli.judge import results

    if seed is None:
        seed = log.conditions.get("seed") if log and log.conditions else secrets.randbelow(2**31) if others else None
    conditions = results.circumstances(rules, seed, machine.device, machine.containment)
    if log:
        log.begin(conditions)
        conditions = log.conditions
    if seed is not None and any(case.seed is not None for case in cases):
        options.notice(f"inputs made from seed {seed}; --seed {seed} makes the same again.")
    return seed, conditions, log.results if log else []


def _run(
    judging: Judging,
    cases: list[Case],
    submissions: list[Submission],
    found: list[Result],
    log: Log | None,
    quiet: bool,
) -> None:
    """Judge what is missing in ``found``, and tell of it as it comes."""
    from flashcli.judge.results import as_line

    own, width = submissions[0].trusted, max(len(entry.name) for entry in submissions) if len(submissions) > 1 else 0
    done = {(result.submission, result.case) for result in found}
    missing = sum((entry.name, case.name) not in done for entry in submissions for case in cases)
    with StatusLine(missing) as status:
        judging.tell = status.tell
        for number, result in enumerate(judging.results(cases, submissions, list(found))):
            if number == 0 and own:
                _check_usable(result)
            found.append(result)
            if log:
                log.add(as_line(result))
            status.done(None if quiet else _line(result, min(width, WIDEST), about=number == 0 and own))


def _check_usable(result: Result) -> None:
    """flashcli's own first run: a backend or kernel that cannot be had here is no verdict, and no better next time."""
    if result.returncode in (errors.UsageError.exit_code, errors.BackendUnavailable.exit_code):
        click.echo(result.printed, err=True)  # it has said why
        raise SystemExit(result.returncode)


def _line(result: Result, width: int, about: bool) -> str:
    """One result, with the submission's name in so many columns if any; ``about`` adds what flashcli says of itself."""
    from flashcli.judge.judging import ACCEPTED

    shape = f"({result.B}, {result.N}, {result.d})"
    seconds = f"{'-':>8}  " if result.seconds is None else f"{result.seconds:8.2f} s"
    verdict = _coloured(result.verdict, "green" if result.verdict == ACCEPTED else "red")
    detail = f": {result.detail}" if result.detail else ""
    whose = f"{result.submission:<{width}}  " if width else ""
    line = f"{result.case}  {shape:<17}{seconds}  {whose}{verdict}{detail}"
    said = [text for text in result.printed.splitlines() if text.startswith(("Notice:", "backend:"))] if about else []
    return "\n".join([*said, line])


def _coloured(text: str, colour: str) -> str:
    """Colour a text, unless NO_COLOR is set (see no-color.org); click.echo drops colours outside a terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour)


def _summarise(found: list[Result], standings: list[Board], submissions: int, json_path: str | None) -> int:
    """Print what came of so many submissions; returns the exit code."""
    from flashcli.judge import views
    from flashcli.judge.judging import ACCEPTED
    from flashcli.judge.results import record

    accepted = sum(result.verdict == ACCEPTED for result in found)
    summary: dict[str, Any] = {"accepted": accepted, "cases": [record(result) for result in found]}
    seconds = sum(result.seconds or 0.0 for result in found)
    text = f"{accepted} of {len(found)} accepted, {seconds:.2f} s in all"
    if submissions > 1:
        summary["boards"] = views.as_record(standings)
        failed = {result.submission for result in found if result.verdict != ACCEPTED}
        text = (
            f"{submissions - len(failed)} of {submissions} submissions have all cases accepted, {seconds:.2f} s in all"
        )
        text += f"\n\n{views.text(standings)}"
    as_json.present(summary, text, json_path)
    return 0 if accepted == len(found) else errors.MISMATCH
