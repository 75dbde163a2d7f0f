"""``verify`` names exactly what is damaged, and ``repair`` drops exactly that."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from store_samples import (
    all_files,
    bits,
    empty_like,
    make_entries,
    make_pages,
    make_spec,
    python,
    run_python,
    same_bits,
)

from pagedkv import files
from pagedkv import format as fmt
from pagedkv.codec import Codec, Int8, Lossless, Raw
from pagedkv.errors import FormatVersionError, PagedKVError, StoreError
from pagedkv.evictions import RECORD_DTYPE, EvictionReason, EvictionRing
from pagedkv.findings import Cost, Damage, VerifyReport
from pagedkv.format import EVICTED
from pagedkv.lane_access import lane_locked
from pagedkv.spec import PageKey
from pagedkv.store import PageStore
from pagedkv.verify import verify_store

SPEC = make_spec()
PAGES = make_pages(SPEC, 12)
ENTRIES = make_entries(SPEC, 12)
KEYS = [entry.key for entry in ENTRIES]
LANE = Path("lane-0000")
GROUP = LANE / "group-0"
SEGMENTS = [GROUP / "kv" / fmt.chunk_name(n, 6) for n in range(3)]
CHUNKS = [GROUP / "catalog" / fmt.chunk_name(n, 2) for n in range(3)]
GEOMETRY = fmt.Geometry.of(SPEC, Raw(), 4)
RECORD = GEOMETRY.record_dtype.itemsize


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of twelve pages in three segments of four."""
    return make_store(tmp_path / "cache.zarr")


def make_store(path: Path, codec: Codec | None = None) -> Path:
    with PageStore.open(path, SPEC, codec=codec) as store:
        store.write(0, ENTRIES, PAGES)
    return path


def flip(file: Path, at: int, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def truncate(file: Path, nbytes: int) -> None:
    os.truncate(file, nbytes)


def zero(file: Path, start: int, stop: int) -> None:
    data = bytearray(file.read_bytes())
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)


def swap(left: Path, right: Path) -> None:
    data = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(data)


