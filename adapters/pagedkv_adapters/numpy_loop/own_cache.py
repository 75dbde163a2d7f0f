"""The loop that the engine has without PagedKV: keys and values in plain arrays.

It is what ``generation`` has to equal, token for token.
"""

import numpy as np
import numpy.typing as npt

from pagedkv_adapters.numpy_loop.model import Array, Model, forward


class OwnCache:
    """Keys and values of one sequence, an array for each layer.

    Args:
        model: The model that makes them.
    """

    def __init__(self, model: Model) -> None:
        config = model.config
        nothing = np.empty((0, config.num_kv_heads, config.head_dim), dtype=np.float32)
        self.keys = [nothing] * config.num_layers
        self.values = [nothing] * config.num_layers

    @property
    def num_tokens(self) -> int:
        """Tokens that the last layer holds, and with it every other."""
        return len(self.keys[-1])

    def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Keep ``k`` and ``v``, and attend to all: an ``Attend``."""
        self.keys[layer] = np.concatenate([self.keys[layer], k])
        self.values[layer] = np.concatenate([self.values[layer], v])
        return attention(q, self.keys[layer], self.values[layer])


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal grouped-query attention of a sequence's last tokens to all of it.

    Args:
        q: Queries, ``(token, q_head, channel)``; the last of them is the sequence's last token.
        k: Keys, ``(token, kv_head, channel)``; ``q_head`` is a multiple of ``kv_head``, and so many
            query heads that follow each other share a head of keys and values.
        v: Values, like ``k``.

    Returns:
        ``(token, q_head, channel)``.
    """
    num_queries, _, head_dim = q.shape
    num_tokens, num_kv_heads, _ = k.shape
    grouped = q.reshape(num_queries, num_kv_heads, -1, head_dim)
    scores = np.einsum("qhgc,thc->hgqt", grouped, k) / np.float32(np.sqrt(head_dim))
    is_later = np.arange(num_tokens) > np.arange(num_tokens - num_queries, num_tokens)[:, None]
    scores[..., is_later] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended: Array = np.einsum("hgqt,thc->qhgc", weights, v).reshape(q.shape)
    return attended


def generate_without_pages(
    model: Model, prompt: npt.ArrayLike, max_new_tokens: int
) -> tuple[int, ...]:
    """The tokens that follow a prompt by greedy search: the ids of ``max_new_tokens`` tokens."""
    cache = OwnCache(model)
    missing = np.asarray(prompt)
    answer: list[int] = []
    while len(answer) < max_new_tokens:
        logits = forward(model, missing, cache.num_tokens, cache.attend)
        answer.append(int(logits.argmax()))
        missing = np.array(answer[-1:])
    return tuple(answer)
