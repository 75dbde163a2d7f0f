"""The core without a framework: more pages than slots, and a prefix that survives a restart.

KV for 1,000 tokens needs 63 pages, the pool has 32 slots: the other pages are on disk, and come
back a layer at a time when attention needs them. A second cache over the same store, as another
process would open it, finds the prompt by its tokens.
"""

import tempfile

import numpy as np

import pagedkv as pk

spec = pk.KVSpec(
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    page_tokens=16,
    dtype="float32",
    model="sha256:of-your-weights",
)
tokens = np.arange(1000)  # the ids of a prompt
rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 4, 1000, 2, 64), dtype="float32")  # (layer, token, head, channel)
q = rng.standard_normal((1, 8, 64), dtype="float32")  # 8 query heads share 2 KV heads

with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/cache.zarr"

    store = pk.PageStore.open(path, spec)
    with pk.PagedKVCache(spec, num_slots=32, store=store) as cache:
        seq = cache.open_sequence(tokens)
        print(f"first run: {seq.num_tokens} of {len(tokens)} tokens found")
        seq.append(k, v, tokens)
        print(f"{seq.num_pages} pages in {cache.num_slots} slots")
        with seq.gather(layer=3) as (keys, values):  # read-only, (token, head, channel)
            print("exact:", np.array_equal(keys, k[3]) and np.array_equal(values, v[3]))
        before = seq.attend(layer=3, q=q)

    store = pk.PageStore.open(path, spec)  # another process, another day
    with pk.PagedKVCache(spec, num_slots=32, store=store) as cache:
        seq = cache.open_sequence(tokens)
        print(f"second run: {seq.num_tokens} of {len(tokens)} tokens found")
        rest = slice(seq.num_tokens, None)  # what is behind the full pages is computed again
        seq.append(k[:, rest], v[:, rest], tokens[rest])
        print("same attention:", np.array_equal(seq.attend(layer=3, q=q), before))
