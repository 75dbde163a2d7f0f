"""Stores of every released format version open for ever, and read equal to the bit."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import REPOSITORY, all_files, make_key, make_pages

from pagedkv.format import PageEntry
from pagedkv.store import PageStore
from pagedkv.verify import verify_store

DATA = Path(__file__).parent / "data"
STORES = sorted(path.relative_to(DATA) for path in DATA.glob("v*/*.zarr"))


def expected_pages(name: Path) -> dict[str, str]:
    manifest = json.loads((DATA / name.parent / "manifest.json").read_text())
    pages: dict[str, str] = manifest[name.stem]
    return pages


def stored_pages(store: PageStore) -> dict[str, str]:
    """SHA-256 of each page by key."""
    found = {}
    for row, entry in store.entries():
        out = np.empty(store.specs[row.group].page_shape, store.specs[row.group].np_dtype)
        store.read([row], [out])
        found[entry.key.hex()] = hashlib.sha256(out.tobytes()).hexdigest()
    return found


def test_there_are_stores_of_each_codec() -> None:
    assert [str(name) for name in STORES] == [
        "v1/bfloat16.zarr",
        "v1/int8.zarr",
        "v1/lossless.zarr",
        "v1/raw.zarr",
    ]


@pytest.mark.parametrize("name", STORES, ids=str)
def test_an_old_store_reads_equal_and_is_not_changed(name: Path) -> None:
    before = all_files(DATA / name)
    with PageStore.open(DATA / name, mode="r") as store:
        assert stored_pages(store) == expected_pages(name)
        assert [entry.num_tokens for _, entry in store.entries()] == [4, 4, 4, 4, 4, 2, 4]
        tokens = [entry.tokens for _, entry in store.entries()]
        assert tokens[-1] is None
        assert np.concatenate([ids for ids in tokens if ids is not None]).tolist() == list(
            range(100, 122)
        )
    assert verify_store(DATA / name).findings == ()
    assert all_files(DATA / name) == before


@pytest.mark.parametrize("name", STORES, ids=str)
def test_an_old_store_can_be_written(tmp_path: Path, no_fsync: None, name: Path) -> None:
    path = Path(shutil.copytree(DATA / name, tmp_path / "cache.zarr"))
    with PageStore.open(path) as store:
        entry = PageEntry(key=make_key(1), num_tokens=4)
        store.write(0, [entry], make_pages(store.specs[0], 1))
        pages = stored_pages(store)
        assert pages.pop(make_key(1).hex())
        assert pages == expected_pages(name)
    assert verify_store(path).findings == ()


@pytest.mark.parametrize("name", [name for name in STORES if name.stem != "lossless"], ids=str)
def test_the_reader_of_the_format_document_reads_an_old_store(name: Path) -> None:
    document = (REPOSITORY / "FORMAT.md").read_text()
    (reader,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(reader, "FORMAT.md", "exec"), names)
    found = {
        key.hex(): hashlib.sha256(page.tobytes()).hexdigest()
        for _, key, _, page in names["read_pages"](DATA / name)
    }
    assert found == expected_pages(name)