def edit(file: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def lost_rows(report: VerifyReport) -> list[int | None]:
    return [finding.row for finding in report.findings if finding.cost is Cost.PAGE]


def served(path: Path) -> list[int]:
    """Numbers of the pages that the store gives back, each of them checked, by two readers."""
    good = []
    with PageStore.open(path, mode="r") as store:
        kv = zarr.open_group(path, mode="r")[f"{GROUP}/kv"]
        for number, key in enumerate(KEYS):
            row = store.find(key)
            if row is not None:
                out = empty_like(PAGES[:1])
                store.read([row], out)
                assert same_bits(out, PAGES[number : number + 1])
                assert bits(kv[row.row]) == bits(PAGES[number])
                good.append(number)
        assert kv[:].shape[0] == kv.shape[0]  # rows without a page, too
    return good


def without(*lost: int) -> list[int]:
    return [number for number in range(12) if number not in lost]


@pytest.mark.parametrize("codec", [Raw(), Int8(), Lossless()], ids=str)
def test_a_good_store_is_clean_and_every_byte_of_it_is_read(tmp_path: Path, codec: Codec) -> None:
    path = make_store(tmp_path / "cache.zarr", codec)
    before = all_files(path)
    steps: list[tuple[int, int]] = []
    report = verify_store(path, progress=lambda *step: steps.append(step))
    assert report.findings == ()
    assert report.is_clean
    assert (report.num_segments, report.num_pages, report.num_good_pages) == (3, 12, 12)
    chunks = {name: data for name, data in before.items() if "/c." in name}
    assert report.nbytes_read == sum(map(len, chunks.values()))
    assert steps[-1] == (report.nbytes_read, report.nbytes_read)
    assert all_files(path) == before


def test_a_repair_of_a_good_store_changes_nothing(path: Path) -> None:
    before = all_files(path)
    assert verify_store(path, repair=True).findings == ()
    assert all_files(path) == before


Break = Callable[[Path], object]
PAGE_DAMAGES: dict[str, tuple[Break, Damage, list[int], Path]] = {
    "a bit of a payload": (
        lambda p: flip(p / SEGMENTS[1], GEOMETRY.page_nbytes + GEOMETRY.chunk_nbytes + 9),
        Damage.LAYER,
        [5],
        SEGMENTS[1],
    ),
    "a bit of a trailer": (
        lambda p: flip(p / SEGMENTS[1], 2 * GEOMETRY.page_nbytes - 1),
        Damage.LAYER,
        [5],
        SEGMENTS[1],
    ),
    "a short segment": (
        lambda p: truncate(p / SEGMENTS[2], 2 * GEOMETRY.page_nbytes + 5),
        Damage.LAYER,
        [10, 11],
        SEGMENTS[2],
    ),
    "a zeroed run": (
        lambda p: zero(p / SEGMENTS[0], 0, GEOMETRY.page_nbytes + 50),
        Damage.LAYER,
        [0, 1],
        SEGMENTS[0],
    ),
    "two segments swapped": (
        lambda p: swap(p / SEGMENTS[0], p / SEGMENTS[2]),
        Damage.LAYER,
        [0, 1, 2, 3, 8, 9, 10, 11],
        SEGMENTS[0],
    ),
    "a segment deleted": (
        lambda p: (p / SEGMENTS[1]).unlink(),
        Damage.SEGMENT,
        [4, 5, 6, 7],
        SEGMENTS[1],
    ),
    "a segment is a folder": (
        lambda p: ((p / SEGMENTS[1]).unlink(), (p / SEGMENTS[1]).mkdir()),
        Damage.SEGMENT,
        [4, 5, 6, 7],
        SEGMENTS[1],
    ),
    "a bit of a record": (
        lambda p: flip(p / CHUNKS[1], 3 * RECORD + 70),
        Damage.RECORD,
        [7],
        CHUNKS[1],
    ),
    "a zeroed record": (
        lambda p: zero(p / CHUNKS[1], RECORD, 2 * RECORD),
        Damage.RECORD,
        [5],
        CHUNKS[1],
    ),
    "a short catalogue chunk": (
        lambda p: truncate(p / CHUNKS[0], 2 * RECORD + 5),
        Damage.RECORD,
        [2, 3],
        CHUNKS[0],
    ),
    "an empty catalogue chunk": (
        lambda p: truncate(p / CHUNKS[0], 0),
        Damage.RECORD,
        [0, 1, 2, 3],
        CHUNKS[0],
    ),
    "two catalogue chunks swapped": (
        lambda p: swap(p / CHUNKS[0], p / CHUNKS[1]),
        Damage.RECORD,
        [0, 1, 2, 3, 4, 5, 6, 7],
        CHUNKS[0],
    ),
}


@pytest.mark.parametrize("name", PAGE_DAMAGES)
def test_damaged_pages_are_named_and_exactly_they_are_dropped(path: Path, name: str) -> None:
    damage, kind, lost, file = PAGE_DAMAGES[name]
    damage(path)
    before = all_files(path)
    report = verify_store(path)
    assert all_files(path) == before
    assert not report.is_clean
    assert lost_rows(report) == lost
    assert (report.num_pages, report.num_good_pages) == (12, 12 - len(lost))
    first = next(finding for finding in report.findings if finding.cost is Cost.PAGE)
    assert (first.path, first.damage) == (str(file), kind)
    assert (first.lane, first.group, first.segment) == (0, 0, lost[0] // 4)
    assert first.key == (KEYS[lost[0]] if kind is not Damage.RECORD else None)
    assert (first.layer is not None) == (kind is Damage.LAYER)
    assert str(file) in str(first)

    repaired = verify_store(path, repair=True)
    assert repaired.is_clean
    assert {f.row for f in repaired.findings if f.cost is Cost.PAGE} == set(lost)
    after = verify_store(path)
    assert after.findings == ()
    assert after.num_pages == after.num_good_pages == 12 - len(lost)
    assert served(path) == without(*lost)


def test_the_damaged_layer_is_named(path: Path) -> None:
    flip(path / SEGMENTS[1], GEOMETRY.page_nbytes + 2 * GEOMETRY.chunk_nbytes + 9)
    (finding,) = verify_store(path).findings
    assert (finding.row, finding.layer, finding.key) == (5, 2, KEYS[5])


def test_a_torn_chunk_hides_pages_that_a_repair_brings_back(path: Path) -> None:
    flip(path / CHUNKS[1], -1)  # the chunk's CRC32C: its records are right
    assert served(path) == without(4, 5, 6, 7)
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.cost) == (Damage.CATALOG, Cost.HIDDEN)
    assert verify_store(path, repair=True).is_clean
    assert served(path) == without()


def test_a_segment_without_a_good_page_is_removed(path: Path) -> None:
    truncate(path / SEGMENTS[1], 0)
    assert verify_store(path, repair=True).is_clean
    assert not [name for name in all_files(path) if "/c.1" in name]
    with PageStore.open(path) as store:  # and its rows are never used again
        (row,) = store.write(0, ENTRIES[5:6], PAGES[5:6])
    assert row.row == 12


DERIVED_DAMAGES: dict[str, tuple[Break, Damage, str]] = {
    "a bit of the shard index": (
        lambda p: flip(p / SEGMENTS[1], -20),
        Damage.INDEX,
        str(SEGMENTS[1]),
    ),
    "the index cut off": (
        lambda p: truncate(p / SEGMENTS[1], 4 * GEOMETRY.page_nbytes),
        Damage.INDEX,
        str(SEGMENTS[1]),
    ),
    "bytes behind the index": (
        lambda p: (p / SEGMENTS[1]).write_bytes((p / SEGMENTS[1]).read_bytes() + b"more"),
        Damage.INDEX,
        str(SEGMENTS[1]),
    ),
    "a bit of a column": (
        lambda p: flip(p / GROUP / "tokens" / "c.1.0", 8),
        Damage.COLUMN,
        f"{GROUP}/tokens/c.1.0",
    ),
    "a column's chunk deleted": (
        lambda p: (p / GROUP / "num_tokens" / "c.2").unlink(),
        Damage.COLUMN,
        f"{GROUP}/num_tokens/c.2",
    ),
    "an array's document deleted": (
        lambda p: (p / GROUP / "kv" / "zarr.json").unlink(),
        Damage.DOCUMENT,
        f"{GROUP}/kv/zarr.json",
    ),
    "an array's document torn": (
        lambda p: truncate(p / GROUP / "catalog" / "zarr.json", 99),
        Damage.DOCUMENT,
        f"{GROUP}/catalog/zarr.json",
    ),
    "an array of another type": (
        lambda p: edit(p / GROUP / "kv" / "zarr.json", lambda d: d.update(data_type="float64")),
        Damage.DOCUMENT,
        f"{GROUP}/kv/zarr.json",
    ),
    "an array too short": (
        lambda p: edit(p / GROUP / "kv" / "zarr.json", lambda d: d["shape"].__setitem__(0, 4)),
        Damage.DOCUMENT,
        f"{GROUP}/kv/zarr.json",
    ),
    "a group's document deleted": (
        lambda p: (p / GROUP / "zarr.json").unlink(),
        Damage.DOCUMENT,
        f"{GROUP}/zarr.json",
    ),
    "a lane's document torn": (
        lambda p: truncate(p / LANE / "zarr.json", 10),
        Damage.DOCUMENT,
        f"{LANE}/zarr.json",
    ),
    "the root's document deleted": (
        lambda p: (p / "zarr.json").unlink(),
        Damage.HEADER,
        "zarr.json",
    ),
    "the root's document torn": (
        lambda p: truncate(p / "zarr.json", 200),
        Damage.HEADER,
        "zarr.json",
    ),
    "a header changed": (
        lambda p: edit(
            p / "zarr.json", lambda d: d["attributes"]["pagedkv"].update(segment_rows=[3])
        ),
        Damage.HEADER,
        "zarr.json",
    ),
}


@pytest.mark.parametrize("name", DERIVED_DAMAGES)
def test_what_is_derived_is_rebuilt_and_costs_no_page(path: Path, name: str) -> None:
    damage, kind, file = DERIVED_DAMAGES[name]
    damage(path)
    report = verify_store(path)
    assert [(f.path, f.damage, f.cost) for f in report.findings] == [(file, kind, Cost.DERIVED)]
    assert report.num_good_pages == 12
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()
    assert served(path) == without()


def columns_of(path: Path, number: int) -> list[Path]:
    names = ("key", "parent", "tokens", "num_tokens")
    return [p for name in names for p in (path / GROUP / name).glob(f"c.{number}*")]


def test_columns_that_a_writer_has_not_made_yet_are_no_damage(path: Path) -> None:
    with PageStore.open(path) as store:
        (row,) = store.write(0, make_entries(SPEC, 1, 500), PAGES[:1])
        number = row.row // GEOMETRY.rows
        assert columns_of(path, number) == []
        assert verify_store(path).findings == ()
    assert len(columns_of(path, number)) == 4
    assert verify_store(path).findings == ()


def test_a_process_that_ends_without_closing_leaves_a_clean_store(path: Path) -> None:
    run_python(
        """
import sys
from store_samples import make_entries, make_pages, make_spec
from pagedkv.store import PageStore
store = PageStore.open(sys.argv[1])
store.write(0, make_entries(store.specs[0], 1, 500), make_pages(store.specs[0], 1))
""",
        path,
    )
    report = verify_store(path)
    assert report.findings == ()
    assert report.num_pages == 13


def test_a_column_that_is_something_odd_is_one_finding(path: Path) -> None:
    chunk = path / GROUP / "tokens" / "c.1.0"
    chunk.unlink()
    chunk.symlink_to(chunk.name)  # a loop
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.cost) == (Damage.COLUMN, Cost.DERIVED)
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()


