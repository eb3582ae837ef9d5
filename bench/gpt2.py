"""GPT-2 generates text in fp32, token by token, with attention by PyTorch and by each of our kernels.

``python -m bench.gpt2 [--tokens 512] [--weights FILE.safetensors] [--json FILE] [--plot FILE]``: greedily,
once with all tokens computed again for each next one, and once with a cache of keys and values. Without weights they
are seeded random numbers: the work is the same. Needs PyTorch; ``--backend cpu`` tries it without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from bench import scripts
from bench.rows import Generated
from flashcli.asked.shape import Shape
from flashcli.errors import BadInput, FlashError, UsageError, explained
from flashcli.files.outputs import check_distinct
from flashcli.kernels.attention import KERNELS
from flashcli.measure import machine, peers, plots
from flashcli.measure.rows import Failure, Row, Skipped, over_all
from flashcli.terminal import as_json

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpt2_model import GPT2, Attend, Generation

Weights = dict[str, Any]
MARKS = (32, 64, 128, 256, 512)  # tokens at which the clock is read
NAIVE = "naive"
CASES = {"no cache": False, "KV cache": True}


class Contender(NamedTuple):
    """An attention, and what has to be entered for it to be that one.

    With ``pages``, the type of the numbers in it, there is a cache in pages; it may be ``replayed`` in a CUDA graph.
    """

    attend: Attend
    within: Callable[[], Any] = contextlib.nullcontext
    pages: str = ""
    replayed: bool = False


def contenders(backend: str) -> dict[str, Contender]:
    """The first is the one that the others' tokens are compared with."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from bench import gpt2_model as model

    found = {NAIVE: Contender(model.naive)}
    if backend == "cpu":
        found |= {"PyTorch SDPA": Contender(model.pytorchs), "flashcli": Contender(model.ours(None))}
        return found | {"paged": Contender(model.ours(None), pages="float32")}
    ways = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, way in ways.items():
        found[f"PyTorch {name}"] = Contender(model.pytorchs, functools.partial(sdpa_kernel, way))
    kernels = [None, *(name for name, kernel in KERNELS.items() if kernel.strided)]
    found |= {name or "flashcli": Contender(model.ours(name)) for name in kernels}
    return found | {
        "paged": Contender(model.ours(None), pages="float32"),
        "paged fp16": Contender(model.ours(None), pages="float16"),
        "paged, graph": Contender(model.ours(None), pages="float32", replayed=True),
        "paged fp16, graph": Contender(model.ours(None), pages="float16", replayed=True),
    }


