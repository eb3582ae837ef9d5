"""GPT-2's weights in NumPy's arrays: their names and shapes, from files, or random.

Names, and matrices as [inputs, outputs], are those of Hugging Face's transformers, before which "transformer." may
stand. The matrix that embeds tokens gives the logits, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.gpt2.library import Array
from flashcli.errors import BadInput, explained
from flashcli.files.decode.tensors import Tensors

Weights = dict[str, Array]
NAME = re.compile(
    r"(?:transformer\.)?((?:wte|wpe|ln_f|h\.\d+\.(?:ln_[12]|attn\.c_(?:attn|proj)|mlp\.c_(?:fc|proj)))\.(?:weight|bias))"
)
HEAD = 64  # numbers, in all that OpenAI published
HINT = "huggingface.co/openai-community/gpt2 has one, model.safetensors."


class Config(NamedTuple):
    """The sizes of a model; those of GPT-2 small if nothing is said."""

    layers: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257
    head: int = HEAD

    @property
    def width(self) -> int:
        return self.heads * self.head


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The name and the shape of each weight."""
    width = config.width
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocabulary, width),
        "wpe.weight": (config.context, width),
    }
    norms = ["ln_f", *(f"h.{layer}.ln_{which}" for layer in range(config.layers) for which in (1, 2))]
    for layer in range(config.layers):
        for name, inputs, outputs in (
            ("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)
        ):  # fmt: skip
            found[f"h.{layer}.{name}.weight"] = inputs * width, outputs * width
            found[f"h.{layer}.{name}.bias"] = (outputs * width,)
    return found | {f"{norm}.{what}": (width,) for norm in norms for what in ("weight", "bias")}


def random_weights(config: Config, seed: int) -> Weights:
    """Seeded weights, float32.

    Those of queries and keys are large enough for attention to prefer some tokens to others, and those of projections
    for what is generated to depend on it: with GPT-2's own initial weights, a model repeats its last token.
    """
    random = np.random.default_rng(seed)
    deviations = {"wte.weight": 0.02, "wpe.weight": 0.02, "attn.c_attn.weight": 0.08, "c_proj.weight": 0.08}
    found: Weights = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            found[name] = np.full(shape, name.endswith(".weight"), np.float32)
        else:
            deviation = next((value for end, value in deviations.items() if name.endswith(end)), 0.04)
            found[name] = random.standard_normal(shape, np.float32) * np.float32(deviation)
    return found


def load(path: Path) -> tuple[Config, Weights]:
    """The sizes and the weights, in float32, of a `.safetensors` file, or of all there are in a folder.

    Tensors that are no weights of GPT-2 are left out. A config.json beside them says how many heads there are; without
    one, heads have 64 numbers. BadInput if they are not those of a GPT-2.
    """
    files = _files(path)
    try:
        tensors = [Tensors(file) for file in files]
    except BadInput as error:
        raise BadInput(str(error), HINT) from error
    found = {match[1]: each[name] for each in tensors for name in each if (match := NAME.fullmatch(name))}
    config = sized(found, _heads(files[0].parent / "config.json"))
    # A copy: what is mapped may lie at any address, and is slow there.
    return config, {name: np.array(found[name], np.float32) for name in shapes(config)}


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if found := sorted(path.glob("*.safetensors")):
        return found
    raise BadInput(f"{str(path)!r} has no .safetensors file.", HINT)


def _heads(path: Path) -> int | None:
    """How many heads a config.json says that a layer has; None where it does not, or is not there."""
    if not path.exists():
        return None
    try:
        with explained("read", path):
            heads = json.loads(path.read_bytes())["n_head"]
        if isinstance(heads, int) and heads > 0:
            return heads
    except (KeyError, TypeError, ValueError):
        pass
    raise BadInput(f"{str(path)!r} does not say how many heads a layer has, n_head.", "GPT-2's config.json does.")


def sized(weights: Mapping[str, Array], heads: int | None = None) -> Config:
    """The sizes of the model that weights are of, with so many heads a layer; BadInput if they are not a GPT-2's."""
    try:
        (vocabulary, width), context = weights["wte.weight"].shape, len(weights["wpe.weight"])
    except (KeyError, ValueError) as error:
        raise BadInput("these are not the weights of a GPT-2: there is no matrix wte.weight or wpe.weight.") from error
    layers = sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in weights)
    heads = heads or max(1, width // HEAD)
    config = Config(layers, heads, context, vocabulary, width // heads)
    for name, shape in shapes(config).items():
        if name not in weights or tuple(weights[name].shape) != shape:
            has = list(weights[name].shape) if name in weights else "missing"
            raise BadInput(f"these are not the weights of a GPT-2: {name} is {has}, not {list(shape)}.")
    return config
