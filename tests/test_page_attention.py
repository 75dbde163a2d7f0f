"""Attention over block tables: against a plain softmax in float64, wherever the pages lie."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import Array, bits, make_kv, make_spec

import pagedkv as pk
from pagedkv import attention_kernels as kernels
from pagedkv import files, layer_scan, matrix_attention, page_attention, records
from pagedkv.attention_rule import AttentionRule
from pagedkv.codec import Int8
from pagedkv.layer_scan import _Wave
from pagedkv.matrix_attention import MatrixAttention
from pagedkv.page_attention import PageAttention, Places

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-3}
"""Relative to the largest number that comes out."""


def reference(
    queries: Array,
    keys: Array,
    values: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Causal grouped-query attention, a query and a head at a time, in float64."""
    num_queries, num_q_heads, channels = queries.shape
    num_tokens, num_heads, _ = keys.shape
    out = np.empty(queries.shape, np.float64)
    for query, head in np.ndindex(num_queries, num_q_heads):
        stop = num_tokens - num_queries + query + 1
        seen = slice(0 if window is None else max(0, stop - window), stop)
        shared = head // (num_q_heads // num_heads)
        q = queries[query, head].astype(np.float64)
        scores = keys[seen, shared].astype(np.float64) @ q
        scores *= channels**-0.5 if scale is None else scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[query, head] = weights / weights.sum() @ values[seen, shared].astype(np.float64)
    return out


def error(found: Array, expected: Array) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def paged(spec: pk.KVSpec, k: Array, v: Array, rng: np.random.Generator) -> tuple[Array, list[int]]:
    """Keys and values in pages, ``(page, kind, token, head, channel)``, and which page is where.

    All that holds no token is NaN.
    """
    num_pages = -(-len(k) // spec.page_tokens)
    pages = np.full((num_pages + 3, *spec.layer_shape), np.nan, spec.np_dtype)
    order = rng.permutation(len(pages))[:num_pages].tolist()
    for number, place in enumerate(order):
        part = slice(number * spec.page_tokens, (number + 1) * spec.page_tokens)
        for kind, tokens in enumerate((k[part], v[part])):
            pages[place, kind, : len(tokens)] = tokens
    return pages, order


def attended(spec: pk.KVSpec, q: Array, k: Array, v: Array, seed: int = 0, **rule: Any) -> Array:
    pages, order = paged(spec, k, v, np.random.default_rng(seed))
    attention = PageAttention(spec, q, len(k), AttentionRule(**rule))
    keys = pages.ctypes.data + np.array(order, np.int64) * pages.strides[0]
    values = keys + pages.strides[1]
    first = attention.first_page
    attention.attend(first, Places(keys[first:], values[first:]))
    return attention.result()


SHAPES = {
    "page_tokens": st.integers(1, 17),
    "heads": st.integers(1, 3),
    "group": st.integers(1, 9),
    "channels": st.sampled_from([1, 7, 8, 15, 16, 24, 40, 64, 80, 128, 256]),
    "num_tokens": st.integers(1, 120),
    "num_queries": st.integers(1, 16),
    "window": st.none() | st.integers(1, 130),
    "soft_cap": st.none() | st.sampled_from([0.5, 5.0, 50.0]),
    "scale": st.none() | st.sampled_from([0.05, 1.0, -0.3]),
    "seed": st.integers(0, 10**6),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@given(**SHAPES)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_gives_what_the_definition_says(
    dtype: str,
    page_tokens: int,
    heads: int,
    group: int,
    channels: int,
    num_tokens: int,
    num_queries: int,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    seed: int,
) -> None:
    spec = make_spec(num_kv_heads=heads, head_dim=channels, page_tokens=page_tokens, dtype=dtype)
    rng = np.random.default_rng(seed)
    num_queries = min(num_queries, num_tokens)
    q = rng.standard_normal((num_queries, heads * group, channels), np.float32)
    kv = rng.standard_normal((2, num_tokens, heads, channels), np.float32).astype(spec.np_dtype)
    rule = {"scale": scale, "window": window, "soft_cap": soft_cap}
    found = attended(spec, q, *kv, seed, **rule)
    assert found.dtype == q.dtype
    assert error(found, reference(q, *kv, **rule)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@given(**{**SHAPES, "num_queries": st.integers(1, 60)}, step=st.sampled_from([1, 13, 50, 1000]))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_many_queries_are_attended_by_matrix_products(
    dtype: str,
    page_tokens: int,
    heads: int,
    group: int,
    channels: int,
    num_tokens: int,
    num_queries: int,
    window: int | None,
    soft_cap: float | None,
    scale: float | None,
    seed: int,
    step: int,
) -> None:
    rng = np.random.default_rng(seed)
    num_queries = min(num_queries, num_tokens)
    q = rng.standard_normal((num_queries, heads * group, channels), np.float32)
    kv = rng.standard_normal((2, num_tokens, heads, channels), np.float32)
    kv = kv.astype(make_spec(dtype=dtype).np_dtype)
    rule = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_attention, "_BLOCK_QUERIES", 5 + page_tokens % 3)
        patch.setattr(matrix_attention, "_TILE_TOKENS", 7 + page_tokens)
        attention = MatrixAttention(q, heads, num_tokens, AttentionRule(**rule))
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            attention.attend(start, kv[0, part], kv[1, part])
    found = attention.result()
    assert error(found, reference(q, *kv, **rule)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("num_queries", [5, 30])
def test_queries_may_lie_in_memory_as_they_like_and_stay_as_they_are(num_queries: int) -> None:
    spec = make_spec(num_kv_heads=2, head_dim=8, page_tokens=4)
    with pk.PagedKVCache(spec, 20) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(spec, 70))
        q = np.random.default_rng(0).standard_normal((4, num_queries, 8), np.float32)
        before = q.copy()
        found = sequence.attend(0, q.transpose(1, 0, 2))
        assert bits(found) == bits(sequence.attend(0, q.transpose(1, 0, 2).copy()))
        assert bits(q) == bits(before)


@pytest.mark.parametrize("num_tokens", [511, 512, 513, 1024, 1600])
@pytest.mark.parametrize("window", [None, 1, 600])
def test_chunks_are_merged_without_a_seam(num_tokens: int, window: int | None) -> None:
    spec = make_spec(num_kv_heads=2, head_dim=16, page_tokens=16)
    rng = np.random.default_rng(num_tokens)
    q = rng.standard_normal((2, 6, 16), np.float32)
    k, v = rng.standard_normal((2, num_tokens, 2, 16), np.float32)
    k[num_tokens // 3] *= 20  # the largest score is in the middle
    found = attended(spec, q, k, v, window=window)
    assert error(found, reference(q, k, v, window=window)) <= 1e-5


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_threads_does_not_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    spec = make_spec(num_kv_heads=2, head_dim=32, page_tokens=16)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 32), np.float32)
    k, v = rng.standard_normal((2, 3000, 2, 32), np.float32)
    alone = attended(spec, q, k, v)
    monkeypatch.setattr(page_attention, "_MANY_NBYTES", 1)
    monkeypatch.setattr(page_attention.workers, "count", lambda: workers)
    assert bits(attended(spec, q, k, v)) == bits(alone)


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    spec = make_spec(num_kv_heads=1, head_dim=8, page_tokens=4)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 1, 8), np.float32)
    v = rng.standard_normal((50, 1, 8), np.float32)
    for size in (1e-30, 1e4, 1e18):
        k = rng.standard_normal((50, 1, 8), np.float32) * np.float32(size)
        assert error(attended(spec, q, k, v), reference(q, k, v)) <= 1e-5


