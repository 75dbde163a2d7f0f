"""Room in a store that is full: which pages leave, which are written again, and which stay."""

import errno
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import (
    Array,
    chunk_nbytes,
    empty_like,
    make_entries,
    make_eviction_rings,
    make_key,
    make_pages,
    make_smooth_pages,
    make_spec,
    python,
    run_python,
    same_bits,
)

from pagedkv import files, open_stores
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError, StoreError, StoreFullError
from pagedkv.evictions import EvictionReason
from pagedkv.format import StoreRow
from pagedkv.lane import LaneGroup
from pagedkv.reclaim import CollectReport, HeldPage, Keep
from pagedkv.store import PageStore

SPEC = make_spec()
NUM_PAGES = 600
PAGES = make_pages(SPEC, NUM_PAGES)
ENTRIES = make_entries(SPEC, NUM_PAGES, parent=None)
BOUND = 400_000
PER_SEGMENT = 4

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", PER_SEGMENT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


@pytest.fixture
def store(path: Path) -> Iterator[PageStore]:
    with open_bounded(path) as store:
        yield store
        store.check_invariants()


def open_bounded(path: Path, specs: Any = SPEC, **options: Any) -> PageStore:
    PageStore.open(path, specs, max_nbytes=BOUND, **options).close()
    make_eviction_rings(path)
    return PageStore.open(path)


def give_up(store: PageStore, share: float) -> CollectReport:
    """Collect until so much of the pages' bytes is free."""
    return store.collect(store.nbytes - int(share * chunk_nbytes(store.path)))


def make_room(store: PageStore, share: float, keep: Keep) -> None:
    """Ask for so much room that about so much of the pages must go, but none of ``keep``."""
    store.protect(keep)
    room = store._space.room()
    assert room is not None
    ahead = BOUND // 16 + BOUND // 32  # what is asked for beside
    store.make_room(room + int(share * chunk_nbytes(store.path)) - ahead)


def held_keys(numbers: Sequence[int]) -> set[HeldPage]:
    return {(0, make_key(number)) for number in numbers}


def write(store: PageStore, numbers: Sequence[int]) -> list[StoreRow]:
    return store.write(0, [ENTRIES[n] for n in numbers], [PAGES[n] for n in numbers])


def write_segments(store: PageStore, first: int, last: int) -> list[StoreRow]:
    """Pages ``first`` to ``last`` in segments of their own, one after the other."""
    rows: list[StoreRow] = []
    for start in range(first, last, PER_SEGMENT):
        rows += write(store, range(start, min(start + PER_SEGMENT, last)))
    return rows


def found(store: PageStore, numbers: Sequence[int] = range(NUM_PAGES)) -> list[int]:
    """Those of the pages that the store holds, read and compared."""
    rows = store.find_rows([ENTRIES[n].key for n in numbers])
    held = [n for n, row in zip(numbers, rows.tolist(), strict=True) if row >= 0]
    out = empty_like([PAGES[n] for n in held])
    store.read(rows[rows >= 0], out)
    assert same_bits(out, [PAGES[n] for n in held])
    return held


def use(store: PageStore, numbers: Sequence[int]) -> None:
    """Touch those of the pages that the store holds, one after the other."""
    for row in (store.find(ENTRIES[n].key) for n in numbers):
        if row is not None:
            store.touch([row])


def num_segments(path: Path) -> int:
    return len(list(path.glob("lane-*/group-*/kv/c.*")))


def chunk_names(path: Path, array: str) -> set[str]:
    return {p.name.split(".")[1] for p in path.glob(f"lane-*/group-0/{array}/c.*")}


