import os
import threading
from pathlib import Path

import pytest
from store_samples import make_entries, make_key, make_pages, make_spec

from pagedkv import contents as module
from pagedkv import format as fmt
from pagedkv.contents import Contents, Place
from pagedkv.format import StoreRow
from pagedkv.lane import LaneGroup, Segment
from pagedkv.root import read_header
from pagedkv.segment_map import SegmentMap
from pagedkv.store import PageStore

SPECS = [make_spec(), make_spec(group="windowed")]
ENTRIES = make_entries(SPECS[0], 10)
PAGES = make_pages(SPECS[0], 10)
FIRST: Place = (0, 0, 0)

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with ten pages in three segments of one spec, and three in one of another."""
    path = tmp_path / "cache.zarr"
    with PageStore.open(path, SPECS) as store:
        store.write(0, ENTRIES, PAGES)
        store.write(1, ENTRIES[:3], PAGES[:3])
    return path


@pytest.fixture
def contents(path: Path) -> Contents:
    contents = open_contents(path)
    contents.check_invariants()
    return contents


def open_contents(path: Path) -> Contents:
    header = read_header(path)
    assert header is not None
    contents = Contents(path, header)
    contents.load_all()
    return contents


def segment(contents: Contents, place: Place = FIRST) -> Segment:
    return contents.groups[place[0], place[1]].segments[place[2]]


def test_all_pages_of_all_specs_are_known(contents: Contents) -> None:
    assert [len(index) for index in contents.indexes] == [10, 3]
    assert contents.indexes[0].get(make_key(5)) == StoreRow(0, 0, 5)
    assert contents.indexes[1].get(make_key(2)) == StoreRow(0, 1, 2)
    places = [place for place, _ in contents.segments()]
    assert places == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)]
    assert [contents.rows_of(number) for number in (0, 1)] == [4, 4]


def test_loading_again_changes_nothing(contents: Contents) -> None:
    contents.load_all()
    contents.check_invariants()
    assert len(contents.indexes[0]) == 10


def test_the_file_of_a_segment_is_named(contents: Contents, path: Path) -> None:
    folder = path / "lane-0000/group-0"
    assert contents.path_of((0, 0, 2)) == folder / "catalog/c.2.0"
    assert contents.path_of((0, 0, 2), fmt.KV) == folder / "kv/c.2.0.0.0.0.0"
    assert contents.path_of((0, 0, 2)).exists()


def test_a_withdrawn_segment_is_not_found_but_there(contents: Contents) -> None:
    contents.withdraw((0, 0, 1))
    assert contents.indexes[0].get(make_key(5)) is None
    assert contents.indexes[0].get(make_key(3)) == StoreRow(0, 0, 3)
    assert contents.groups[0, 0].locate(5) is not None
    contents.check_invariants()
    contents.restore((0, 0, 1))
    assert contents.indexes[0].get(make_key(5)) == StoreRow(0, 0, 5)
    contents.check_invariants()


def test_a_page_that_was_written_meanwhile_has_the_restored_one_as_its_copy(
    contents: Contents,
) -> None:
    contents.withdraw((0, 0, 1))
    contents.indexes[0].add(make_key(5), StoreRow(0, 0, 8))
    contents.restore((0, 0, 1))
    assert contents.indexes[0].get(make_key(5)) == StoreRow(0, 0, 8)
    contents.indexes[0].remove(make_key(5), StoreRow(0, 0, 8))
    assert contents.indexes[0].get(make_key(5)) == StoreRow(0, 0, 5)


@pytest.mark.xfail(strict=True, reason="what was found damaged comes back with its segment")
def test_a_page_that_was_found_damaged_is_not_restored(contents: Contents) -> None:
    contents.indexes[0].remove(make_key(5), StoreRow(0, 0, 5))  # as a read does
    contents.withdraw((0, 0, 1))
    contents.restore((0, 0, 1))
    assert contents.indexes[0].get(make_key(5)) is None


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_dropped_segment_is_forgotten(contents: Contents, *, withdrawn: bool) -> None:
    contents.map_of(FIRST, segment(contents))
    contents.parents_of(FIRST, segment(contents))
    if withdrawn:
        contents.withdraw(FIRST)
    contents.drop(FIRST)
    assert [len(index) for index in contents.indexes] == [6, 3]
    assert contents.groups[0, 0].locate(0) is None
    assert contents.kept_map(FIRST) is None
    contents.check_invariants()


def test_maps_beyond_the_bound_are_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MAPS_NBYTES", 60)
    contents = open_contents(path)
    for _ in range(2):
        for place, one in contents.segments():
            found = contents.map_of(place, one)
            assert len(found.holds) == len(one.keys)
            assert contents.kept_map(place) is found
            contents.check_invariants()
    kept = [place for place, _ in contents.segments() if contents.kept_map(place)]
    assert len(kept) == 1


def test_the_map_of_a_torn_or_replaced_chunk_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MAPS_NBYTES", 0)
    contents = open_contents(path)
    chunk = contents.path_of(FIRST)
    data = chunk.read_bytes()
    os.truncate(chunk, 10)
    with pytest.raises(ValueError, match="it has 10 bytes"):
        contents.map_of(FIRST, segment(contents))
    other = make_other_chunk(path)
    chunk.write_bytes(other)
    with pytest.raises(ValueError, match="other pages than when it was opened"):
        contents.map_of(FIRST, segment(contents))
    chunk.unlink()
    with pytest.raises(FileNotFoundError):
        contents.map_of(FIRST, segment(contents))
    chunk.write_bytes(data)
    assert contents.map_of(FIRST, segment(contents)).holds.all()


def make_other_chunk(path: Path) -> bytes:
    """The first chunk of a store of the same specs with other pages."""
    place = path.with_name("other.zarr")
    with PageStore.open(place, SPECS) as store:
        store.write(0, ENTRIES[6:], PAGES[6:])
    return (place / "lane-0000/group-0/catalog/c.0.0").read_bytes()


@pytest.mark.xfail(strict=True, reason="a map is kept though its segment was dropped meanwhile")
def test_the_map_of_a_segment_that_is_dropped_meanwhile_is_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MAPS_NBYTES", 0)
    contents = open_contents(path)
    really_load = LaneGroup.load_map

    def load_map(group: LaneGroup, one: Segment) -> SegmentMap:
        found = really_load(group, one)
        contents.drop(FIRST)
        return found

    monkeypatch.setattr(LaneGroup, "load_map", load_map)
    contents.map_of(FIRST, segment(contents))
    contents.check_invariants()


def test_parents_are_those_of_the_catalogue(contents: Contents) -> None:
    for place, one in contents.segments():
        if place[1] == 0:
            first = place[2] * 4
            expected = [ENTRIES[first + row].parent for row in range(len(one.keys))]
            assert contents.parents_of(place, one) == expected
            assert contents.parents_of(place, one) == expected


def test_parents_that_cannot_be_read_are_unknown(contents: Contents) -> None:
    os.truncate(contents.path_of(FIRST), 10)
    assert contents.parents_of(FIRST, segment(contents)) == [None] * 4
    contents.path_of((0, 0, 1)).unlink()
    assert contents.parents_of((0, 0, 1), segment(contents, (0, 0, 1))) == [None] * 4


def test_each_use_is_later_than_all_before(contents: Contents) -> None:
    times = [contents.tick() for _ in range(3)]
    assert times == sorted(set(times))


def test_keys_are_looked_up_while_segments_come_and_go(contents: Contents) -> None:
    stop, wrong = threading.Event(), []

    def look() -> None:
        try:
            while not stop.is_set():
                row = contents.indexes[0].get(make_key(5))
                found = contents.indexes[0].get_many([make_key(3), make_key(5)]).tolist()
                assert row in (None, StoreRow(0, 0, 5))
                assert found[0] == 3
                assert found[1] in (-1, 5)
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        with contents.lock:
            contents.withdraw((0, 0, 1))
        with contents.lock:
            contents.restore((0, 0, 1))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    contents.check_invariants()


class TestRefresh:
    """What tests/test_store_refresh.py does with real processes, step by step."""

    def add(self, path: Path, number: int) -> None:
        with PageStore.open(path) as store:
            store.write(0, make_entries(SPECS[0], 1, start=number), PAGES[:1])

    def test_nothing_new_is_no_change(self, contents: Contents) -> None:
        assert contents.refresh(None) == (False, [])
        assert contents.refresh(None) == (False, [])

    def test_new_and_missing_segments_are_noticed(self, contents: Contents, path: Path) -> None:
        contents.refresh(None)
        self.add(path, 50)
        gone = segment(contents, (0, 0, 1))
        contents.path_of((0, 0, 1)).unlink()
        assert contents.refresh(None) == (True, [gone])
        assert contents.indexes[0].get(make_key(50)) == StoreRow(0, 0, 12)
        assert contents.indexes[0].get(make_key(5)) is None
        contents.check_invariants()
        assert contents.refresh(None) == (False, [])

    def test_the_own_lane_is_not_looked_at(self, contents: Contents, path: Path) -> None:
        contents.refresh(0)
        self.add(path, 50)
        assert contents.refresh(0) == (False, [])
        assert contents.refresh(None)[0]

    def test_a_torn_chunk_is_counted_once(self, contents: Contents, path: Path) -> None:
        self.add(path, 50)
        os.truncate(path / "lane-0000/group-0/catalog/c.3.0", 10)
        assert contents.refresh(None) == (False, [])
        assert contents.refresh(None) == (False, [])
        assert contents.groups[0, 0].num_torn_chunks == 1

    def test_a_segment_whose_record_is_not_there_yet_is_found_later(
        self, contents: Contents, path: Path
    ) -> None:
        self.add(path, 50)
        chunk = path / "lane-0000/group-0/catalog/c.3.0"
        data = chunk.read_bytes()
        chunk.unlink()  # as between the two renames of a commit
        assert contents.refresh(None) == (False, [])
        assert contents.groups[0, 0].next_segment == 4
        chunk.write_bytes(data)
        assert contents.refresh(None)[0]
        assert contents.indexes[0].get(make_key(50)) == StoreRow(0, 0, 12)
