"""A character-level GPT of about 10 million parameters, trained in fp32 on flashcli's own sources: by our attention and
its gradients, once more by them, and by PyTorch's.

``python -m bench.training [--json FILE] [--plot FILE]`` needs PyTorch and a GPU. One seed makes the same
weights and batches for each, and of PyTorch's operations only those are used that add up in one order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import click

from bench import scripts
from bench.rows import Trained
from flashcli.asked.shape import Shape
from flashcli.compiler.compiler import SOURCES
from flashcli.errors import MISMATCH
from flashcli.files.outputs import check_distinct
from flashcli.measure import machine, peers, records
from flashcli.measure.records import Record
from flashcli.measure.rows import Row, over_all
from flashcli.terminal import as_json

CLOSE_STEPS, CLOSE = 50, 1e-4  # so many first losses are to be as close as that
OURS, AGAIN, PYTORCHS = "flashcli", "flashcli, again", "PyTorch SDPA"
WARM_UP = 10  # steps whose time does not count


class Config(NamedTuple):
    """A model's sizes, and how it is trained; the learning rate rises to ``rate`` within ``rising`` steps.

    A step has ``batch`` texts of N letters, or sets of at most N points.
    """

    layers: int = 6
    heads: int = 6
    d: int = 64
    N: int = 256
    batch: int = 64
    steps: int = 500
    rate: float = 1e-3
    rising: int = 100

    @property
    def width(self) -> int:
        return self.heads * self.d


def text() -> str:
    """Text that is there wherever flashcli is: the CUDA code, then the package's own."""
    package = SOURCES.parent if (SOURCES.parent / "api.py").exists() else SOURCES.parent / "flashcli"
    files = [*sorted(SOURCES.rglob("*.cu*")), *sorted(package.rglob("*.py"))]
    return "".join(path.read_text() for path in files if "testcases" not in path.parts)


def attentions() -> dict[str, Callable[..., Any]]:
    """Functions with the parameters of PyTorch's, by the names of rows."""
    from torch.nn.functional import scaled_dot_product_attention as pytorchs

    from flashcli.torch import attention

    def ours(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
        return attention(q, k, v, causal=is_causal)

    return {OURS: ours, AGAIN: ours, PYTORCHS: pytorchs}


def model_of(config: Config, vocabulary: int, attend: Callable[..., Any]) -> Any:
    """GPT-2's layers, without dropout. Letters are read by a matrix product, whose gradient has one order of sums."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = config.width
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Any) -> Any:
            B, N, width = x.shape
            qkv = self.qkv(self.before(x)).view(B, N, 3, config.heads, config.d).permute(2, 0, 3, 1, 4)
            attended = attend(qkv[0], qkv[1], qkv[2], is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(B, N, width))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Linear(vocabulary, config.width, bias=False)
            self.places = nn.Parameter(0.02 * torch.randn(config.N, config.width))
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.last, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, vocabulary, bias=False)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)

        def forward(self, tokens: Any) -> Any:
            x = self.letters(functional.one_hot(tokens, vocabulary).float()) + self.places
            for block in self.blocks:
                x = block(x)
            return self.head(self.last(x))

    return GPT()


class Run(NamedTuple):
    """The outcome of a training run: the loss of each step, its seconds, and a hash of the weights at the end."""

    losses: list[float]
    seconds: list[float]
    weights: str
    parameters: int

    def row(self, about: Row, layers: int, heads: int) -> Trained:
        """The row of a record; the times of the first few steps do not count."""
        return Trained(
            **vars(about), **over_all(self.seconds[min(WARM_UP, len(self.seconds) - 1) :]), layers=layers, H=heads,
            parameters=self.parameters, losses=self.losses, weights=self.weights,
        )  # fmt: skip


def train(model: Any, batches: Iterable[Any], loss_of: Callable[[Any], Any], rate: float, rising: int) -> Run:
    """Train by AdamW, a step with the loss of each batch. The rate rises for ``rising`` steps.

    AdamW's first steps are as long for a gradient that is all rounding errors as for any other, so that at the full
    rate two runs whose sums are rounded otherwise part early. Hence the rate rises.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rising))
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # which waits for the GPU
        seconds.append(time.perf_counter() - start)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return Run(losses, seconds, digest.hexdigest()[:16], sum(x.numel() for x in model.parameters()))


def train_gpt(config: Config, attend: Callable[..., Any], device: str) -> Run:
    """Train on batches drawn from the text."""
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    written = text()
    letters = {letter: number for number, letter in enumerate(sorted(set(written)))}
    data = torch.tensor([letters[letter] for letter in written], device=device)
    model = model_of(config, len(letters), attend).to(device)
    generator, beside = torch.Generator().manual_seed(0), torch.arange(config.N + 1, device=device)

    def batches() -> Iterator[Any]:
        for _ in range(config.steps):
            first = torch.randint(len(data) - config.N, (config.batch, 1), generator=generator).to(device)
            yield data[first + beside]

    def loss(tokens: Any) -> Any:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train(model, batches(), loss, config.rate, config.rising)


def measured(config: Config, device: str) -> Iterator[Trained]:
    """A row for each attention."""
    for name, attend in attentions().items():
        about = Row.about("character-level GPT", Shape(config.batch, config.N, config.d), name, True)
        yield train_gpt(config, attend, device).row(about, config.layers, config.heads)


def differences(rows: list[Trained]) -> list[float]:
    """How far our losses are from PyTorch's, step by step."""
    losses = {row.contender: row.losses for row in rows}
    return [abs(x - y) for x, y in zip(losses[OURS], losses[PYTORCHS], strict=True)]


def verdict(rows: list[Trained]) -> list[str]:
    """The faults found: weights that another run has not, losses that are too far from PyTorch's."""
    weights = {row.contender: row.weights for row in rows}
    found = [] if weights[OURS] == weights[AGAIN] else ["two runs by our attention have other weights"]
    if (most := max(differences(rows)[:CLOSE_STEPS])) > CLOSE:
        found.append(f"the first {CLOSE_STEPS} losses differ from PyTorch's by up to {most:.1e}")
    return found


def publish(name: str, rows: Iterable[Trained], json_path: str | None) -> Record:
    """Train on the first GPU, telling each row, and publish them."""
    found = scripts.told(rows, lambda row: f"{row.contender}: {row.seconds * 1e3:.1f} ms a step")
    return scripts.publish(name, machine.pytorchs_circumstances("cuda"), found, json_path)


def exit_if_wrong(record: Record) -> None:
    """Tell the faults found, and exit if there are any."""
    if wrong := verdict(records.of_kind(Trained, record.rows)):
        click.echo("\n".join(wrong), err=True)
        raise SystemExit(MISMATCH)


@click.command()
@click.option("--steps", type=click.IntRange(1), default=Config().steps, show_default=True, help="Train so many steps.")
@click.option("--plot", metavar="FILE", help="Draw the losses to FILE, .png, .svg or .pdf.")
@as_json.json_option
def main(steps: int, plot: str | None, json_path: str | None) -> None:
    """Train a small GPT by our attention, twice, and by PyTorch's, on this machine's first GPU."""
    from flashcli.measure import plots

    peers.check_installed("torch", gpu=True)
    check_distinct(json_path, plot)
    if plot:
        plots.check_drawable(plot)
    record = publish("training", measured(Config(steps=steps), "cuda"), json_path)
    if plot:
        from bench.training_plot import draw_training

        draw_training(record, plot)
    exit_if_wrong(record)


if __name__ == "__main__":
    scripts.run(main)
