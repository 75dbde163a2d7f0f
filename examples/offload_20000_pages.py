"""Twice as many pages as the pool holds: nothing is lost, and every hit says where it came from.

20,000 pages of 15 floats, an odd size, are put into a pool for half of them, so that 10,000 have
to leave for the store. Then the first 20, which left first, are read back and compared, and with
them the last 20, which are still in the pool.
"""

import hashlib
import tempfile

import numpy as np

import pagedkv as pk

NUM_PAGES = 20_000
NUM_READ = 20

spec = pk.KVSpec(
    num_layers=1,
    num_kinds=1,
    num_kv_heads=1,
    head_dim=15,
    page_tokens=1,
    dtype="float32",
    model="random numbers",
)
pages = np.random.default_rng(0).random((NUM_PAGES, *spec.page_shape), dtype="float32")
keys = [pk.PageKey(hashlib.sha256(b"page %d" % number).digest()) for number in range(NUM_PAGES)]

with tempfile.TemporaryDirectory() as folder:
    store = pk.PageStore.open(f"{folder}/cache.zarr", spec)
    with pk.PagedKVCache(spec, num_slots=NUM_PAGES // 2, store=store) as cache:
        cache.put(keys, pages)
        stats = cache.stats()
        assert stats.num_pages_evicted > 0, "the pool must be too small, or this shows nothing"
        print(f"{NUM_PAGES:,} pages of {spec.page_nbytes} bytes put into {cache.num_slots:,} slots")
        print(f"{stats.num_pages_evicted:,} evicted, {stats.num_pages_stored:,} in the store")

        first = cache.get(keys[:NUM_READ])
        last = cache.get(keys[-NUM_READ:])
        assert np.array_equal(first, pages[:NUM_READ])
        assert np.array_equal(last, pages[-NUM_READ:])
        stats = cache.stats()
        print(f"the first and last {NUM_READ} read back: all values equal")
        print(f"hits: {stats.num_store_hits} from the store, {stats.num_pool_hits} from the pool")

        assert cache.match(keys) == NUM_PAGES
        assert np.array_equal(cache.get(keys), pages)
        print(f"all {NUM_PAGES:,} read back: all values equal, {cache.stats().num_misses} misses")
