"""attend against the same in float64, with a plain softmax."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import Array

from pagedkv.attention import attend

TILE = 1024


def reference(queries: Array, keys: Array, values: Array, scale: float | None = None) -> Array:
    """Causal grouped-query attention, a query and a head at a time, in float64."""
    num_queries, num_q_heads, channels = queries.shape
    num_tokens, num_heads, _ = keys.shape
    factor = channels**-0.5 if scale is None else scale
    out = np.empty(queries.shape, np.float64)
    for query in range(num_queries):
        visible = num_tokens - num_queries + query + 1
        for head in range(num_q_heads):
            shared = head // (num_q_heads // num_heads)
            q = queries[query, head].astype(np.float64)
            scores = keys[:visible, shared].astype(np.float64) @ q * factor
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[query, head] = weights @ values[:visible, shared].astype(np.float64)
    return out


def sample(
    num_queries: int, num_tokens: int, *, heads: int = 2, group: int = 1, channels: int = 8,
    seed: int = 0,
) -> tuple[Array, Array, Array]:  # fmt: skip
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((num_queries, heads * group, channels), np.float32)
    keys, values = rng.standard_normal((2, num_tokens, heads, channels), np.float32)
    return queries, keys, values


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_query_heads_share_their_groups_keys(heads: int, group: int) -> None:
    q, k, v = sample(5, 9, heads=heads, group=group)
    np.testing.assert_allclose(attend(q, k, v), reference(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 3])
def test_tiles_are_merged_without_a_seam(num_tokens: int) -> None:
    q, k, v = sample(1, num_tokens, seed=num_tokens)
    np.testing.assert_allclose(attend(q, k, v), reference(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 2, 17, TILE, TILE + 1, TILE + 5])
def test_queries_that_cross_a_tile_see_only_their_past(num_queries: int) -> None:
    q, k, v = sample(num_queries, TILE + 5, heads=1, channels=4, seed=num_queries)
    np.testing.assert_allclose(attend(q, k, v), reference(q, k, v), rtol=1e-4, atol=1e-5)


def test_a_single_token_attends_to_itself() -> None:
    q, k, v = sample(1, 1)
    np.testing.assert_allclose(attend(q, k, v), v, rtol=1e-6)


def test_a_token_does_not_see_the_next() -> None:
    q, k, v = sample(4, 6)
    before = attend(q, k, v)
    k[-1], v[-1] = 100, -100
    after = attend(q, k, v)
    assert np.array_equal(after[:-1], before[:-1])
    assert not np.allclose(after[-1], before[-1])


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, -1.0])
def test_the_scale_is_a_factor_on_the_scores(scale: float) -> None:
    q, k, v = sample(3, 7)
    np.testing.assert_allclose(
        attend(q, k, v, scale), reference(q, k, v, scale), rtol=1e-3, atol=1e-5
    )


def test_the_scale_is_by_default_one_over_the_root_of_the_channels() -> None:
    q, k, v = sample(2, 5, channels=16)
    assert np.array_equal(attend(q, k, v), attend(q, k, v, 0.25))


@pytest.mark.parametrize("factor", [1e3, 1e4])
def test_huge_scores_neither_overflow_nor_warn(factor: float) -> None:
    q, k, v = sample(2, TILE + 10)
    k *= np.float32(factor)
    out = attend(q, k, v)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, reference(q, k, v), rtol=1e-2, atol=1e-2)


def test_scores_that_rise_from_tile_to_tile_fade_what_came_before() -> None:
    q, k, v = sample(1, 3 * TILE, heads=1)
    k *= np.repeat([0.1, 3, 30], TILE)[:, None, None].astype(np.float32)
    np.testing.assert_allclose(attend(q, k, v), reference(q, k, v), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        attend(q, k[::-1], v[::-1]), reference(q, k[::-1], v[::-1]), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_half_precision_is_computed_in_float32(dtype: type, tolerance: float) -> None:
    q, k, v = (array.astype(dtype) for array in sample(3, TILE + 9))
    out = attend(q, k, v)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        out.astype(np.float64), reference(q, k, v), rtol=tolerance, atol=tolerance
    )


def test_the_result_has_the_type_of_the_queries() -> None:
    q, k, v = sample(1, 3)
    assert attend(q, k.astype(np.float16), v.astype(np.float16)).dtype == np.float32
    assert attend(q.astype(np.float16), k, v).dtype == np.float16


def test_arguments_are_not_changed() -> None:
    arrays = sample(2, 5)
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    attend(*arrays)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies, strict=True))


@settings(max_examples=40)
@given(
    num_queries=st.integers(1, 6),
    num_past=st.integers(0, 20),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    channels=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    num_queries: int, num_past: int, heads: int, group: int, channels: int, seed: int
) -> None:
    q, k, v = sample(
        num_queries, num_past + num_queries, heads=heads, group=group, channels=channels, seed=seed
    )
    np.testing.assert_allclose(attend(q, k, v), reference(q, k, v), rtol=1e-3, atol=1e-5)
