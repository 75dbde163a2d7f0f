"""Documents of a lane's arrays: missing ones are made, lengths run ahead, all else stays."""

import json
from pathlib import Path
from typing import Any

import pytest
from store_samples import make_spec

from pagedkv.codec import Raw
from pagedkv.format import CATALOG, EVICTED, KV, Geometry
from pagedkv.lane_arrays import LaneArrays
from pagedkv.segment import SegmentFormat

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()
ROWS = 10
FORM = SegmentFormat(SPEC, Raw(), Geometry.of(SPEC, Raw(), ROWS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def arrays(folder: Path) -> LaneArrays:
    made = LaneArrays(folder, FORM)
    made.make_missing()
    return made


def document(folder: Path, array: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / array / "zarr.json").read_text())
    return read


def lengths(arrays: LaneArrays) -> set[int | None]:
    return {arrays.num_rows(array) for array in arrays.num_dimensions}


def test_all_documents_are_made_once(folder: Path) -> None:
    arrays = LaneArrays(folder, FORM)
    assert lengths(arrays) == {None}
    likely_nbytes = arrays.missing_nbytes()
    arrays.make_missing()
    assert 0 < sum(path.stat().st_size for path in folder.rglob("zarr.json")) <= likely_nbytes
    assert lengths(arrays) == {0}
    before = {path: path.stat().st_ino for path in folder.rglob("zarr.json")}
    assert arrays.missing_nbytes() == 0
    arrays.make_missing()
    assert {path: path.stat().st_ino for path in folder.rglob("zarr.json")} == before


@pytest.mark.parametrize("array", [KV, CATALOG, EVICTED, "tokens"])
@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"node_type": "array", "shape": []}'])
def test_a_torn_document_is_made_anew(
    arrays: LaneArrays, folder: Path, array: str, text: str
) -> None:
    whole = document(folder, array)
    (folder / array / "zarr.json").write_text(text)
    assert arrays.num_rows(array) is None
    arrays.make_missing()
    assert document(folder, array) == whole


def test_arrays_grow_in_steps_and_only_if_they_must(arrays: LaneArrays, folder: Path) -> None:
    before = sum(path.stat().st_size for path in folder.rglob("zarr.json"))
    assert arrays.growth_nbytes(1) > 0
    growth = arrays.grow(1)
    assert sum(path.stat().st_size for path in folder.rglob("zarr.json")) == before + growth
    assert growth <= arrays.growth_nbytes(10**6)
    (num_rows,) = lengths(arrays)
    assert num_rows is not None
    assert num_rows > ROWS
    assert arrays.growth_nbytes(num_rows // ROWS) == arrays.grow(num_rows // ROWS) == 0
    assert lengths(arrays) == {num_rows}
    arrays.grow(num_rows // ROWS + 1)
    (longer,) = lengths(arrays)
    assert longer is not None
    assert longer > num_rows


def test_trimming_ends_the_arrays_where_it_is_told(arrays: LaneArrays, folder: Path) -> None:
    ring = document(folder, EVICTED)
    arrays.grow(3)
    arrays.trim(3)
    assert lengths(arrays) == {3 * ROWS}
    assert document(folder, KV)["shape"] == [3 * ROWS, *SPEC.page_shape]
    assert document(folder, EVICTED) == ring
    assert arrays.growth_nbytes(3) == 0
    assert arrays.growth_nbytes(4) > 0


def test_what_people_noted_in_a_document_stays(arrays: LaneArrays, folder: Path) -> None:
    noted = {**document(folder, KV), "attributes": {"mine": 1}}
    (folder / KV / "zarr.json").write_text(json.dumps(noted))
    arrays.grow(1)
    assert document(folder, KV)["attributes"] == {"mine": 1}


def test_a_document_that_is_damaged_meanwhile_is_made_anew_when_they_grow(
    arrays: LaneArrays, folder: Path
) -> None:
    (folder / "key/zarr.json").write_text("")
    arrays.grow(1)
    (num_rows,) = lengths(arrays)
    assert num_rows is not None
    assert num_rows > ROWS