class TestOrder:
    def test_nothing_leaves_while_there_is_room(self, store: PageStore) -> None:
        report = store.collect(BOUND)
        write_segments(store, 0, 40)
        assert found(store) == list(range(40))
        assert report.num_segments_removed == report.num_pages_evicted == 0
        assert report.nbytes_before == report.nbytes_after

    def test_what_was_written_first_leaves_first(self, store: PageStore) -> None:
        write_segments(store, 0, 60)
        report = give_up(store, 0.5)
        held = found(store)
        assert report.num_pages_evicted == 60 - len(held)
        assert 0 < len(held) < 60
        assert held == list(range(60 - len(held), 60))

    def test_what_was_used_least_lately_leaves_first(self, store: PageStore) -> None:
        write_segments(store, 0, 60)
        used = [*range(0, 60, 8), *range(1, 60, 8), *range(2, 60, 8), *range(3, 60, 8)]
        use(store, used)  # every other segment
        give_up(store, 0.4)
        held = found(store)
        assert set(used) <= set(held)
        assert len(held) < 50

    def test_reading_counts_as_use(self, store: PageStore) -> None:
        rows = write_segments(store, 0, 60)
        out = empty_like(PAGES[:4])
        store.read(rows[:4], out)
        layer = empty_like([PAGES[8][0]] * 4)
        store.read_layer(rows[8:12], 0, layer)
        give_up(store, 0.5)
        assert {0, 1, 2, 3, 8, 9, 10, 11} <= set(found(store))

    def test_hot_pages_of_a_cold_segment_are_written_again(
        self, store: PageStore, path: Path
    ) -> None:
        rows = write_segments(store, 0, 60)
        hot = list(range(1, 60, 4))
        use(store, hot)
        before = num_segments(path)
        report = give_up(store, 0.2)
        assert set(hot) <= set(found(store))
        assert report.num_pages_moved >= 5
        assert store.find(make_key(1)) != rows[1]
        assert report.num_segments_removed > before - num_segments(path)
        with pytest.raises(CorruptPageError, match="given up") as caught:
            store.read([rows[1]], empty_like(PAGES[:1]))
        assert caught.value.positions == (0,)
        assert set(hot) <= set(found(store))

    def test_moved_pages_are_durable_with_their_entries(self, path: Path) -> None:
        with open_bounded(path) as store:
            entries = make_entries(SPEC, 60, parent=SPEC.root_key())
            for at in range(0, 60, 4):
                store.write(0, entries[at : at + 4], PAGES[at : at + 4])
            use(store, range(1, 60, 4))
            assert give_up(store, 0.5).num_pages_moved >= 5
            held = found(store)
        with PageStore.open(path, mode="r") as store:
            assert found(store) == held
            by_key = {entry.key: entry for _, entry in store.entries()}
            for number in held:
                entry = by_key[make_key(number)]
                assert entry.parent == entries[number].parent
                assert np.array_equal(entry.tokens, entries[number].tokens)
            assert store.num_torn_chunks == 0

    def test_pages_without_their_parent_leave_before_all_others(self, store: PageStore) -> None:
        orphans = [make_entries(SPEC, 1, start=n)[0] for n in (10, 20, 30, 40)]
        write_segments(store, 100, 140)
        rows = store.write(0, orphans, PAGES[:4])
        store.touch([*rows, StoreRow(7, 0, 0), StoreRow(0, 0, 10**6)])
        report = give_up(store, 0.01)
        assert report.num_pages_dead == report.num_pages_evicted == 4
        assert found(store) == list(range(100, 140))

    def test_all_that_follow_a_missing_page_leave_before_all_others(self, store: PageStore) -> None:
        write_segments(store, 100, 140)
        store.write(0, make_entries(SPEC, 4, start=1), PAGES[1:5])  # page 0 is nowhere
        report = give_up(store, 0.01)
        assert report.num_pages_dead == report.num_pages_evicted == 4
        assert found(store) == list(range(100, 140))

    def test_pages_that_follow_from_the_root_are_not_dead(self, path: Path) -> None:
        first = make_entries(SPEC, 1, parent=SPEC.root_key(), salt=b"tenant")
        chain = [*first, *make_entries(SPEC, 7, start=1)]
        with open_bounded(path) as store:
            write_segments(store, 100, 108)
            store.write(0, chain, PAGES[:8])
            use(store, range(8))
            report = give_up(store, 0.01)
            assert report.num_pages_dead == 0
            assert found(store, range(8)) == list(range(8))

    def test_a_dead_page_is_not_written_again_though_it_is_hot(self, store: PageStore) -> None:
        orphans = [make_entries(SPEC, 1, start=n)[0] for n in (51, 53)]
        store.write(0, [*ENTRIES[:2], *orphans], [*PAGES[:2], PAGES[51], PAGES[53]])
        write_segments(store, 100, 140)
        use(store, [0, 51, 53])
        use(store, range(101, 140, 2))
        report = give_up(store, 0.01)
        assert report.num_pages_dead == 2
        assert found(store, [0, 1, 51, 53]) == [0]

    def test_segments_of_all_specs_may_leave(self, path: Path) -> None:
        specs = [SPEC, make_spec(group="windowed")]
        with open_bounded(path, specs) as store:
            store.write(1, ENTRIES[:8], PAGES[:8])
            write_segments(store, 8, 24)
            use(store, range(8, 24))
            give_up(store, 0.3)
            assert store.find_rows([ENTRIES[n].key for n in range(8)], 1).max() == -1
            assert found(store) == list(range(8, 24))
            store.check_invariants()

    def test_an_empty_store_has_nothing_to_give_up(self, store: PageStore) -> None:
        report = store.collect(1)
        assert (report.num_segments_removed, report.num_pages_moved) == (0, 0)

    def test_all_may_leave(self, store: PageStore, path: Path) -> None:
        rows = write_segments(store, 0, 40)
        report = store.collect(1)
        assert (report.num_pages_evicted, store.num_pages) == (40, 0)
        assert num_segments(path) == 0
        assert chunk_names(path, "catalog") == chunk_names(path, "key") == set()
        again = write_segments(store, 0, 40)
        assert found(store) == list(range(40))
        assert min(again) > max(rows)

    @pytest.mark.parametrize("codec", ["int8", "lossless"])
    def test_pages_of_every_codec_are_moved_as_they_are(self, path: Path, codec: str) -> None:
        pages = make_smooth_pages(SPEC, 40) if codec == "lossless" else PAGES
        with open_bounded(path, codec=codec) as store:
            for at in range(0, 40, 4):
                store.write(0, ENTRIES[at : at + 4], pages[at : at + 4])
            hot = list(range(1, 40, 4))

            def read(store: PageStore) -> list[Array]:
                out = empty_like([pages[n] for n in hot])
                store.read(store.find_rows([make_key(n) for n in hot]), out)
                return out

            before = read(store)
            report = give_up(store, 0.2)
            assert report.num_pages_moved >= 3
            assert same_bits(read(store), before)
            store.check_invariants()
        with PageStore.open(path, mode="r") as store:
            assert same_bits(read(store), before)


