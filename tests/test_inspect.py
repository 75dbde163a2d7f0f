"""What ``pagedkv info`` and ``pagedkv ls`` tell of a store."""

import time
from pathlib import Path

import numpy as np
import pytest
from store_samples import all_files, make_entries, make_key, make_pages, make_spec

import pagedkv as pk
from pagedkv import format as fmt
from pagedkv.errors import StoreError
from pagedkv.format import PageEntry
from pagedkv.inspect import store_info
from pagedkv.listing import PageRun, list_runs
from pagedkv.spec import PageKey
from pagedkv.store import PageStore
from pagedkv.stored_pages import Start

SPEC = make_spec()
TOKENS = np.arange(24)
"""Six pages of four tokens."""
BRANCH = np.concatenate([TOKENS[:12], TOKENS[:8] + 500])
"""Three pages of the same, two others."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


def entries_of(tokens: "np.typing.NDArray[np.int64]") -> list[PageEntry]:
    keys = pk.page_keys(SPEC, tokens)
    return [
        PageEntry(key=key, parent=parent, tokens=ids, num_tokens=len(ids))
        for key, parent, ids in zip(keys, keys.parents, keys.tokens, strict=True)
    ]


MAIN, OTHER = entries_of(TOKENS), entries_of(BRANCH)
TAIL = PageEntry(
    key=make_key(1), parent=MAIN[-1].key, tokens=np.array([7, 8], np.int32), num_tokens=2
)
OPAQUE = PageEntry(key=make_key(2), num_tokens=4)
ORPHANS = make_entries(SPEC, 2, start=10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two prompts that part after three pages, a tail, an opaque page, and two without a prefix."""
    path = tmp_path / "cache.zarr"
    with PageStore.open(path, SPEC, max_nbytes="1MiB") as store:
        for entries in (MAIN, OTHER[3:], [TAIL, OPAQUE], ORPHANS):
            store.write(0, entries, make_pages(SPEC, len(entries)))
    return path


def test_info_counts_pages_bytes_and_lanes(path: Path) -> None:
    before, now = all_files(path), time.time_ns()
    info = store_info(path)
    assert all_files(path) == before
    (group,) = info.groups
    assert group.spec == SPEC
    assert (group.num_rows, group.num_pages) == (12, 12)
    assert (group.num_full_pages, group.num_tails, group.num_opaque_pages) == (11, 1, 1)
    assert group.num_dead_pages == 2
    assert group.pool_nbytes == 12 * SPEC.page_nbytes
    assert group.num_segments == 5
    assert group.dead_nbytes == 0
    assert info.nbytes == sum(map(len, before.values()))
    assert group.kv_nbytes == sum(len(data) for name, data in before.items() if "/kv/c." in name)
    assert info.fill == info.nbytes / 2**20
    assert (info.codec, info.store_tokens) == ({"name": "raw"}, True)
    assert info.oldest_ns is not None
    assert info.newest_ns is not None
    assert now - 60 * 10**9 < info.oldest_ns <= info.newest_ns < now
    (lane,) = info.lanes
    assert not lane.is_held
    assert (lane.num_segments, lane.num_pages) == (5, 12)
    assert lane.last_writer.startswith("process ")


def test_info_tells_what_was_evicted_last(path: Path) -> None:
    assert store_info(path).evictions == ()
    with PageStore.open(path) as store:
        store.collect("1KiB")
    evictions = store_info(path).evictions
    assert len(evictions) == 10
    known = {entry.key for entry in (*MAIN, *OTHER, TAIL, OPAQUE, *ORPHANS)}
    assert {page.key for page in evictions} <= known
    assert [page.time_ns for page in evictions] == sorted(
        (page.time_ns for page in evictions), reverse=True
    )


def test_info_tells_who_writes_and_counts_copies(path: Path) -> None:
    with PageStore.open(path) as store:
        assert store_info(path).lanes[0].is_held
        lane = path / "lane-0001"
        lane.mkdir()
    (path / "lane-0000" / "group-0").rename(lane / "group-0")
    with PageStore.open(path) as store:  # lane 0, which is empty now
        assert store.num_pages == 12
    info = store_info(path)
    assert [one.num_pages for one in info.lanes] == [0, 12]
    assert info.groups[0].num_rows == 12


