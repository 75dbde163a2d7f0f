"""A decoder-only transformer of a few thousand weights, in float32 numpy.

What Llama and most of its successors do: an embedding, layers of RMSNorm, grouped-query attention
with rotary positions (RoPE) and a gated MLP, and a head for the logits. Where keys and values are
kept is left to the caller of ``forward``.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Attend = Callable[[int, Array, Array, Array], Array]
"""From ``(layer, q, k, v)`` of new tokens to their attention: all that is asked of a KV cache.

It keeps ``k`` and ``v``, ``(token, kv_head, channel)``, and lets ``q``, which is
``(token, q_head, channel)``, attend to all that is kept of the layer. The result has the shape of
``q``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a model.

    Args:
        vocab_size: Token ids are ``0..vocab_size - 1``.
        hidden_size: Channels between the layers.
        mlp_size: Channels inside an MLP.
        num_layers: Layers.
        num_heads: Query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: Heads of keys and values.
        head_dim: Channels of a head, an even number.
        rope_theta: Base of the rotary frequencies.
    """

    vocab_size: int = 97
    hidden_size: int = 48
    mlp_size: int = 96
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A config, and weights by name. Made by ``random_model``.

    Args:
        config: Its sizes.
        weights: Matrices ``(in, out)`` and the gains of norms, read-only: a weight that changed
            would make the fingerprint, and so every stored page, a lie.
        fingerprint: SHA-256 over both.
    """

    config: ModelConfig
    weights: Mapping[str, Array]
    fingerprint: str


def random_model(config: ModelConfig, seed: int) -> Model:
    """A model with random weights; the same for the same seed.

    The weights of queries and keys are large, so that attention prefers some tokens to others and
    each answer hangs on the whole prompt. Wrong keys or values then show in the tokens.
    """
    rng = np.random.default_rng(seed)
    hidden, mlp = config.hidden_size, config.mlp_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights: dict[str, Array] = {}

    def add(name: str, num_in: int, num_out: int, gain: float = 1.0) -> None:
        scale = np.float32(gain / np.sqrt(num_in))
        weights[name] = rng.standard_normal((num_in, num_out), dtype=np.float32) * scale

    add("embedding", config.vocab_size, hidden, gain=np.sqrt(config.vocab_size))
    for layer in range(config.num_layers):
        add(f"{layer}.query", hidden, q_size, gain=1.5)
        add(f"{layer}.key", hidden, kv_size, gain=1.5)
        add(f"{layer}.value", hidden, kv_size)
        add(f"{layer}.output", q_size, hidden, gain=2.0)
        add(f"{layer}.gate", hidden, mlp)
        add(f"{layer}.up", hidden, mlp)
        add(f"{layer}.down", mlp, hidden)
        for norm in ("attention_norm", "mlp_norm"):
            weights[f"{layer}.{norm}"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    weights["norm"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    add("head", hidden, config.vocab_size)
    for array in weights.values():
        array.flags.writeable = False
    return Model(config=config, weights=weights, fingerprint=fingerprint(config, weights))


def fingerprint(config: ModelConfig, weights: Mapping[str, Array]) -> str:
    """SHA-256 over all that keys and values depend on: the config, and each weight by name."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name, array in sorted(weights.items()):
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(array.tobytes())
    return f"sha256:{digest.hexdigest()}"


def forward(model: Model, tokens: npt.ArrayLike, start: int, attend: Attend) -> Array:
    """One forward pass over new tokens of a sequence.

    Args:
        model: The model.
        tokens: Their ids.
        start: Tokens before them, which ``attend`` has seen in earlier passes. The position of a
            token, from which its rotation comes, is its index in the whole sequence.
        attend: Keeps keys and values, and attends.

    Returns:
        Logits of the token that follows the last one, ``(vocab_size,)``.
    """
    config, weights = model.config, model.weights
    hidden = weights["embedding"][np.asarray(tokens)]  # (token, hidden)
    cos, sin = _rotation(config, np.arange(start, start + len(hidden)))
    for layer in range(config.num_layers):
        x = _rms_norm(hidden, weights[f"{layer}.attention_norm"])
        q, k, v = (
            (x @ weights[f"{layer}.{name}"]).reshape(len(x), -1, config.head_dim)
            for name in ("query", "key", "value")
        )
        # Keys are rotated before they are kept: a token's key then never changes, whatever follows.
        attended = attend(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), v)
        hidden = hidden + attended.reshape(len(x), -1) @ weights[f"{layer}.output"]
        x = _rms_norm(hidden, weights[f"{layer}.mlp_norm"])
        gate, up = x @ weights[f"{layer}.gate"], x @ weights[f"{layer}.up"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.down"]
    logits: Array = _rms_norm(hidden[-1], weights["norm"]) @ weights["head"]
    return logits


def _rms_norm(x: Array, gain: Array) -> Array:
    """Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6)) * gain
    return normed


def _rotation(config: ModelConfig, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine for each position and pair of channels, ``(token, 1, head_dim / 2)``."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Su et al., "RoFormer", 2021, with the pairs of channels that Llama has: ``i, i + half``."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