def test_columns_that_no_writer_will_make_are_one_finding_that_costs_nothing(path: Path) -> None:
    columns = columns_of(path, 1)
    before = {column: column.read_bytes() for column in columns}
    for column in columns:
        column.unlink()
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.cost) == (Damage.COLUMN, Cost.NOTHING)
    assert finding.segment == 1
    assert verify_store(path).is_clean  # an ended writer leaves it so
    assert verify_store(path, repair=True).findings[0].repaired
    assert {column: column.read_bytes() for column in columns} == before
    assert verify_store(path).findings == ()


def test_without_any_header_the_store_is_reported_as_closed(path: Path) -> None:
    for file in (path / "zarr.json", path / LANE / "zarr.json"):
        truncate(file, 50)
    for repair in (False, True):
        report = verify_store(path, repair=repair)
        (finding,) = report.findings
        assert (finding.cost, finding.repaired) == (Cost.STORE, False)
        assert not report.is_clean


def test_leftovers_are_removed_and_foreign_files_are_not(path: Path) -> None:
    (path / GROUP / "kv" / ".tmp-c.3.0.0.0.0.0-12345678").write_bytes(b"half")
    (path / GROUP / "kv" / fmt.chunk_name(7, 6)).write_bytes(b"no record")
    (path / GROUP / "kv" / "notes.txt").write_text("mine")
    (path / "README").write_text("mine")
    report = verify_store(path)
    assert {(f.damage, f.cost) for f in report.findings} == {(Damage.LEFTOVER, Cost.NOTHING)}
    assert len(report.findings) == 2
    assert report.foreign == ("README", f"{GROUP}/kv/notes.txt")
    assert verify_store(path, repair=True).is_clean
    after = verify_store(path)
    assert after.findings == ()
    assert after.foreign == report.foreign


