"""Makes the small stores that every later release must read: ``python tests/data/make_stores.py``.

They were made once, by the release of their format version, and stay as they are; run it again only
while that version has not been released. ``manifest.json`` has, for each store, the SHA-256 of what
each page's numbers are in C order, by key.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

import pagedkv as pk
from pagedkv import files, lane_document
from pagedkv.format import FORMAT_VERSION, PageEntry

FOLDER = Path(__file__).parent / f"v{FORMAT_VERSION}"
STORES = {
    "raw": ("float32", "raw"),
    "int8": ("float16", "int8"),
    "bfloat16": ("bfloat16", "raw"),
    "lossless": ("float32", "lossless"),
}
MAX_NBYTES = 128 * 2**10
"""So small that segments have few rows."""


def make_store(path: Path, dtype: str, codec: str) -> dict[str, str]:
    """Make one store; SHA-256 of its pages by key."""
    spec = pk.KVSpec(
        num_layers=2, num_kv_heads=2, head_dim=4, page_tokens=4, dtype=dtype, model="sha256:example"
    )
    keys = pk.page_keys(spec, np.arange(100, 120), salt=b"tenant")
    entries = [
        PageEntry(key=key, parent=parent, tokens=ids, num_tokens=4, salt=b"tenant")
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]
    tail = pk.PageKey(hashlib.sha256(b"tail").digest())
    ids = np.array([120, 121], np.int32)
    entries.append(PageEntry(key=tail, parent=keys[-1], tokens=ids, num_tokens=2))
    entries.append(PageEntry(key=pk.PageKey(hashlib.sha256(b"opaque").digest()), num_tokens=4))
    rng = np.random.default_rng(1)
    shape = (len(entries), *spec.page_shape)
    pages = list(rng.standard_normal(shape, np.float32).astype(spec.np_dtype))
    with pk.PageStore.open(path, spec, codec=codec, max_nbytes=MAX_NBYTES) as store:
        store.write(0, entries[:4], pages[:4])
        rows = store.write(0, entries, pages)
        store.read(rows, pages)
    writer = {"pid": 1, "host": "example", "since": "2026-01-01T00:00:00+00:00"}
    with files.locked(path):
        lane_document.update(path, 0, {lane_document.LAST_WRITER: writer}, sync=False)
    return {
        entry.key.hex(): hashlib.sha256(page.tobytes()).hexdigest()
        for entry, page in zip(entries, pages, strict=True)
    }


def main() -> None:
    """Make all stores anew."""
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    manifest = {
        name: make_store(FOLDER / f"{name}.zarr", dtype, codec)
        for name, (dtype, codec) in STORES.items()
    }
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
