"""Checks that all ranks were asked for one thing; otherwise each would do its share of another."""

from __future__ import annotations

from flashcli.errors import BackendUnavailable, BadInput, UsageError
from flashcli.files.fileformat import InputFile
from flashcli.run.ranks import Alone
from flashcli.run.request import Request


def agree_on_order(ranks: Alone, source: InputFile, output_path: str, request: Request) -> None:
    """Check that every rank reads rank 0's input, with rank 0's options, as far as they decide the answer."""
    if ranks.size == 1:
        return
    options = {
        "OUT": output_path, "--causal": request.causal, "--scale": request.scale, "--kernel": request.kernel,
        "--precision": request.precision,
    }  # fmt: skip
    firsts, shape, fingerprint = ranks.share((options, source.shape, source.fingerprint()))
    for name, value in options.items():
        if value != firsts[name]:
            raise UsageError(
                f"rank 0 was given {_spelled(name, firsts[name])}, rank {ranks.rank} {_spelled(name, value)}.",
                "start all tasks with the same command line.",
            )
    hint = "is it on a file system that all nodes share?"
    if source.shape != shape:
        raise BadInput(
            f"{source.path!r} has (B, N, d) = {source.shape} on rank {ranks.rank}, and {shape} on rank 0.", hint
        )
    if source.fingerprint() != fingerprint:
        raise BadInput(f"{source.path!r} holds other values on rank {ranks.rank} than on rank 0.", hint)


def agree_on_backend(ranks: Alone, details: dict[str, object]) -> None:
    """Check that no rank alone falls back to the CPU, or to another kernel: that would be slow, and give other bits."""
    own = {"backend": details["backend"], "kernel": details.get("kernel")}
    first = ranks.share(own)
    for what, hint in {
        "backend": "have a GPU for every process, or --backend cpu.",
        "kernel": "name a --kernel that all of the GPUs have.",
    }.items():
        if first[what] != own[what]:
            raise BackendUnavailable(
                f"rank 0 computes with {what} {first[what]}, rank {ranks.rank} could only with {own[what]}.", hint
            )


def _spelled(name: str, value: object) -> str:
    if value is None or value is False:
        return f"no {name}"
    return name if value is True else f"{name} {value}"