def columns(path: Path) -> list[str]:
    """Chunks of the derived columns, as ``lane-*/group-*/…``."""
    names = ("key", "parent", "tokens", "num_tokens")
    return sorted(
        str(p.relative_to(path)) for n in names for p in path.glob(f"lane-*/group-*/{n}/c.*")
    )


class TestColumns:
    """The derived columns follow a commit later, those of many segments at once."""

    def test_they_are_made_for_many_segments_at_once_and_on_closing(self, path: Path) -> None:
        with open_bounded(path) as store:
            write_segments(store, 0, 31 * PER_SEGMENT)
            assert columns(path) == []
            write_segments(store, 31 * PER_SEGMENT, 33 * PER_SEGMENT)
            assert len(columns(path)) == 4 * 32
        assert len(columns(path)) == 4 * 33

    def test_a_segment_that_leaves_before_leaves_nothing_behind(self, path: Path) -> None:
        with open_bounded(path) as store:
            write_segments(store, 0, 8 * PER_SEGMENT)
            give_up(store, 0.5)
            num_segments = len(list(store._contents.segments()))
            assert num_segments < 8
            store._contents.groups[0, 0].write_columns()
            assert store.nbytes == files.tree_nbytes(path)
        assert len(columns(path)) == 4 * num_segments