def test_info_counts_bytes_of_no_page(path: Path) -> None:
    group = path / "lane-0000" / "group-0"
    (group / "catalog" / "c.0.0").unlink()
    nbytes = (group / "kv" / fmt.chunk_name(0, 6)).stat().st_size
    assert store_info(path).groups[0].dead_nbytes == nbytes


def test_info_counts_torn_segments(path: Path) -> None:
    chunk = path / "lane-0000" / "group-0" / "catalog" / "c.1.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    info = store_info(path)
    assert info.num_torn_chunks == 1
    assert info.groups[0].num_pages == 10


def test_info_of_an_empty_store(tmp_path: Path) -> None:
    PageStore.open(tmp_path / "cache.zarr", SPEC).close()
    info = store_info(tmp_path / "cache.zarr")
    assert (info.groups[0].num_pages, info.oldest_ns, info.fill) == (0, None, None)
    assert list_runs(tmp_path / "cache.zarr").runs == ()


def shape(run: PageRun) -> tuple[object, ...]:
    return (run.level, run.start, run.num_pages, run.depth, run.start_token, run.num_tokens)


def test_ls_shows_where_prefixes_part(path: Path) -> None:
    listing = list_runs(path)
    assert [shape(run) for run in listing.runs] == [
        (0, Start.FIRST, 3, 0, 0, 12),
        (1, Start.AFTER, 4, 3, 12, 14),
        (1, Start.AFTER, 2, 3, 12, 8),
        (0, Start.OPAQUE, 1, 0, 0, 4),
        (0, Start.ORPHAN, 2, 0, 0, 8),
    ]
    first, main, branch, opaque, orphan = listing.runs
    assert (first.parent, first.first_key) == (SPEC.root_key(), MAIN[0].key)
    assert (main.parent, main.last_key, main.ends_in_tail) == (MAIN[2].key, TAIL.key, True)
    assert branch.first_tokens == (500, 501, 502, 503)
    assert (opaque.parent, opaque.first_tokens) == (None, ())
    assert orphan.parent == make_key(9)
    assert (first.lane, first.row) == (0, 0)
    assert (listing.num_pages, listing.num_runs) == (12, 5)


def test_ls_can_list_single_pages_and_stop_early(path: Path) -> None:
    listing = list_runs(path, single=True, limit=4)
    assert [(run.level, run.depth) for run in listing.runs] == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert [run.first_key for run in listing.runs] == [entry.key for entry in MAIN[:4]]
    assert (listing.num_pages, listing.num_runs) == (12, 12)
    with pytest.raises(ValueError, match="the limit is -1"):
        list_runs(path, limit=-1)


def test_ls_of_pages_that_follow_each_other_in_a_circle_ends(tmp_path: Path) -> None:
    one, two = PageKey(bytes(32)), PageKey(bytes([1] * 32))
    entries = [
        PageEntry(key=one, parent=two, num_tokens=4),
        PageEntry(key=two, parent=one, num_tokens=4),
    ]
    with PageStore.open(tmp_path / "cache.zarr", SPEC) as store:
        store.write(0, entries, make_pages(SPEC, 2))
    listing = list_runs(tmp_path / "cache.zarr")
    assert sum(run.num_pages for run in listing.runs) == listing.num_pages == 2
    assert store_info(tmp_path / "cache.zarr").groups[0].num_dead_pages == 2


def test_a_long_prompt_is_one_run(tmp_path: Path) -> None:
    entries = entries_of(np.arange(4 * 3000))
    with PageStore.open(tmp_path / "cache.zarr", SPEC) as store:
        store.write(0, entries, make_pages(SPEC, len(entries)))
    (run,) = list_runs(tmp_path / "cache.zarr").runs
    assert run.num_pages == 3000
    assert len(list_runs(tmp_path / "cache.zarr", single=True).runs) == 3000


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    for look in (store_info, list_runs):
        with pytest.raises(StoreError, match="there is no store at"):
            look(tmp_path / "nowhere")
        with pytest.raises(StoreError, match="there is no store at"):
            look(tmp_path)