def test_a_store_in_use_is_checked_and_its_lane_is_not_repaired(path: Path) -> None:
    flip(path / SEGMENTS[0], 9)
    with PageStore.open(path) as store:
        (path / GROUP / "kv" / ".tmp-being-written").write_bytes(b"half")
        report = verify_store(path, repair=True)
        assert report.busy_lanes == (0,)
        assert lost_rows(report) == [0]
        assert not report.is_clean
        assert len(report.findings) == 1  # a temporary file of a writer at work is none
        out = empty_like(PAGES[:3])
        rows = [store.find(key) for key in KEYS[1:4]]
        store.read([row for row in rows if row is not None], out)
        assert same_bits(out, PAGES[1:4])
    assert verify_store(path, repair=True).is_clean
    assert served(path) == without(0)


def test_an_open_reader_survives_a_repair(path: Path) -> None:
    flip(path / SEGMENTS[0], 9)
    with PageStore.open(path, mode="r") as store:
        rows = [store.find(key) for key in KEYS]
        assert verify_store(path, repair=True).is_clean
        out = empty_like(PAGES[1:])
        store.read([row for row in rows[1:] if row is not None], out)
        assert same_bits(out, PAGES[1:])


def test_what_is_no_store_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        verify_store(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="is no store"):
        verify_store(tmp_path / "empty")
    with pytest.raises(StoreError, match="there is no store at"):
        verify_store(path / "zarr.json")
    with pytest.raises(StoreError, match="is no store"):
        verify_store(path / GROUP)


