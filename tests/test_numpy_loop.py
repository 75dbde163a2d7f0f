"""The loop in numpy: it keeps the contract of adapters, and its parts compute what they say."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy_loop_contract import NumpyLoopContract

import pagedkv as pk
from pagedkv_adapters.numpy_loop import (
    Model,
    ModelConfig,
    OwnCache,
    attention,
    fingerprint,
    forward,
    generate,
    generate_without_pages,
    random_model,
    spec_for,
)

CONFIG = ModelConfig()


@pytest.mark.usefixtures("no_fsync")
class TestContract(NumpyLoopContract):
    pass


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(CONFIG, seed=0)


def softmax(scores: Any) -> Any:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# -- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_queries", [1, 3, 10])
def test_attention_is_the_formula(num_queries: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((num_queries, 4, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 10, 2, 16), dtype=np.float32)
    out = attention(q, k, v)
    assert out.dtype == np.float32
    for query in range(num_queries):
        seen = slice(10 - num_queries + query + 1)
        for head in range(4):
            keys, values = (x[seen, head // 2].astype(np.float64) for x in (k, v))
            weights = softmax(keys @ q[query, head].astype(np.float64) / math.sqrt(16))
            np.testing.assert_allclose(out[query, head], weights @ values, atol=1e-6)


@pytest.mark.parametrize("num_queries", [1, 30])  # kernels over pages, and matrix products
def test_attention_is_that_of_a_sequence(num_queries: int) -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((num_queries, 4, 16), dtype=np.float32)
    k, v = rng.standard_normal((2, 40, 2, 16), dtype=np.float32)
    spec = replace(spec_for(random_model(CONFIG, seed=0)), num_layers=1, layer_range=None)
    with pk.PagedKVCache(spec, 8) as cache, cache.open_sequence() as sequence:
        sequence.append_layer(0, k, v)
        np.testing.assert_allclose(sequence.attend(0, q), attention(q, k, v), atol=1e-5)


# -- the model ---------------------------------------------------------------------------------


def test_a_forward_pass_is_the_formulas_of_llama(model: Model) -> None:
    """In float64, one token and one head after the other, rotations as complex numbers."""
    w = {name: array.astype(np.float64) for name, array in model.weights.items()}
    tokens = [5, 80, 5, 31, 2]
    half = CONFIG.head_dim // 2

    def norm(x: Any, gain: Any) -> Any:
        return x / math.sqrt(np.mean(x**2) + 1e-6) * gain

    def heads(x: Any, position: int | None = None) -> Any:
        x = x.reshape(-1, CONFIG.head_dim)
        if position is None:
            return x
        turns = np.exp(1j * position / CONFIG.rope_theta ** (np.arange(half) / half))
        turned = (x[:, :half] + 1j * x[:, half:]) * turns
        return np.concatenate([turned.real, turned.imag], axis=1)

    hidden = [w["embedding"][token] for token in tokens]
    for layer in range(CONFIG.num_layers):
        normed = [norm(x, w[f"{layer}.attention_norm"]) for x in hidden]
        k = np.array([heads(x @ w[f"{layer}.key"], at) for at, x in enumerate(normed)])
        v = np.array([heads(x @ w[f"{layer}.value"]) for x in normed])
        for at, x in enumerate(normed):
            attended = [
                softmax(k[: at + 1, head // 2] @ q / 4) @ v[: at + 1, head // 2]
                for head, q in enumerate(heads(x @ w[f"{layer}.query"], at))
            ]
            hidden[at] = hidden[at] + np.concatenate(attended) @ w[f"{layer}.output"]
            y = norm(hidden[at], w[f"{layer}.mlp_norm"])
            gate = y @ w[f"{layer}.gate"]
            gated = gate / (1 + np.exp(-gate)) * (y @ w[f"{layer}.up"])
            hidden[at] = hidden[at] + gated @ w[f"{layer}.down"]
    expected = norm(hidden[-1], w["norm"]) @ w["head"]
    logits = forward(model, tokens, 0, OwnCache(model).attend)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_tokens_may_be_computed_in_parts(model: Model) -> None:
    tokens = np.arange(40)
    whole = forward(model, tokens, 0, OwnCache(model).attend)
    cache = OwnCache(model)
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        assert cache.num_tokens == start
        logits = forward(model, tokens[start:stop], start, cache.attend)
    np.testing.assert_allclose(logits, whole, atol=1e-4)


def test_the_fingerprint_is_that_of_the_weights_and_the_config(model: Model) -> None:
    assert random_model(CONFIG, seed=0).fingerprint == model.fingerprint
    found = {model.fingerprint}
    for name, array in model.weights.items():
        changed = array.copy()
        changed.flat[-1] += 1e-4
        found.add(fingerprint(CONFIG, {**model.weights, name: changed}))
    found.add(fingerprint(replace(CONFIG, rope_theta=5000.0), model.weights))
    assert len(found) == len(model.weights) + 2


def test_weights_cannot_be_changed_behind_the_fingerprint(model: Model) -> None:
    for array in model.weights.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_the_spec_describes_the_keys_that_the_model_makes(model: Model) -> None:
    cache = OwnCache(model)
    forward(model, [1, 2, 3], 0, cache.attend)
    spec = spec_for(model, page_tokens=4)
    assert spec.page_tokens == 4
    assert spec.model == model.fingerprint
    assert len(cache.keys) == spec.num_layers
    for keys in cache.keys:
        assert keys.shape == (3, spec.num_kv_heads, spec.head_dim)
        assert keys.dtype == spec.np_dtype


# -- the loop ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 3, "token ids below 97"),
        ([[1, 2]], 3, "token ids below 97"),
        ([1, 97], 3, "token ids below 97"),
        ([1, -1], 3, "token ids below 97"),
        ([1, 2], 0, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompt: Any, max_new_tokens: int, message: str, model: Model
) -> None:
    with pk.PagedKVCache(spec_for(model), 4) as cache:
        with pytest.raises(ValueError, match=message):
            generate(model, prompt, cache, max_new_tokens)
        assert cache.stats().num_misses == 0  # nothing was looked up


def test_a_token_that_is_picked_is_so_by_far_more_than_rounding(model: Model) -> None:
    """So that two ways to compute attention pick the same one."""
    cache = OwnCache(model)
    missing = np.arange(40)
    for _ in range(20):
        logits = forward(model, missing, cache.num_tokens, cache.attend)
        second, first = np.sort(logits)[-2:]
        assert first - second > 1e-3
        missing = logits.argmax(keepdims=True)


def test_greedy_search_goes_on_with_what_it_picked(model: Model) -> None:
    prompt = list(range(20))
    answer = generate_without_pages(model, prompt, 5)
    assert answer[2:] == generate_without_pages(model, [*prompt, *answer[:2]], 3)
