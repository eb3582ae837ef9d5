"""GPT-2 goes on with a text, in fp32, on flashcli's attention and its cache in pages.

``python -m bench.gpt2 [--weights FOLDER] "Hello, I'm a language model,"``: with PyTorch on a GPU where there are both,
else with NumPy alone.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import numpy as np

from bench import scripts
from bench.gpt2 import tokens as tokenizing
from bench.gpt2.cache import Pages, new_pages
from bench.gpt2.library import Library, OfNumPy, OfPyTorch
from bench.gpt2.model import GPT2
from bench.gpt2.tokens import PROMPT, Tokenizer
from bench.gpt2.weights import Config, Weights, load, random_weights
from flashcli.cpu.workers import one_blas_thread
from flashcli.errors import BadInput, UsageError, explained
from flashcli.measure import peers

Choose = Callable[[np.ndarray], np.ndarray]  # of logits [B, vocabulary] the next tokens [B]


def generate(model: GPT2, prompts: Sequence[Sequence[int]], count: int, choose: Choose) -> Iterator[np.ndarray]:
    """For each of ``count`` steps the next token of each sequence, [B]; prompts may differ in length."""
    lengths = np.array([len(prompt) for prompt in prompts])
    cache = new_pages(model.config, len(prompts), int(lengths.max()) + count, model.library)

    def logits(tokens: np.ndarray, positions: np.ndarray, cache: Pages) -> np.ndarray:
        put, take = model.library.put, model.library.take
        return take(model.logits(put(tokens), put(positions), cache))

    found = [logits(np.array([x]), np.arange(len(x))[None], cache.of(b)) for b, x in enumerate(prompts)]
    tokens = choose(np.concatenate(found))
    yield tokens
    for step in range(count - 1):
        tokens = choose(logits(tokens[:, None], (lengths + step)[:, None], cache))
        yield tokens


def chooser(temperature: float, seed: int) -> Choose:
    """A function that draws a token with probability softmax(logits / temperature); the most likely one for 0."""
    random = np.random.default_rng(seed)
    return lambda logits: np.argmax(logits + temperature * random.gumbel(size=logits.shape), axis=-1)


def tell(prompts: Sequence[str], steps: Iterator[np.ndarray], tokenizer: Tokenizer, say: Callable[[str], None]) -> int:
    """Say one text as it grows, or several one below the other at the end; returns how many tokens were new.

    A text ends before the token that ends texts. A character is said when all of its bytes are there.
    """
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    texts, ended, count = list(prompts), np.zeros(len(prompts), bool), 0
    one = len(prompts) == 1
    if one:
        say(prompts[0])

    def go_on(b: int, more: bytes, final: bool = False) -> None:
        new = decoders[b].decode(more, final)
        texts[b] += new
        if one:
            say(new)

    for tokens in steps:
        ended |= tokens == tokenizer.end
        if ended.all():
            break
        for b in np.flatnonzero(~ended).tolist():
            go_on(b, tokenizer.bytes_of(int(tokens[b])))
            count += 1
    for b in range(len(prompts)):
        go_on(b, b"", final=True)
    say("\n" if one else "\n\n".join(texts) + "\n")
    return count


def chosen_library(backend: str) -> Library:
    """The library that computes: PyTorch on a GPU, or NumPy."""
    if backend == "cpu" or (backend == "auto" and not peers.reach_gpu()):
        return OfNumPy()
    peers.check_installed("torch", gpu=True)
    import torch

    torch.set_float32_matmul_precision("highest")  # no TF32
    return OfPyTorch("cuda")


def opened(path: Path | None, seed: int) -> tuple[Config, Weights, Tokenizer]:
    """A model and its tokenizer from a file or folder; without one a random model of GPT-2 small's size, for bytes."""
    if path is None:
        tokenizer = tokenizing.of_bytes()
        config = Config(vocabulary=257)
        return config, random_weights(config, seed), tokenizer
    with explained("read", path):
        path.stat()
    tokenizer, (config, weights) = tokenizing.load(path if path.is_dir() else path.parent), load(path)
    if tokenizer.size > config.vocabulary:
        told = f"{str(path)!r} has a model of {config.vocabulary} tokens, and a tokenizer of {tokenizer.size}."
        raise BadInput(told, "take the files of one model.")
    return config, weights, tokenizer


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--weights", "path", metavar="PATH", type=click.Path(path_type=Path),
    help="Take a GPT-2 as Hugging Face has it: a folder, or a .safetensors file with its tokenizer beside it.",
)  # fmt: skip
@click.option("--tokens", "count", type=click.IntRange(1), default=100, show_default=True, help="Write so many.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
    help="Draw tokens, the more freely the higher it is; 0 takes the most likely.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Draw tokens, and weights, by this.")
@click.option(
    "--backend", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
    help="Compute with PyTorch on a GPU, or with NumPy.",
)  # fmt: skip
def main(prompts: tuple[str, ...], path: Path | None, count: int, temperature: float, seed: int, backend: str) -> None:
    """Go on with each PROMPT, by default "Hello, I'm a language model,". A single text is shown as it is written."""
    if not math.isfinite(temperature):
        raise UsageError(f"--temperature is {temperature}, not a finite number.", "0.8 is a usual one.")
    library = chosen_library(backend)
    config, weights, tokenizer = opened(path, seed)
    if path is None:
        click.echo("Notice: without --weights the model is random numbers, and its text noise.", err=True)
    texts = prompts or (PROMPT,)
    given = [tokenizer.encode(text) for text in texts]
    if not all(given):
        raise UsageError("a PROMPT is empty.", "say at least one word.")
    if (longest := max(map(len, given)) + count) > config.context:
        raise UsageError(
            f"the prompt's tokens and --tokens are {longest}, more than the {config.context} that the model has places "
            "for.", "ask for less.",
        )  # fmt: skip
    model = GPT2(config, {name: library.put(weight) for name, weight in weights.items()}, library)
    start = time.perf_counter()
    steps = generate(model, given, count, chooser(temperature, seed))
    with one_blas_thread():  # as `decode` gives it: to change that for each layer takes longer than more threads save
        written = tell(texts, steps, tokenizer, lambda text: click.echo(text, nl=False))
    seconds = time.perf_counter() - start
    click.echo(f"{written} tokens in {seconds:.2f} s, {written / seconds:.0f} a second", err=True)


if __name__ == "__main__":
    scripts.run(main)