def test_what_the_system_cannot_read_is_not_dropped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def fail(fd: int, *rest: object) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().match(f"*/{SEGMENTS[1]}"):
            raise OSError(5, "Input/output error")
        return real(fd, *rest)  # type: ignore[arg-type]

    before = all_files(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        report = verify_store(path, repair=True)
    assert {f.damage for f in report.findings} == {Damage.UNREADABLE}
    assert lost_rows(report) == [4, 5, 6, 7]
    assert not report.is_clean
    assert all_files(path) == before


def damages(path: Path, rng: random.Random) -> None:
    """One to three damages of any kind, anywhere in the store."""
    for _ in range(rng.randint(1, 3)):
        files = sorted(p for p in path.rglob("*") if p.is_file())
        file = rng.choice(files)
        size = file.stat().st_size
        start = rng.randrange(size) if size else 0
        match rng.randrange(6):
            case 0 if size:
                flip(file, start, rng.randrange(8))
            case 1:
                truncate(file, start)
            case 2:
                zero(file, start, min(size, start + rng.choice([1, 16, 400])))
            case 3:
                file.unlink()
            case 4:
                swap(file, rng.choice(files))
            case _:
                with file.open("ab") as stream:
                    stream.write(rng.randbytes(rng.choice([1, 100])))


def make_lanes(path: Path, codec: Codec) -> dict[PageKey, list[bytes]]:
    """A store of two lanes, two groups and a used eviction ring; the bits of each key's pages."""
    specs = (SPEC, make_spec(head_dim=4, group="b"))
    pages = [make_pages(spec, 12) for spec in specs]
    PageStore.open(path, specs, codec=codec).close()
    with PageStore.open(path) as store:
        for group in (0, 1):
            store.write(group, ENTRIES[:7], pages[group][:7])
    with lane_locked(path / LANE) as held:
        assert held
        with PageStore.open(path) as store:
            for group in (0, 1):
                store.write(group, ENTRIES[5:], pages[group][5:])
    for lane in ("lane-0000", "lane-0001"):
        EvictionRing(path / lane / "group-0" / EVICTED).add(KEYS, EvictionReason.GC, 1)
    return read_all(path)


def read_all(path: Path) -> dict[PageKey, list[bytes]]:
    """The bits of the pages of each key, one a group; every page that the store has is good."""
    found: dict[PageKey, list[bytes]] = {}
    with PageStore.open(path, mode="r") as store:
        for row, entry in store.entries():
            (out,) = empty_like([np.zeros(store.specs[row.group].page_shape, np.float32)])
            store.read([row], [out])
            found.setdefault(entry.key, []).append(bits(out))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_after_any_damage_a_repaired_store_serves_every_good_page(
    tmp_path: Path, seed: int
) -> None:
    path = tmp_path / "cache.zarr"
    expected = make_lanes(path, (Raw(), Int8(), Lossless())[seed % 3])
    assert verify_store(path).findings == ()
    damages(path, random.Random(seed))
    try:
        report = verify_store(path)
        repaired = verify_store(path, repair=True)
    except PagedKVError as error:
        assert isinstance(error, StoreError | FormatVersionError)
        return
    assert repaired.num_good_pages == report.num_good_pages
    if repaired.is_clean:
        after = verify_store(path)
        assert after.findings == ()
        assert after.num_good_pages == after.num_pages == report.num_good_pages
        found = read_all(path)
        assert all(set(pages) <= set(expected[key]) for key, pages in found.items())
        num_served = sum(len(pages) for pages in found.values())
        assert num_served <= after.num_good_pages <= num_served + 4  # 4 pages are in both lanes
        root = zarr.open_group(path, mode="r")
        for name, array in root.members(max_depth=None):
            if name.endswith("/kv"):
                assert isinstance(array, zarr.Array)
                assert np.isfinite(array[:]).all()
    else:
        assert {f.cost for f in repaired.findings if not f.repaired} == {Cost.STORE}


def test_a_damaged_eviction_ring_costs_nothing_and_keeps_its_right_entries(tmp_path: Path) -> None:
    path = tmp_path / "cache.zarr"
    make_lanes(path, Raw())
    ring = path / GROUP / EVICTED / "c.0.0"
    flip(ring, 2 * RECORD_DTYPE.itemsize + 3)
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.cost) == (Damage.RING, Cost.NOTHING)
    assert (finding.path, finding.lane) == (f"{GROUP}/{EVICTED}/c.0.0", 0)
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()
    kept = [page.key for page in EvictionRing(ring.parent).entries()]
    assert kept == [key for place, key in enumerate(reversed(KEYS)) if place != 2]