def load(path: str) -> Weights:
    """Weights in float32 from a file of Hugging Face's; those that only another task has are left out."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from bench.gpt2_model import shapes, sized

    with explained("read", path), open(path, "rb"):
        pass
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise BadInput(
            f"{path!r} is not a .safetensors file.", "huggingface.co/openai-community/gpt2 has one."
        ) from error
    weights = {name.removeprefix("transformer."): tensor.float() for name, tensor in found.items()}
    return {name: weights[name].contiguous() for name in shapes(sized(weights))}


def measure(weights: Weights, found: dict[str, Contender], tokens: int, runs: int) -> Iterator[Row]:
    """A row for each contender, without a cache and with one; all on the device where the weights are."""
    import torch

    from bench.gpt2_model import GPT2

    right: list[int] = []
    for (case, cached), (name, contender) in itertools.product(CASES.items(), found.items()):
        if cached or not contender.pages:
            about = vars(Row.about(case, Shape(1, tokens, 64), name, True))
            model = GPT2(weights, contender.attend, getattr(torch, contender.pages) if contender.pages else None)
            generation = functools.partial(_generation, model, tokens, cached, contender.replayed)
            try:
                with contender.within():
                    first, peak = _with_memory(model, generation)
                    timed = [generation() for _ in range(runs)]
            except FlashError as error:
                yield Skipped(**about, skipped=str(error))
                continue
            except RuntimeError as error:  # PyTorch's
                yield Failure(**about, error=str(error).splitlines()[0])
                continue
            right = right or first.tokens
            yield Generated(**about, **_times(timed), peak_mib=peak, **_difference(weights, right, first.tokens))


def _generation(model: GPT2, tokens: int, cached: bool, replayed: bool) -> Generation:
    import torch

    from bench.gpt2_model import generate

    marks = {*(mark for mark in MARKS if mark < tokens), tokens}
    with torch.inference_mode():
        return generate(model, model.config.vocabulary - 1, tokens, cached, marks, replayed)


def _with_memory(model: GPT2, generation: Callable[[], Generation]) -> tuple[Generation, float | None]:
    """A generation that warms up, and the most memory, in MiB, that it had on a GPU beside what was there before."""
    import torch

    if not model.weights["wte.weight"].is_cuda:
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


def _difference(weights: Weights, right: list[int], got: list[int]) -> dict[str, Any]:
    """Where other tokens begin than the right ones, and how much better the right one is there, by a float64 model."""
    if got == right:
        return {}
    at = next(index for index, (a, b) in enumerate(zip(got, right, strict=True)) if a != b)
    logits = _logits_in_float64(weights, right[:at])
    return {"differs_at": at, "gap": float(logits[right[at]] - logits[got[at]])}


def _logits_in_float64(weights: Weights, before: list[int]) -> Tensor:
    import torch

    from bench.gpt2_model import GPT2, naive

    exact = GPT2({name: tensor.double() for name, tensor in weights.items()}, naive)
    given = torch.tensor([[exact.config.vocabulary - 1, *before]], device=weights["wte.weight"].device)
    with torch.inference_mode():
        return exact.logits(given)[0]


@click.command()
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Generate so many.")
@click.option("--weights", "path", metavar="FILE", help="Take a GPT-2 from a .safetensors file of Hugging Face's.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Else make the weights from this.")
@click.option(
    "--runs", type=click.IntRange(1), default=1, show_default=True, help="Timed runs of each, after a warm-up."
)
@click.option("--attention", "names", multiple=True, metavar="NAME", help="This one beside naive's; all by default.")
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--plot", metavar="FILE", help="Draw the seconds over the tokens to FILE, .png, .svg or .pdf.")
@as_json.json_option
def main(
    tokens: int, path: str | None, seed: int, runs: int, names: tuple[str, ...], backend: str, plot: str | None,
    json_path: str | None,
) -> None:  # fmt: skip
    """Generate tokens with GPT-2 in fp32 by each attention, and print what it took and whether they are the same."""
    peers.check_installed("torch", *(["safetensors"] if path else []), gpu=backend == "cuda")
    if plot:
        plots.check_picture(plot)
        check_distinct(plot, None if json_path == as_json.PRINT else json_path)
    import torch

    from bench import gpt2_model

    torch.set_float32_matmul_precision("highest")  # no TF32
    weights = load(path) if path else gpt2_model.random_weights(gpt2_model.Config(), seed)
    if tokens > (context := gpt2_model.sized(weights).context):
        raise UsageError(
            f"--tokens {tokens} is more than the {context} that the model has positions for.", "ask for less."
        )
    found = contenders(backend)
    if unknown := {*names} - {*found}:
        raise UsageError(f"there is no --attention {min(unknown)}.", f"choose from {', '.join(found)}.")
    chosen = {name: one for name, one in found.items() if name in (NAIVE, *names) or not names}
    weights = {name: tensor.to(backend) for name, tensor in weights.items()}
    rows: list[Row] = []
    for row in measure(weights, chosen, tokens, runs):
        rows.append(row)
        click.echo(f"{row.case}, {row.contender} done", err=True)
    record = scripts.publish("gpt2", machine.pytorchs_circumstances(backend), rows, json_path)
    if plot:
        from bench.gpt2_plot import draw_generation

        draw_generation(record, plot)


if __name__ == "__main__":
    scripts.run(main)
