"""Times of GPT-2 that generates in fp32, token by token, with attention by PyTorch and by each of our kernels.

``python -m bench.gpt2.times [--tokens 512] [--batch 1] [--weights PATH] [--json FILE] [--plot FILE]``: greedily, once
with all tokens computed again for each next one, and once with a cache of keys and values. Without weights they are
seeded random numbers: the work is the same. Needs PyTorch; ``--backend cpu`` tries it without a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from bench import scripts
from bench.gpt2.cache import Cache, Dense, new_pages
from bench.gpt2.library import OfPyTorch
from bench.gpt2.model import GPT2
from bench.gpt2.weights import Config, Weights, load, random_weights
from bench.rows import Generated
from flashcli.asked.shape import Shape
from flashcli.errors import FlashError, UsageError
from flashcli.files.outputs import check_distinct
from flashcli.measure import machine, peers, plots
from flashcli.measure.rows import Failure, Row, Skipped, over_all
from flashcli.terminal import as_json

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpt2.contenders import Contender
    from bench.gpt2.generation import Generation

MARKS = (32, 64, 128, 256, 512)  # tokens at which the clock is read
CASES = {"no cache": False, "KV cache": True}
PROMPT = (15496, 11, 314, 1101, 257, 3303, 2746, 11)  # "Hello, I'm a language model,"


def prompts_of(batch: int, vocabulary: int) -> np.ndarray:
    """The prompt, and others of the same length, [B, 8]."""
    return (np.array([PROMPT]) + np.arange(batch)[:, None]) % vocabulary


def measure(
    config: Config, weights: Weights, found: dict[str, Contender], batch: int, tokens: int, runs: int
) -> Iterator[Row]:
    """A row for each contender, without a cache and with one; weights are PyTorch's tensors on a device."""
    library = OfPyTorch(weights["wte.weight"].device)
    prompts = library.put(prompts_of(batch, config.vocabulary))
    right: list[list[int]] = []
    for (case, cached), (name, contender) in itertools.product(CASES.items(), found.items()):
        if cached or not contender.pages:
            about = vars(Row.about(case, Shape(batch, tokens, config.head), name, True))
            model = GPT2(config, weights, library, contender.attend)
            generation = functools.partial(_generation, model, contender, prompts, tokens, cached)
            try:
                with contender.within():
                    first, peak = _with_memory(prompts, generation)
                    timed = [generation() for _ in range(runs)]
            except FlashError as error:
                yield Skipped(**about, skipped=str(error))
                continue
            except RuntimeError as error:  # PyTorch's
                yield Failure(**about, error=str(error).splitlines()[0])
                continue
            right = right or first.tokens
            yield Generated(**about, **_times(timed), peak_mib=peak, **_difference(model, prompts, right, first.tokens))


def _generation(model: GPT2, contender: Contender, prompts: Tensor, tokens: int, cached: bool) -> Generation:
    import torch

    from bench.gpt2.generation import generate

    batch, config = len(prompts), model.config
    marks = {*(mark for mark in MARKS if mark < tokens), tokens}
    with torch.inference_mode():
        cache: Cache | None = None
        if contender.pages:
            cache = new_pages(config, batch, prompts.shape[1] + tokens + 1, model.library, contender.pages)
        elif cached:
            cache = Dense(config, batch, model.library, contender.attend)
        return generate(model, prompts, tokens, cache, marks, contender.replayed)


def _with_memory(prompts: Tensor, generation: Callable[[], Generation]) -> tuple[Generation, float | None]:
    """A generation that warms up, and the most memory, in MiB, that it had on a GPU beside what was there before."""
    import torch

    if not prompts.is_cuda:
        return generation(), None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    done = generation()
    return done, (torch.cuda.max_memory_allocated() - before) / 2**20


def _times(timed: list[Generation]) -> dict[str, Any]:
    """The fields of a row that tell of several runs."""
    totals = [max(run.reached.values()) for run in timed]
    middle = sorted(timed, key=lambda run: max(run.reached.values()))[(len(timed) - 1) // 2]
    return over_all(totals) | {"reached": {str(count): seconds for count, seconds in middle.reached.items()}}


def _difference(model: GPT2, prompts: Tensor, right: list[list[int]], got: list[list[int]]) -> dict[str, Any]:
    """Where other tokens begin than the right ones, and how much better the right one is there, by a float64 model."""
    if got == right:
        return {}
    differing = np.argwhere(np.array(got).T != np.array(right).T)  # the first token, of any sequence, is first
    at, sequence = differing[0].tolist()
    logits = _logits_in_float64(model, [*prompts[sequence].tolist(), *right[sequence][:at]])
    return {"differs_at": at, "gap": float(logits[right[sequence][at]] - logits[got[sequence][at]])}


def _logits_in_float64(model: GPT2, before: list[int]) -> Tensor:
    import torch

    from bench.gpt2.contenders import naive

    weights = {name: tensor.double() for name, tensor in model.weights.items()}
    given, positions = (model.library.put(np.array([x])) for x in (before, range(len(before))))
    with torch.inference_mode():
        return GPT2(model.config, weights, model.library, naive).logits(given, positions)[0]


@click.command()
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Generate so many.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="So many sequences at a time.")
@click.option(
    "--weights", "path", metavar="PATH", type=click.Path(path_type=Path),
    help="Take a GPT-2 from a .safetensors file of Hugging Face's, or a folder with one.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Else make the weights from this.")
@click.option(
    "--runs", type=click.IntRange(1), default=1, show_default=True, help="Timed runs of each, after a warm-up."
)
@click.option("--attention", "names", multiple=True, metavar="NAME", help="This one beside naive's; all by default.")
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw the seconds over the tokens to FILE, .png, .svg or .pdf.")
@as_json.json_option
def main(
    tokens: int, batch: int, path: Path | None, seed: int, runs: int, names: tuple[str, ...], backend: str,
    plot: str | None, json_path: str | None,
) -> None:  # fmt: skip
    """Generate tokens with GPT-2 in fp32 by each attention, and print what it took and whether they are the same."""
    peers.check_installed("torch", gpu=backend == "cuda")
    if plot:
        plots.check_picture(plot)
        check_distinct(plot, None if json_path == as_json.PRINT else json_path)
    import torch

    from bench.gpt2.contenders import NAIVE, contenders

    torch.set_float32_matmul_precision("highest")  # no TF32
    config = Config()
    config, weights = load(path) if path else (config, random_weights(config, seed))
    if tokens + len(PROMPT) > config.context:
        raise UsageError(
            f"--tokens {tokens} and a prompt of {len(PROMPT)} are more than the {config.context} that the model has "
            "positions for.", "ask for less.",
        )  # fmt: skip
    found = contenders(backend)
    if unknown := {*names} - {*found}:
        raise UsageError(f"there is no --attention {min(unknown)}.", f"choose from {', '.join(found)}.")
    chosen = {name: one for name, one in found.items() if name in (NAIVE, *names) or not names}
    library = OfPyTorch(backend)
    weights = {name: library.put(weight) for name, weight in weights.items()}
    measured = measure(config, weights, chosen, batch, tokens, runs)
    rows = scripts.told(measured, lambda row: f"{row.case}, {row.contender} done")
    record = scripts.publish("gpt2", machine.pytorchs_circumstances(backend), rows, json_path, module="gpt2.times")
    if plot:
        from bench.gpt2.plot import draw_generation

        draw_generation(record, plot)


if __name__ == "__main__":
    scripts.run(main)