def test_unfinished_files_in_the_root_are_leftovers_unless_its_lock_is_held(path: Path) -> None:
    (path / ".tmp-zarr.json-12345678").write_bytes(b"half")
    with files.locked(path):
        assert verify_store(path).findings == ()
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.path) == (Damage.LEFTOVER, ".tmp-zarr.json-12345678")
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()


def test_a_page_that_compressed_well_is_found_by_its_record(tmp_path: Path) -> None:
    path = make_store(tmp_path / "cache.zarr", Lossless())
    report = verify_store(path)
    assert (report.findings, report.num_good_pages) == ((), 12)
    geometry = fmt.Geometry.of(SPEC, Lossless(), 4)
    chunk = np.frombuffer((path / CHUNKS[1]).read_bytes()[:-4], geometry.record_dtype)
    flip(path / SEGMENTS[1], int(chunk["offset"][2]) + 20)
    (finding,) = verify_store(path).findings
    assert (finding.damage, finding.row, finding.layer) == (Damage.LAYER, 6, 0)
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()
    assert served(path) == without(6)


CHURN = """
import sys
from store_samples import make_entries, make_pages, make_spec
from contextlib import suppress
from pagedkv import files
from pagedkv.errors import StoreFullError
from pagedkv.store import PageStore

files.sync_file = files.sync_dir = lambda _: None
spec = make_spec()
with PageStore.open(sys.argv[1]) as store:
    pages = make_pages(spec, 6)
    print("ready", flush=True)
    for start in range(int(sys.argv[2]), 10**6, 6):
        with suppress(StoreFullError):  # the other writer's pages are not to be taken
            store.write(0, make_entries(spec, 6, start), pages)
"""


def test_a_store_in_which_others_write_and_evict_is_clean(tmp_path: Path) -> None:
    path = tmp_path / "cache.zarr"
    PageStore.open(path, SPEC, max_nbytes="768KiB").close()
    writers = [python(CHURN, path, start) for start in (0, 10**5)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        num_rounds = 0
        while num_rounds < 5 or (path / CHUNKS[0]).exists():  # until something was evicted
            num_rounds += 1
            report = verify_store(path)
            assert report.findings == ()
            assert report.foreign == ()
            assert report.num_good_pages == report.num_pages
            assert verify_store(path, repair=True).findings == ()
        assert report.busy_lanes == (0, 1)
        ended = [writer.stderr.read() for writer in writers if writer.poll() and writer.stderr]
        assert ended == []
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert verify_store(path, repair=True).is_clean
    assert verify_store(path).findings == ()