class TestBound:
    def test_the_bound_holds_and_the_newest_stay(self, store: PageStore, path: Path) -> None:
        for first in range(0, NUM_PAGES, 8):
            write_segments(store, first, first + 8)
            on_disk = sum(p.stat().st_size for p in path.glob("lane-*/group-*/*/c.*"))
            assert on_disk <= store.nbytes <= BOUND
            assert found(store, range(first, first + 8)) == list(range(first, first + 8))
        assert len(found(store)) > 60

    def test_a_hot_page_outlives_the_stream_of_others(self, store: PageStore) -> None:
        write_segments(store, 0, 4)
        for first in range(4, NUM_PAGES, 4):
            write_segments(store, first, first + 4)
            assert found(store, [2]) == [2], first  # reading keeps it hot

    def test_a_read_beside_the_reclaiming_gives_the_page_or_says_that_it_is_gone(
        self, store: PageStore
    ) -> None:
        stop, errors, counts = threading.Event(), [], [0, 0]

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            out = empty_like(PAGES[:6])
            try:
                while not stop.is_set():
                    numbers = rng.choice(NUM_PAGES, 200, replace=False)
                    rows = store.find_rows([ENTRIES[n].key for n in numbers.tolist()])
                    held, rows = numbers[rows >= 0][:6], rows[rows >= 0][:6]
                    try:
                        store.read(rows, out[: len(rows)])
                        assert same_bits(out[: len(rows)], [PAGES[n] for n in held.tolist()])
                        counts[0] += 1
                    except CorruptPageError as error:
                        lost = set(error.positions)
                        for place, number in enumerate(held.tolist()):
                            if place not in lost:
                                assert same_bits([out[place]], [PAGES[number]])
                        counts[1] += 1
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            write_segments(store, 0, NUM_PAGES)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert errors == []
        assert counts[0]
        assert store.num_damaged_pages == 0

    def test_threads_that_write_at_once_all_find_room(self, store: PageStore) -> None:
        errors: list[BaseException] = []

        def run(first: int) -> None:
            try:
                write_segments(store, first, first + 150)
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(0, 600, 150)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert store.nbytes <= BOUND
        found(store)

    def test_a_write_pays_only_for_its_own_segments(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread's segment may need longer arrays; it has reserved the bytes for them."""
        with open_bounded(path) as store:
            group, reserve = store._contents.groups[0, 0], store._space.reserve
            capacity = group.arrays._capacity

            def reserve_beside_another(nbytes: int) -> None:
                if group.next_segment == group.arrays._capacity:
                    group.next_segment += 1  # the other has its number, and no longer arrays yet
                reserve(nbytes)

            monkeypatch.setattr(store._space, "reserve", reserve_beside_another)
            for first in range(0, 40 * PER_SEGMENT, PER_SEGMENT):
                write(store, range(first, first + PER_SEGMENT))
            store._space.check_invariants()
            assert group.arrays._capacity * PER_SEGMENT >= 100 > capacity  # more digits
            found(store)

    def test_two_large_writes_at_once_both_find_room(
        self, store: PageStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_segments(store, 0, 160)
        assert store._writer is not None
        both, make_room = threading.Barrier(2, timeout=30), store._writer.make_room

        def slow(nbytes: int, own: Any = ()) -> None:
            make_room(nbytes, own)
            both.wait()

        monkeypatch.setattr(store._writer, "make_room", slow)
        errors: list[BaseException] = []

        def run(first: int) -> None:
            try:
                write(store, range(first, first + 100))
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        threads = [threading.Thread(target=run, args=(first,)) for first in (200, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error


class TestKeep:
    def test_kept_pages_of_a_cold_segment_are_written_again(self, store: PageStore) -> None:
        write_segments(store, 0, 60)
        calls: list[int] = []

        def keep() -> Collection[HeldPage]:
            calls.append(1)
            return held_keys([2, 5])

        make_room(store, 0.5, keep)
        assert calls
        assert {2, 5} <= set(found(store))
        assert len(found(store)) < 60

    def test_it_is_not_asked_while_there_is_room(self, store: PageStore) -> None:
        def keep() -> Collection[HeldPage]:
            raise AssertionError

        store.protect(keep)
        write_segments(store, 0, 40)
        store.make_room(1000)

    def test_it_is_asked_without_a_lock(self, store: PageStore) -> None:
        write_segments(store, 0, 4)
        asked: list[int] = []

        def keep() -> Collection[HeldPage]:
            other = threading.Thread(target=lambda: asked.append(len(found(store))))
            other.start()
            other.join(30)
            assert not other.is_alive()
            store.refresh()
            return held_keys(range(4))

        store.protect(keep)
        write_segments(store, 4, 240)
        assert asked

    def test_pages_that_are_kept_but_not_there_do_no_harm(self, store: PageStore) -> None:
        others = [(0, make_key(10**9)), (7, make_key(0))]
        store.protect(lambda: others)
        write_segments(store, 0, 240)
        assert store.nbytes <= BOUND

    def test_a_kept_page_outlives_any_number_of_collections(self, store: PageStore) -> None:
        write_segments(store, 0, 4)
        store.protect(lambda: held_keys(range(4)))
        for first in range(4, NUM_PAGES, 4):
            write_segments(store, first, first + 4)
            use(store, range(max(4, first - 200), first + 4))  # all others are hotter
            assert store.find_rows([make_key(n) for n in range(4)]).min() >= 0, first
        assert found(store, range(4)) == [0, 1, 2, 3]

    def test_a_store_full_of_kept_pages_is_full(self, store: PageStore) -> None:
        kept: set[HeldPage] = set()

        store.protect(lambda: kept)
        with pytest.raises(StoreFullError):
            for first in range(0, NUM_PAGES, 4):
                write_segments(store, first, first + 4)
                kept |= held_keys(range(first, first + 4))
                assert len(found(store)) == first + 4
        assert len(found(store)) == len(kept)
        kept.clear()
        write_segments(store, 500, 504)

    def test_nothing_is_removed_when_a_kept_page_cannot_be_moved(
        self, store: PageStore, monkeypatch: pytest.MonkeyPatch, path: Path
    ) -> None:
        rows = write_segments(store, 0, 100)
        monkeypatch.setattr(store._space, "room", lambda: 0)
        report = store._writer._reclaimer.collect(
            lambda: False, EvictionReason.CAPACITY, lambda: held_keys(range(100))
        )
        assert report.num_segments_removed == 0
        assert found(store) == list(range(100))
        assert [store.find(make_key(n)) for n in range(100)] == rows
        store.check_invariants()

    def test_pages_that_are_not_kept_leave_when_there_is_no_room_to_move_any(
        self, store: PageStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_segments(store, 0, 40)
        use(store, [0, 5])
        monkeypatch.setattr(store._space, "room", lambda: 0)
        report = store._writer._reclaimer.collect(
            lambda: False, EvictionReason.CAPACITY, lambda: held_keys([9])
        )
        assert found(store) == [8, 9, 10, 11]
        assert report.num_pages_moved == 0


class TestFailures:
    @pytest.mark.parametrize("where", ["commit", "keep", "read"])
    def test_a_failure_on_the_way_loses_no_page(
        self, store: PageStore, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        write_segments(store, 0, 60)
        use(store, [1])

        def fail(*_: object, **__: object) -> Any:
            raise OSError(errno.EIO, "the disk failed")

        with monkeypatch.context() as patch:
            if where == "commit":
                patch.setattr(LaneGroup, "commit", fail)
            elif where == "read":
                patch.setattr(files, "pread_into", fail)
            keep = fail if where == "keep" else lambda: held_keys([4, 5])
            with pytest.raises((StoreError, OSError), match="the disk failed"):
                make_room(store, 0.5, keep)
        assert found(store) == list(range(60))
        store.check_invariants()

    @pytest.mark.parametrize("damage", ["truncated", "gone", "no catalogue"])
    def test_a_damaged_segment_that_holds_kept_pages_is_given_up(
        self, store: PageStore, path: Path, damage: str
    ) -> None:
        write_segments(store, 0, 60)
        folder = path / "lane-0000/group-0"
        if damage == "truncated":
            os.truncate(folder / "kv/c.0.0.0.0.0.0", 100)
        else:
            (folder / ("kv/c.0.0.0.0.0.0" if damage == "gone" else "catalog/c.0.0")).unlink()
        make_room(store, 0.5, lambda: held_keys([1]))
        held = found(store)
        assert 0 < len(held) < 60
        assert store.nbytes <= BOUND // 2 + BOUND // 16

    def test_a_damaged_catalogue_chunk_keeps_no_other_segment_from_leaving(
        self, store: PageStore, path: Path
    ) -> None:
        write_segments(store, 0, 60)
        use(store, [1])
        (path / "lane-0000/group-0/catalog/c.0.0").write_bytes(b"damaged")
        give_up(store, 0.5)
        assert 0 < len(found(store)) < 40

    def test_a_damaged_page_is_moved_as_it_is_and_still_damaged(
        self, store: PageStore, path: Path
    ) -> None:
        write_segments(store, 0, 60)
        use(store, [1, 2])
        chunk = path / "lane-0000/group-0/kv/c.0.0.0.0.0.0"
        data = bytearray(chunk.read_bytes())
        data[SPEC.page_nbytes + 12 + 5] ^= 1
        chunk.write_bytes(data)
        give_up(store, 0.5)
        with pytest.raises(CorruptPageError) as caught:
            store.read(store.find_rows([make_key(1), make_key(2)]), empty_like(PAGES[:2]))
        assert caught.value.keys == (make_key(1),)
        assert 2 in found(store)

    def test_a_crash_between_any_two_steps_loses_no_page_that_stays(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every file operation of a collection is the last one once."""
        real = {name: getattr(files, name) for name in ("replace", "remove", "write_all")}
        step = 0
        while True:
            step += 1
            place = path.with_name(f"{step}.zarr")
            store = open_bounded(place)
            write_segments(store, 0, 32)
            use(store, [1, 6])
            left = [step]

            def counted(name: str, *args: Any, left: list[int] = left) -> Any:
                left[0] -= 1
                if left[0] <= 0:
                    raise KeyboardInterrupt
                return real[name](*args)

            with monkeypatch.context() as patch:
                for name in real:
                    patch.setattr(files, name, lambda *args, name=name: counted(name, *args))
                try:
                    make_room(store, 0.3, lambda: held_keys([10, 11]))
                    crashed = False
                except KeyboardInterrupt:
                    crashed = True
            # As a crash leaves it: the lock is gone, and nothing else is done.
            with PageStore.open(place, mode="r") as other:
                held = found(other)
                assert {1, 6, 10, 11} <= set(held)
                assert other.num_torn_chunks == 0
            open_stores.discard(store)
            store.abandon()
            with PageStore.open(place) as other:
                assert found(other) == held
                other.check_invariants()
                kv, catalog = chunk_names(place, "kv"), chunk_names(place, "catalog")
                assert kv == catalog == chunk_names(place, "key")
                assert not list(place.rglob(".tmp-*"))
            if not crashed:
                assert step > 20
                return

    def test_what_a_crash_leaves_in_the_folder_of_the_ring_is_removed(self, path: Path) -> None:
        open_bounded(path).close()
        left = path / "lane-0000" / "group-0" / fmt.EVICTED / f"{files.TEMP_PREFIX}c.0.0-1a2b"
        left.write_bytes(b"half a ring")
        PageStore.open(path).close()
        assert not left.exists()


class TestLanes:
    def test_pages_of_ended_processes_leave_too(self, path: Path) -> None:
        run_python(
            """
import sys
from store_samples import *
from pagedkv import format as fmt
from pagedkv.store import PageStore
fmt.MAX_SEGMENT_ROWS = 4
pages, entries = make_pages(make_spec(), 40), make_entries(make_spec(), 40, parent=None)
with PageStore.open(sys.argv[1], make_spec(), max_nbytes=400_000) as store:
    store.write(0, entries[:20], pages[:20])
    run_python(sys.argv[2], sys.argv[1])
""",
            path,
            """
import sys
from store_samples import *
from pagedkv.store import PageStore
pages, entries = make_pages(make_spec(), 40), make_entries(make_spec(), 40, parent=None)
with PageStore.open(sys.argv[1]) as store:
    store.write(0, entries[20:], pages[20:])
""",
        )
        with PageStore.open(path) as store:
            assert sorted({row.lane for row, _ in store.entries()}) == [0, 1]
            assert store.own_lane == 0
            use(store, [1, 22])
            held = found(store)
            assert held == list(range(40))
            store.collect(1)
            assert store.num_pages == 0
            store.check_invariants()
            assert num_segments(path) == 0
            write_segments(store, 0, 40)
            assert found(store) == held

    def test_pages_of_living_processes_stay(self, path: Path) -> None:
        with open_bounded(path):
            pass
        code = """
import sys
from store_samples import *
from pagedkv.store import PageStore
with PageStore.open(sys.argv[1]) as store:
    pages, entries = make_pages(make_spec(), 40), make_entries(make_spec(), 40, parent=None)
    store.write(0, entries[:20], pages[:20])
    print("written", flush=True)
    sys.stdin.read()
    out = empty_like(pages[:20])
    store.read(store.find_rows([entry.key for entry in entries[:20]]), out)
    assert same_bits(out, pages[:20])
"""
        other = python(code, path)
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        with PageStore.open(path) as store:
            write_segments(store, 20, 40)
            store.collect(1)
            assert found(store) == list(range(20))
            assert store.own_lane == 1
        _, errors = other.communicate(timeout=60)
        assert other.returncode == 0, errors

    def test_a_reader_s_lanes_are_not_locked(self, store: PageStore, path: Path) -> None:
        write_segments(store, 0, 40)
        with PageStore.open(path, mode="r") as reader:
            store.collect(1)
            assert reader.refresh()
            assert reader.num_pages == 0
            with pytest.raises(StoreError, match="read-only"):
                reader.collect(1)

    def test_no_descriptor_is_left(self, path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with open_bounded(path) as store:
            for first in range(0, 240, 4):
                write_segments(store, first, first + 4)
                found(store, range(first + 4))
            folder = Path("/proc/self/fd")
            names = [str(link.readlink()) for link in folder.iterdir() if link.is_symlink()]
            assert [name for name in names if name.startswith(str(path))]
            assert not [name for name in names if "/kv/" in name and "(deleted)" in name]
        assert len(os.listdir("/proc/self/fd")) == before
