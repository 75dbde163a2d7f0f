"""A store is an array with named axes: plain zarr-python and xarray read it.

Writes a small store, then opens it without PagedKV's help and compares every value.

    python examples/open_with_zarr.py             its own small store
    python examples/open_with_zarr.py cache.zarr  any raw store of floats, such as the demo's
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import xarray as xr
import zarr

import pagedkv as pk


def write_store(path: Path) -> tuple[pk.PageKeys, np.ndarray]:
    """Fill a store; the keys and pages, ``(page, layer, kind, token, head, channel)``."""
    spec = pk.KVSpec(
        num_layers=3,
        num_kv_heads=2,
        head_dim=8,
        page_tokens=16,
        dtype="float32",
        model="sha256:of-your-weights",
    )
    keys = pk.page_keys(spec, np.arange(1000, 1000 + 5 * 16))
    pages = np.random.default_rng(0).random((len(keys), *spec.page_shape), dtype="float32")
    with pk.PagedKVCache(spec, num_slots=8, store=pk.PageStore.open(path, spec)) as cache:
        cache.put(keys, pages)
    return keys, pages


def show(path: Path) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Describe the store; its keys, and its pages as zarr-python and as xarray read them."""
    root = zarr.open_group(path, mode="r")
    print("pagedkv:", {k: v for k, v in root.attrs["pagedkv"].items() if k != "specs"})
    name = str(min(path.glob("lane-*/group-*")).relative_to(path))  # a writer has a lane
    group = root[name]
    for array in sorted(group):
        item = group[array]
        print(f"{name}/{array}: {item.metadata.dimension_names} {item.shape} {item.dtype}")

    rows = np.flatnonzero(group["num_tokens"][:])  # the other rows hold no page
    keys = [key.tobytes() for key in group["key"][:][rows]]
    print(f"{len(rows)} pages; row {rows[0]} has the tokens {group['tokens'][rows[0]][:6]} ...")
    with_zarr = group["kv"].get_orthogonal_selection(rows)

    dataset = xr.open_zarr(path, group=name, consolidated=False)
    with_xarray = dataset.kv.isel(row=rows)
    loudest = abs(with_xarray.isel(kind=0)).max(["row", "token", "head", "channel"])
    print("xarray dims:", dict(with_xarray.sizes))
    print("largest key by layer:", np.round(loudest.values, 3))
    return keys, with_zarr, with_xarray.values


def main() -> None:
    if len(sys.argv) > 1:
        show(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.zarr"
        keys, pages = write_store(path)
        stored_keys, with_zarr, with_xarray = show(path)
    order = [stored_keys.index(key) for key in keys]  # rows are in the order of writing
    print("zarr-python reads what was put:", np.array_equal(with_zarr[order], pages))
    print("xarray reads what was put:", np.array_equal(with_xarray[order], pages))


if __name__ == "__main__":
    main()
