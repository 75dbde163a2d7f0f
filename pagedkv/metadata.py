"""The ``zarr.json`` documents of a store, made by zarr-python in memory.

zarr-python is imported only when a document has to be made: never to open an existing store.
"""

import json
from pathlib import Path
from typing import Any

from pagedkv import files
from pagedkv.codec import Codec
from pagedkv.evictions import EVICTED_DIMENSIONS, EVICTED_SHAPE
from pagedkv.format import (
    ATTRIBUTE,
    CATALOG,
    CATALOG_DIMENSIONS,
    EVICTED,
    KV,
    KV_DIMENSIONS,
    METADATA,
    Geometry,
    derived_columns,
)
from pagedkv.header import StoreHeader
from pagedkv.spec import KVSpec


def read_document(folder: Path) -> dict[str, Any] | None:
    """The document of the node in ``folder``; None if there is none, or a torn one."""
    try:
        document = json.loads(files.read_bytes(folder / METADATA))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "node_type" in document else None


def root_document(header: StoreHeader) -> bytes:
    """The document of the store's root group."""
    return group_document({ATTRIBUTE: header.to_dict()})


def group_document(attributes: dict[str, Any] | None = None) -> bytes:
    """The document of a group."""
    import zarr

    store: dict[str, Any] = {}
    zarr.create_group(zarr.storage.MemoryStore(store), zarr_format=3, attributes=attributes)
    document: bytes = store[METADATA].to_bytes()
    return document


def array_documents(spec: KVSpec, codec: Codec, geometry: Geometry) -> dict[str, bytes]:
    """The documents of all arrays of one layer group, by the array's name; no rows yet."""
    import zarr
    from zarr.codecs import BytesCodec, Crc32cCodec

    from pagedkv import zarr_plugin

    store: dict[str, Any] = {}
    root = zarr.create_group(zarr.storage.MemoryStore(store), zarr_format=3)
    kv = codec.zarr_codec(spec)
    options: dict[str, Any] = {
        "filters": None,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    }
    root.create_array(
        KV,
        shape=(0, *spec.page_shape),
        shards=(geometry.rows, *spec.page_shape),
        chunks=(1, 1, *spec.layer_shape),
        dtype=zarr_plugin.BFloat16() if spec.dtype == "bfloat16" else spec.dtype,
        serializer=zarr_plugin.Int8ZarrCodec.from_dict(kv) if kv["name"] != "bytes" else kv,
        compressors=[*codec.zarr_compressors(spec), Crc32cCodec()],
        fill_value=0,
        dimension_names=KV_DIMENSIONS,
        **options,
    )
    record_nbytes = geometry.record_dtype.itemsize
    root.create_array(
        CATALOG,
        shape=(0, record_nbytes),
        chunks=(geometry.rows, record_nbytes),
        dtype="uint8",
        compressors=[Crc32cCodec()],
        fill_value=0,
        dimension_names=CATALOG_DIMENSIONS,
        **options,
    )
    for column in derived_columns(spec.page_tokens):
        root.create_array(
            column.name,
            shape=(0, *column.row_shape),
            chunks=(geometry.rows, *column.row_shape),
            dtype=column.dtype,
            serializer=BytesCodec(endian="little"),
            compressors=None,
            fill_value=column.fill_value,
            dimension_names=column.dimensions,
            **options,
        )
    root.create_array(
        EVICTED,
        shape=EVICTED_SHAPE,
        chunks=EVICTED_SHAPE,
        dtype="uint8",
        compressors=None,
        fill_value=0,
        dimension_names=EVICTED_DIMENSIONS,
        **options,
    )
    suffix = f"/{METADATA}"
    return {
        key.removesuffix(suffix): buffer.to_bytes()
        for key, buffer in store.items()
        if key.endswith(suffix)
    }
