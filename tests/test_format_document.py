"""FORMAT.md is enough to read a store: its reader knows nothing of this library."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import REPOSITORY, bits, empty_like, make_pages, make_spec

import pagedkv as pk
from pagedkv import format as fmt
from pagedkv.codec import Codec, Int8, Raw
from pagedkv.format import PageEntry
from pagedkv.spec import KVSpec
from pagedkv.store import PageStore

DOCUMENT = (REPOSITORY / "FORMAT.md").read_text()
(READER,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
STORES: list[tuple[str, Codec]] = [
    ("float32", Raw()),
    ("float16", Raw()),
    ("bfloat16", Raw()),
    ("float32", Int8()),
    ("float16", Int8(key_scales="token")),
    ("bfloat16", Int8(value_scales="channel")),
]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


@pytest.fixture(scope="module")
def read_pages() -> Callable[[Path], Any]:
    names: dict[str, Any] = {}
    exec(compile(READER, "FORMAT.md", "exec"), names)
    function: Callable[[Path], Any] = names["read_pages"]
    return function


def make_store(path: Path, spec: KVSpec, codec: Codec) -> dict[bytes, tuple[Any, bytes]]:
    """Ten pages of a prompt, a tail, and an opaque page; what the store says of each key."""
    keys = pk.page_keys(spec, np.arange(40), salt=b"tenant")
    entries = [
        PageEntry(key=key, parent=parent, tokens=ids, num_tokens=4, salt=b"tenant")
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]
    entries.append(
        PageEntry(
            key=pk.PageKey(b"t" * 32), parent=keys[9], tokens=np.array([5], np.int32), num_tokens=1
        )
    )
    entries.append(PageEntry(key=pk.PageKey(b"o" * 32), num_tokens=4))
    pages = make_pages(spec, len(entries))
    with PageStore.open(path, spec, codec=codec) as store:
        store.write(0, entries[:6], pages[:6])
        rows = store.write(0, entries, pages)
        out = empty_like(pages)
        store.read(rows, out)
    tokens = [None if entry.tokens is None else entry.tokens.tolist() for entry in entries]
    return {
        entry.key: (ids, bits(page)) for entry, ids, page in zip(entries, tokens, out, strict=True)
    }


def test_the_reader_needs_only_the_standard_library_and_numpy() -> None:
    imports: set[str] = set()
    for node in ast.walk(ast.parse(READER)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add(str(node.module))
    assert imports - {"numpy"} <= sys.stdlib_module_names


@pytest.mark.parametrize(("dtype", "codec"), STORES, ids=str)
def test_the_reader_reads_every_page_equal(
    tmp_path: Path, read_pages: Callable[[Path], Any], dtype: str, codec: Codec
) -> None:
    spec = make_spec(dtype=dtype, num_layers=5, layer_range=(1, 4), head_range=(0, 1))
    expected = make_store(tmp_path / "cache.zarr", spec, codec)
    found = {
        key: (ids, page.tobytes())
        for group, key, ids, page in read_pages(tmp_path / "cache.zarr")
        if group == spec.group
    }
    assert found == expected


def test_the_reader_reads_all_groups_and_a_single_kind(
    tmp_path: Path, read_pages: Callable[[Path], Any]
) -> None:
    specs = (make_spec(num_kinds=1, group="a"), make_spec(head_dim=16, group="b"))
    pages = [make_pages(spec, 3, seed) for seed, spec in enumerate(specs)]
    with PageStore.open(tmp_path / "cache.zarr", specs) as store:
        for group in (0, 1):
            entries = [
                PageEntry(key=pk.PageKey(bytes([group, n] * 16)), num_tokens=4) for n in range(3)
            ]
            store.write(group, entries, pages[group])
    found = {(group, key): page for group, key, _, page in read_pages(tmp_path / "cache.zarr")}
    assert {
        (spec.group, bytes([group, n] * 16)): bits(pages[group][n])
        for group, spec in enumerate(specs)
        for n in range(3)
    } == {where: page.tobytes() for where, page in found.items()}


def test_the_reader_gives_no_damaged_page(
    tmp_path: Path, read_pages: Callable[[Path], Any]
) -> None:
    path = tmp_path / "cache.zarr"
    expected = make_store(path, make_spec(), Raw())
    group = path / "lane-0000" / "group-0"
    segment, chunk = group / "kv" / fmt.chunk_name(0, 6), group / "catalog" / "c.1.0"
    for file in (segment, chunk):
        data = bytearray(file.read_bytes())
        data[100] ^= 4
        file.write_bytes(data)
    (path / "zarr.json").write_bytes(b"")  # the lane's copy of the header counts
    found = {key: page.tobytes() for _, key, _, page in read_pages(path)}
    assert len(found) == len(expected) - 1 - 2
    assert all(expected[key][1] == page for key, page in found.items())


def test_the_reader_refuses_another_version(
    tmp_path: Path, read_pages: Callable[[Path], Any]
) -> None:
    (tmp_path / "zarr.json").write_text('{"attributes": {"pagedkv": {"format_version": 2}}}')
    with pytest.raises(ValueError, match="no store of version 1"):
        list(read_pages(tmp_path))


def test_the_document_says_what_a_record_looks_like() -> None:
    """Its table of offsets is that of the code."""
    dtype = fmt.Geometry.of(make_spec(), Raw(), 1).record_dtype
    assert dtype.fields is not None
    offsets = sorted(offset for _, offset, *_ in dtype.fields.values())
    table = DOCUMENT.split("## Catalogue chunk")[1].split("The root key is")[0]
    stated = [int(offset) for offset in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert stated == [offset for offset in offsets if offset <= 136]
