"""The generation loop with PagedKV: every place where an engine touches it, and why.

Without PagedKV the same loop is ``generate_without_pages`` in ``own_cache``.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import pagedkv as pk
from pagedkv_adapters.numpy_loop.model import Array, Model, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What ``generate`` made of a prompt.

    Args:
        tokens: Ids of the new tokens; the prompt is not among them.
        num_reused_tokens: Tokens of the prompt whose keys and values were not computed, but found
            in the cache.
    """

    tokens: tuple[int, ...]
    num_reused_tokens: int


def spec_for(model: Model, page_tokens: int = 16) -> pk.KVSpec:
    """What the model's KV looks like, for ``PagedKVCache`` and ``PageStore``.

    Args:
        model: The model.
        page_tokens: Tokens of a page; only full pages are kept for others.
    """
    return pk.KVSpec(
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_tokens=page_tokens,
        dtype="float32",
        # The weights' own hash, not a name: pages of weights that were trained a little longer
        # must never match. It goes into the key of every page.
        model=model.fingerprint,
    )


def generate(
    model: Model,
    prompt: npt.ArrayLike,
    cache: pk.PagedKVCache,
    max_new_tokens: int,
    salt: bytes = b"",
) -> Answer:
    """Generate by greedy search, and leave prompt and answer in the cache for others.

    Args:
        model: The model.
        prompt: Token ids, one dimension, at least one.
        cache: Where keys and values are kept, made for ``spec_for(model)`` with any
            ``page_tokens``.
        max_new_tokens: Tokens to generate, at least one.
        salt: The tenant's: what was computed under one salt is not found under another.

    Raises:
        ValueError: The prompt is empty or has ids that the model does not know, or
            ``max_new_tokens`` is not positive.
        SpecMismatchError: The cache is for other weights, another geometry or dtype.
        PoolExhaustedError: There is no store to take what the pool cannot hold.
        StoreError: The disk failed, or a page on it is damaged.
    """
    # What can be refused is refused before a sequence is opened. The cache cannot do this for its
    # caller: it sees arrays, not the weights that they come from.
    _require_cache_of(model, cache)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= model.config.vocab_size:
        raise ValueError(f"a prompt is a row of token ids below {model.config.vocab_size}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")

    # The sequence begins with the longest cached prefix of these tokens: full pages that anyone has
    # committed under the same salt, in this process or, through the store, in another, and a copy
    # of the tokens that the best next page shares, so that it may end inside a page. Leaving the
    # `with` block gives them up, also on an error: no page, slot or record stays behind.
    with cache.open_sequence(ids, salt=salt) as sequence:
        # The cache has keys and values, but no logits, and the answer begins with the logits of
        # the prompt's last token. So that token is computed even where all of them are cached.
        sequence.truncate(min(sequence.num_tokens, len(ids) - 1))
        num_reused_tokens = sequence.num_tokens

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            # Layer by layer, as they are computed. What finds no slot goes to the store's scratch
            # file and is read back in `attend`, exactly; without a store, PoolExhaustedError.
            sequence.append_layer(layer, k, v)
            return sequence.attend(layer, q)

        answer: list[int] = []
        missing = ids[num_reused_tokens:]
        while True:
            # `num_tokens` counts what all layers hold: it is read here, before the pass, since it
            # grows as soon as the last layer is appended.
            logits = forward(model, missing, sequence.num_tokens, attend)
            answer.append(int(logits.argmax()))
            if len(answer) == max_new_tokens:
                break
            missing = np.array(answer[-1:])

        # Only now are the new pages named by their tokens, and only those that were computed: the
        # last token was picked, but no forward pass has seen it. Had the loop failed, nothing of it
        # could be found by others. Full pages become shared; the tail stays private.
        sequence.commit([*ids, *answer[:-1]])
    return Answer(tokens=tuple(answer), num_reused_tokens=num_reused_tokens)


def _require_cache_of(model: Model, cache: pk.PagedKVCache) -> None:
    """``SpecMismatchError`` unless the cache holds the KV of this model, and nothing else."""
    if len(cache.specs) > 1:
        raise pk.SpecMismatchError(f"the cache has {len(cache.specs)} specs, the model one")
    spec_for(model, cache.specs[0].page_tokens).require_equal(cache.specs[0], "the PagedKVCache")
