"""Models of Hugging Face's transformers with our attention: how right, and how fast, beside the library's own.

``python -m bench.models [--json FILE]`` makes GPT-2, Llama (grouped heads) and BERT (padded sequences) with
random weights, in fp32. Errors are against "eager" attention in float64. Needs PyTorch and transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from bench import scripts
from bench.rows import Forward
from flashcli.asked.shape import Shape
from flashcli.measure import clocks, machine, peers
from flashcli.measure.rows import Failure, Row, over_all
from flashcli.terminal import as_json

VOCABULARY = 1000  # attention knows nothing of it
OURS = "fp32"  # as `flashcli.torch.register_transformers` names it
IMPLEMENTATIONS = {"flashcli": OURS, "sdpa": "sdpa", "eager": "eager"}  # of fp32 attention, by the names in rows


class Model(NamedTuple):
    """The sizes of a model, and of what it is given: B sequences of N tokens, with d numbers in a head."""

    family: str  # GPT-2, Llama or BERT
    layers: int
    H: int
    Hkv: int
    d: int
    B: int
    N: int

    @property
    def padded(self) -> bool:
        """Whether the sequences are of different lengths, and every token sees all others."""
        return self.family == "BERT"


MODELS = (
    Model("GPT-2", 12, 12, 12, 64, 8, 1024),
    Model("GPT-2", 24, 16, 16, 64, 2, 1024),
    Model("Llama", 8, 24, 12, 64, 2, 3072),
    Model("Llama", 4, 32, 8, 128, 1, 4096),
    Model("BERT", 12, 12, 12, 64, 16, 512),
    Model("BERT", 24, 16, 16, 64, 32, 128),
)


def configuration(model: Model) -> Any:
    """The configuration that transformers makes a model of."""
    import transformers

    width = model.H * model.d
    if model.family == "GPT-2":
        return transformers.GPT2Config(
            n_layer=model.layers, n_head=model.H, n_embd=width, n_positions=model.N, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "num_hidden_layers": model.layers, "num_attention_heads": model.H, "hidden_size": width,
        "max_position_embeddings": model.N, "vocab_size": VOCABULARY,
    }  # fmt: skip
    if model.family == "Llama":
        return transformers.LlamaConfig(
            **sizes, num_key_value_heads=model.Hkv, intermediate_size=8 * width // 3 // 64 * 64
        )
    return transformers.BertConfig(**sizes, intermediate_size=4 * width)


class Loaded:
    """A model with seeded random weights on a device, and what it is given."""

    def __init__(self, model: Model, device: str) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        with torch.device(device):
            self.model = transformers.AutoModel.from_config(configuration(model)).eval()
            self.tokens = torch.randint(VOCABULARY, (model.B, model.N))
            lengths = torch.full((model.B, 1), model.N)
            if model.padded:
                lengths = torch.randint(model.N // 2, model.N + 1, (model.B, 1))
            self.there = torch.arange(model.N) < lengths
        self.options = {"attention_mask": self.there.long()} if model.padded else {"use_cache": False}

    def forward(self, implementation: str) -> Any:
        """The last hidden states of all tokens that are there."""
        import torch

        self.model.set_attn_implementation(implementation)
        with torch.inference_mode():
            return self.model(self.tokens, **self.options).last_hidden_state[self.there]


def measured(model: Model, device: str, runs: int) -> Iterator[Row]:
    """A row for each implementation of attention."""
    loaded = Loaded(model, device)
    loaded.model.double()
    want = loaded.forward("eager")
    loaded.model.float()
    errors: dict[str, float] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        try:
            errors[name] = float((loaded.forward(implementation).double() - want).norm() / want.norm())
        except Exception as error:  # any of them may fail in any way: the other rows shall survive
            yield Failure.of(Row(**_about(model, name)), error)
    del want
    clock = clocks.on_gpu if device == "cuda" else clocks.on_cpu
    turns = [[functools.partial(loaded.forward, IMPLEMENTATIONS[name])] for name in errors]
    for (name, relative_l2), seconds in zip(errors.items(), clock(turns, runs), strict=True):
        sizes: dict[str, Any] = {"layers": model.layers, "H": model.H, "Hkv": model.Hkv}
        yield Forward(**_about(model, name), **sizes, relative_l2=relative_l2, **over_all(seconds))


def _about(model: Model, name: str) -> dict[str, Any]:
    case = f"{model.family}, {model.layers} layers"
    return vars(Row.about(case, Shape(model.B, model.N, model.d), name, not model.padded))


@click.command()
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Timed passes of each.")
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@as_json.json_option
def main(runs: int, backend: str, json_path: str | None) -> None:
    """Compare attention in models of transformers, in fp32, with float64, and time a pass of each."""
    peers.check_installed("torch", "transformers", gpu=backend == "cuda")
    import torch

    from flashcli.torch import register_transformers

    torch.set_float32_matmul_precision("highest")  # no TF32
    register_transformers(OURS)
    rows: list[Row] = []
    for model in MODELS:
        rows += measured(model, backend, runs)
        peers.release()
        click.echo(f"{model.family}, {model.layers} layers done", err=True)
    scripts.publish("models", machine.pytorchs_circumstances(backend), rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
