"""GPT-2 on arrays of NumPy or tensors of PyTorch, whatever its attention is.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019.
"""

from __future__ import annotations

from bench.gpt2.cache import Attend, Cache
from bench.gpt2.library import Array, Library
from bench.gpt2.weights import Config, Weights
from flashcli.api import attention


def causal(q: Array, k: Array, v: Array) -> Array:
    """`flashcli.attention` of the last tokens, q [B, H, M, d], to all up to each, k and v [B, H, N, d]."""
    return attention(q, k, v, causal=True, q_start=k.shape[2] - q.shape[2])


class GPT2:
    """A model where its weights are; ``attend`` is its attention where there is no cache."""

    def __init__(self, config: Config, weights: Weights, library: Library, attend: Attend = causal) -> None:
        self.config, self.weights, self.library, self.attend = config, weights, library, attend

    def logits(self, tokens: Array, positions: Array, cache: Cache | None = None) -> Array:
        """Logits of the token after ``tokens`` [B, M], which stand at ``positions`` [B, M]: [B, vocabulary].

        With a ``cache``, their keys and values go there, and those of earlier ones are in it already. Without one, the
        tokens are all that there is.
        """
        return self.head(self.hidden(tokens, positions, cache)[:, -1])

    def head(self, x: Array) -> Array:
        """Logits of the token after each of those whose last layer gave x [.., width]: [.., vocabulary]."""
        return self.library.product(self._norm(x, "ln_f"), self.weights["wte.weight"].T)

    def hidden(self, tokens: Array, positions: Array, cache: Cache | None = None) -> Array:
        """The output of the last layer for each token, [B, M, width]; see `logits`."""
        weights = self.weights
        if cache:
            cache.turn(positions)
        x = weights["wte.weight"][tokens] + weights["wpe.weight"][positions]
        for layer in range(self.config.layers):
            x = x + self._attention(self._norm(x, f"h.{layer}.ln_1"), layer, cache)
            inner = self._linear(self._norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            x = x + self._linear(self.library.gelu(inner), f"h.{layer}.mlp.c_proj")
        return x

    def _attention(self, x: Array, layer: int, cache: Cache | None) -> Array:
        """q, k and v are slices of one projection: nothing is copied for attention."""
        B, M, width = x.shape
        qkv = self._linear(x, f"h.{layer}.attn.c_attn").reshape(B, M, 3, self.config.heads, self.config.head)
        if cache:
            o = cache.attend(layer, qkv)
        else:
            o = self.attend(*(qkv[:, :, which].swapaxes(1, 2) for which in range(3))).swapaxes(1, 2)
        return self._linear(o.reshape(B, M, width), f"h.{layer}.attn.c_proj")

    def _linear(self, x: Array, name: str) -> Array:
        return self.library.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Array, name: str) -> Array:
        return self.library.norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
