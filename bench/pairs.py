"""A small model of pair representations, trained in fp32: by our triangle attention, once more by it, and by PyTorch's.

``python -m bench.pairs [--json FILE]`` needs PyTorch and a GPU. The model completes matrices of distances: of points
in space a quarter of the distances is known, and a triangle of two sides bounds the third one. Points that are not
there are masked. Layers are AlphaFold 2's (Jumper et al. 2021, supplement 1.6.6) without gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from bench import scripts, training
from bench.rows import Trained
from bench.training import Config
from flashcli.asked.shape import Shape
from flashcli.measure import peers
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

KNOWN = 0.25  # of all distances
CONFIG = Config(layers=4, heads=4, d=32, N=64, batch=4, steps=60)


def attentions() -> dict[str, Callable[..., Any]]:
    """Functions with the first parameters of `flashcli.torch.triangle_attention`, by the names of rows."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from flashcli.torch import triangle_attention

    def pytorchs(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        scores = bias.masked_fill(~mask, -torch.inf).expand(*q.shape[:-1], -1)
        return scaled_dot_product_attention(q, k, v, scores)

    return {training.OURS: triangle_attention, training.AGAIN: triangle_attention, training.PYTORCHS: pytorchs}


def model_of(config: Config, attend: Callable[..., Any]) -> Any:
    """Triangle attention around the starting node and around the ending one in turn, each before two linear layers."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = config.width
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.bias = nn.Linear(width, config.heads, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, pairs: Any, there: Any) -> Any:
            x = self.before(pairs)
            q, k, v = self.qkv(x).unflatten(-1, (3, config.heads, config.d)).permute(3, 0, 1, 4, 2, 5)
            bias = self.bias(x).permute(0, 3, 1, 2)[:, None]
            o = attend(q, k, v, bias, there[:, None, None, None])  # [batch, points, heads, points, d]
            pairs = pairs + self.out(o.transpose(-3, -2).flatten(-2))
            return pairs + self.down(functional.gelu(self.up(self.after(pairs))))

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.last = nn.Linear(2, config.width), nn.LayerNorm(config.width)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.distance = nn.Linear(config.width, 1)

        def forward(self, known: Any, distances: Any, there: Any) -> Any:
            x = self.read(torch.stack([known, known * distances], -1))
            for block in self.blocks:
                x = block(x, there).transpose(1, 2)  # so that the next one goes by the other node
            return self.distance(self.last(x)).squeeze(-1)

    return Pairs()


def train(config: Config, attend: Callable[..., Any], device: str, seed: int = 0) -> training.Run:
    """Train on random points, of which a step has other ones."""
    import torch

    torch.manual_seed(seed)
    model = model_of(config, attend).to(device)
    generator, N = torch.Generator().manual_seed(seed), config.N

    def batches() -> Iterator[Any]:
        for _ in range(config.steps):
            points = torch.randn(config.batch, N, 3, generator=generator)
            distances = (points[:, :, None] - points[:, None]).norm(dim=-1)
            known = (torch.rand(config.batch, N, N, generator=generator) < KNOWN).float()
            there = torch.arange(N) < torch.randint(N // 2, N + 1, (config.batch, 1), generator=generator)
            yield [x.to(device) for x in (known, distances, there)]

    def loss(batch: Any) -> Any:
        known, distances, there = batch
        wanted = there[:, :, None] & there[:, None]
        wrong = (model(known, distances, there) - distances) * wanted
        return wrong.square().sum() / wanted.sum()

    return training.train(model, batches(), loss, config.rate, config.rising)


def measured(config: Config, device: str) -> Iterator[Trained]:
    """A row for each attention."""
    for name, attend in attentions().items():
        about = Row.about("pair representation", Shape(config.batch, config.N, config.d), name, False)
        yield train(config, attend, device).row(about, config.layers, config.heads)


@click.command()
@click.option("--steps", type=click.IntRange(1), default=CONFIG.steps, show_default=True, help="Train so many steps.")
@as_json.json_option
def main(steps: int, json_path: str | None) -> None:
    """Train a small model with a pair bias by our attention, twice, and by PyTorch's, on this machine's first GPU."""
    peers.check_installed("torch", gpu=True)
    training.exit_if_wrong(training.publish("pairs", measured(CONFIG._replace(steps=steps), "cuda"), json_path))


if __name__ == "__main__":
    scripts.run(main)