def test_a_number_that_is_no_number_comes_out_as_one() -> None:
    spec = make_spec(num_kv_heads=1, head_dim=8, page_tokens=4)
    k, v = np.ones((2, 10, 1, 8), np.float32)
    k[5] = np.nan
    assert np.isnan(attended(spec, np.ones((1, 1, 8), np.float32), k, v)).all()


@pytest.mark.parametrize("scales", [("channel", "token"), ("token", "channel")])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("channels", [8, 20, 64])
def test_int8_records_are_attended_as_they_are(scales: Any, group: int, channels: int) -> None:
    codec = Int8(key_scales=scales[0], value_scales=scales[1])
    spec = make_spec(num_kv_heads=2, head_dim=channels, page_tokens=8)
    rng = np.random.default_rng(channels)
    num_pages, kinds = 5, spec.layer_shape
    pages = rng.standard_normal((num_pages, *kinds), np.float32)
    records = np.zeros((num_pages, codec.layer_nbytes(spec) + 1), np.uint8)  # at odd addresses too
    for page, record in zip(pages, records, strict=True):
        codec.encode(spec, page.copy(), record[:-1])
        codec.decode(spec, record[:-1], page)
    q = rng.standard_normal((1, 2 * group, channels), np.float32)
    shapes = [2 * channels if kind == "channel" else 8 * 2 for kind in scales]
    starts = np.cumsum([0, 2 * shapes[0], 2 * shapes[1], 8 * 2 * channels]).tolist()
    addresses = records.ctypes.data + np.arange(num_pages) * records.strides[0]
    together = group
    state = (1, 1, 2, 1, 8)
    best, total = np.full(state, -np.inf, np.float32), np.zeros(state, np.float32)
    padded = -(-channels // 8) * 8
    merged = np.zeros((1, 1, 2, group, padded), np.float32)
    scaled = np.zeros((1, 2, group, padded), np.float32)
    scaled[..., :channels] = q.reshape(1, 2, group, channels)
    scaled *= kernels.LOG2_E / np.sqrt(np.float32(channels))
    kernels.attend_pages(
        scaled,
        38,
        0,
        np.float32(0),
        addresses + starts[2],
        addresses + starts[3],
        0,
        39,
        num_pages,
        (
            8,
            channels,
            -starts[2],
            starts[1] - starts[3],
            (scales[0] == "channel") + 2 * (scales[1] == "channel"),
        ),
        together,
        np.dtype(np.int8),
        np.empty(kernels.scratch_floats(8, channels), np.float32),
        best,
        total,
        merged,
    )
    out = np.empty((1, 2, group, channels), np.float32)
    kernels.merge_chunks(best, total, merged, together, out)
    k, v = (pages[:, kind].reshape(-1, 2, channels)[:39] for kind in range(2))
    assert error(out.reshape(q.shape), reference(q, k, v)) <= 1e-5


# -- over the tiers --------------------------------------------------------------------------


def spec_of_tiers(dtype: str = "float32") -> pk.KVSpec:
    return make_spec(num_kv_heads=2, head_dim=16, page_tokens=16, num_layers=2, dtype=dtype)


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging buffers for one chunk of pages."""
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.usefixtures("small_staging")
def test_where_pages_lie_does_not_change_a_bit(tmp_path: Path, dtype: str) -> None:
    spec = spec_of_tiers(dtype)
    k, v = make_kv(spec, 2100)
    q = np.random.default_rng(0).standard_normal((3, 6, 16), np.float32)
    found = []
    for num_slots in (5, 60, 200):
        store = pk.PageStore.open(tmp_path / f"{num_slots}.zarr", spec)
        with pk.PagedKVCache(spec, num_slots, store) as cache:
            sequence = cache.open_sequence()
            sequence.append(k, v)
            before = cache.stats()
            found.append(
                [
                    sequence.attend(layer, q, window=window)
                    for layer in (0, 1)
                    for window in (None, 900)
                ]
            )
            after = cache.stats()
            assert (after.num_slices_loaded > before.num_slices_loaded) == (num_slots < 132)
            assert after.num_pages_evicted == before.num_pages_evicted
            assert after.num_free_slots == before.num_free_slots  # nothing came into the pool
            cache.check_invariants()
    assert [[bits(one) for one in some] for some in found[1:]] == [
        [bits(one) for one in found[0]]
    ] * 2
    for number, (layer, window) in enumerate([(0, None), (0, 900), (1, None), (1, 900)]):
        expected = reference(q, k[layer], v[layer], window=window)
        assert error(found[0][number], expected) <= TOLERANCES[dtype]


@pytest.mark.parametrize(("window", "num_pages"), [(None, 32), (90, 11)])
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_many_queries_need_no_more_memory_than_a_few_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    window: int | None,
    num_pages: int,
) -> None:
    spec = spec_of_tiers()
    monkeypatch.setattr(layer_scan, "STAGED_NBYTES", 4 * spec.layer_nbytes)
    k, v = make_kv(spec, 500)
    q = np.random.default_rng(0).standard_normal((70, 6, 16), np.float32)
    with pk.PagedKVCache(
        spec, 5, pk.PageStore.open(tmp_path / "cache.zarr", spec, codec=codec)
    ) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v)
        before = cache.stats().num_slices_attended
        found = sequence.attend(1, q, window=window)
        assert cache.stats().num_slices_attended - before == num_pages
        assert error(found, reference(q, k[1], v[1], window=window)) <= 1e-5
        assert max(buffer.shape[1] for buffer in sequence._spare[0]) <= 5
        cache.check_invariants()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("way", ["cached", "cold", "mapped"])
@pytest.mark.usefixtures("small_staging")
def test_stored_pages_are_attended_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, codec: str, way: str
) -> None:
    if way == "cold":
        monkeypatch.setattr(files, "NOW_FLAGS", 1 << 30)  # which the system does not know
    spec = spec_of_tiers(dtype)
    path, tokens = tmp_path / "cache.zarr", np.arange(2100)
    k, v = make_kv(spec, 2100)
    with pk.PagedKVCache(spec, 200, pk.PageStore.open(path, spec, codec=codec)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(k[:, :2096], v[:, :2096], tokens[:2096])
        cache.flush()
    q = np.random.default_rng(0).standard_normal((3, 6, 16), np.float32)
    found, exact = [], []
    for num_slots in (10, 60, 200):
        store = pk.PageStore.open(path, spec, memory_map=way == "mapped")
        with pk.PagedKVCache(spec, num_slots, store) as cache:
            sequence = cache.open_sequence(tokens)
            assert sequence.num_tokens == 2096
            sequence.append(k[:, 2096:], v[:, 2096:])
            with sequence.gather(1) as kinds:
                exact.append([kind.copy() for kind in kinds])
            before = cache.stats()
            found.append(sequence.attend(1, q))
            after = cache.stats()
            num_loaded = after.num_slices_loaded - before.num_slices_loaded
            assert after.num_slices_attended - before.num_slices_attended == 132
            assert num_loaded == max(0, 132 - num_slots)
            assert after.num_free_slots == before.num_free_slots
            cache.check_invariants()
    for one, kinds in zip(found, exact, strict=True):
        assert bits(kinds[0]) == bits(exact[0][0])
        expected = reference(q, *kinds)
        # What is stored as INT8 is attended before it is rounded to the spec's dtype.
        assert error(one, expected) <= TOLERANCES[dtype]
    if codec == "raw":
        assert len({bits(one) for one in found}) == 1


@pytest.mark.parametrize("num_queries", [1, 40])
def test_without_the_kernels_numpy_does_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_queries: int
) -> None:
    monkeypatch.setattr(records, "compiled", lambda: None)
    monkeypatch.setattr(records, "compiled_reads", lambda: None)
    monkeypatch.setattr("pagedkv.spill.compiled_reads", lambda: None)
    spec, tokens = spec_of_tiers(), np.arange(400)
    k, v = make_kv(spec, 400)
    q = np.random.default_rng(0).standard_normal((num_queries, 6, 16), np.float32)
    path = tmp_path / "cache.zarr"
    with pk.PagedKVCache(spec, 6, pk.PageStore.open(path, spec, codec="int8")) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v, tokens)
        rule = {"window": 300, "soft_cap": 5.0}
        assert error(sequence.attend(1, q, **rule), reference(q, k[1], v[1], **rule)) <= 1e-5
        sequence.close()
        cache.flush()
    store = pk.PageStore.open(path, spec, memory_map=True)
    with pk.PagedKVCache(spec, 6, store) as cache, cache.open_sequence(tokens) as sequence:
        found = sequence.attend(1, q)
        with sequence.gather(1) as kinds:
            assert error(found, reference(q, *kinds)) <= 1e-5


def test_a_damaged_page_in_a_memory_map_is_an_error(tmp_path: Path) -> None:
    spec = spec_of_tiers()
    path, tokens = tmp_path / "cache.zarr", np.arange(800)
    with pk.PagedKVCache(spec, 60, pk.PageStore.open(path, spec, codec="int8")) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(*make_kv(spec, 800), tokens)
        cache.flush()
    with pk.PagedKVCache(spec, 8, pk.PageStore.open(path, spec, memory_map=True)) as cache:
        sequence = cache.open_sequence(tokens)
        q = np.ones((1, 2, 16), np.float32)
        expected = [sequence.attend(layer, q) for layer in range(2)]
        (segment,) = path.rglob("kv/c.*")
        slice_nbytes = Int8().layer_nbytes(spec) + 4
        with segment.open("r+b") as file:  # in place: the map shows it
            file.seek((30 * spec.num_layers + 1) * slice_nbytes)  # page 30, layer 1
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        assert bits(sequence.attend(0, q)) == bits(expected[0])
        with pytest.raises(pk.CorruptPageError):
            sequence.attend(1, q)
        assert cache.stats().num_pinned_slots == 0


@pytest.mark.parametrize("nbytes", [0, 5000])
def test_a_segment_that_was_cut_off_is_an_error_in_a_memory_map_too(
    tmp_path: Path, nbytes: int
) -> None:
    spec = spec_of_tiers()
    path, tokens = tmp_path / "cache.zarr", np.arange(800)
    with pk.PagedKVCache(spec, 60, pk.PageStore.open(path, spec)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(*make_kv(spec, 800), tokens)
        cache.flush()
    with pk.PagedKVCache(spec, 8, pk.PageStore.open(path, spec, memory_map=True)) as cache:
        sequence = cache.open_sequence(tokens)
        (segment,) = path.rglob("kv/c.*")
        os.truncate(segment, nbytes)
        with pytest.raises(pk.CorruptPageError):
            sequence.attend(0, np.ones((1, 2, 16), np.float32))


def test_a_memory_map_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    spec = spec_of_tiers()
    with pytest.raises(ValueError, match="choose one"):
        pk.PageStore.open(tmp_path / "a.zarr", spec, memory_map=True, direct=True)
    with pytest.raises(ValueError, match="lossless"):
        pk.PageStore.open(tmp_path / "b.zarr", spec, memory_map=True, codec="lossless")


@pytest.mark.parametrize(
    ("num_queries", "window", "num_pages"),
    [(1, 100, 7), (1, 1, 1), (1, 16, 1), (1, 17, 2), (1, 1000, 63), (5, 100, 7)],
)
@pytest.mark.usefixtures("small_staging")
def test_pages_that_no_query_sees_are_not_read(
    tmp_path: Path, num_queries: int, window: int, num_pages: int
) -> None:
    spec = spec_of_tiers()
    k, v = make_kv(spec, 2048)
    with pk.PagedKVCache(spec, 2, pk.PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v)
        before = cache.stats()
        q = np.ones((num_queries, 2, 16), np.float32)
        found = sequence.attend(0, q, window=window)
        after = cache.stats()
        assert error(found, reference(q, k[0], v[0], window=window)) <= 1e-5
        assert after.num_slices_attended - before.num_slices_attended == num_pages
        num_loaded = after.num_slices_loaded - before.num_slices_loaded
        assert num_loaded == num_pages - 1  # the last one is in the pool


@pytest.mark.usefixtures("small_staging")
def test_a_page_that_leaves_on_the_way_is_read_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of_tiers()
    k, v = make_kv(spec, 1500)
    q = np.random.default_rng(0).standard_normal((1, 2, 16), np.float32)
    with pk.PagedKVCache(spec, 80, pk.PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        sequence = cache.open_sequence()
        sequence.append(k, v)
        attend, others = _Wave.attend, []

        def attend_later(wave: _Wave, *arguments: Any) -> None:
            if not others:
                others.append(cache.open_sequence())
                others[0].append(*make_kv(spec, 16 * 70, seed=1))  # takes most slots
            attend(wave, *arguments)

        monkeypatch.setattr(_Wave, "attend", attend_later)
        found = sequence.attend(0, q)
        assert others
        assert error(found, reference(q, k[0], v[0])) <= 1e-5
        cache.check_invariants()


def test_sequences_are_attended_while_others_push_them_out(tmp_path: Path) -> None:
    spec = spec_of_tiers()
    with pk.PagedKVCache(spec, 40, pk.PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        errors: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                k, v = make_kv(spec, 700, seed)
                q = np.random.default_rng(seed).standard_normal((1, 4, 16), np.float32)
                with cache.open_sequence() as sequence:
                    for start in range(0, 700, 50):
                        part = slice(start, start + 50)
                        sequence.append(k[:, part], v[:, part])
                        for layer in range(2):
                            expected = reference(q, k[layer, : part.stop], v[layer, : part.stop])
                            assert error(sequence.attend(layer, q), expected) <= 1e-5
            except BaseException as caught:  # noqa: BLE001 - told below
                errors.append(caught)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        cache.check_invariants()
        assert cache.stats().num_pinned_slots == 0


def test_a_damaged_page_is_an_error_and_no_number(tmp_path: Path) -> None:
    spec = spec_of_tiers()
    path = tmp_path / "cache.zarr"
    tokens = np.arange(800)
    with pk.PagedKVCache(spec, 8, pk.PageStore.open(path, spec)) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(*make_kv(spec, 800), tokens)
        cache.flush()
        sequence = cache.open_sequence(tokens)
        assert sequence.num_tokens > 700
        for segment in path.rglob("kv/c.*"):
            segment.write_bytes(bytes(segment.stat().st_size))
        with pytest.raises(pk.CorruptPageError):
            sequence.attend(0, np.ones((1, 2, 16), np.float32))
        assert cache.stats().num_pinned_slots == 0


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ({"window": 0}, "window is 0"),
        ({"window": -3}, "window is -3"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"soft_cap": float("nan")}, "soft_cap is nan"),
        ({"scale": float("inf")}, "scale is inf"),
    ],
)
def test_a_rule_out_of_range_is_refused(rule: dict[str, Any], name: str) -> None:
    spec = spec_of_tiers()
    with pk.PagedKVCache(spec, 8) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(spec, 20))
        with pytest.raises(ValueError, match=f"^{name}"):
            sequence.attend(0, np.ones((1, 2, 16), np.float32), **rule)
