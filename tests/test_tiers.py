"""Pages between pool, spill file and store: rows that move, lanes of others, calls that break off.

The store is made to behave as one whose rows are taken back and moved by others.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kv_samples import (
    Array,
    bits,
    make_key,
    make_kv,
    make_pages,
    make_spec,
    unchanged,
    wait_for_writers,
)

import pagedkv as pk
from pagedkv import keyed
from pagedkv.format import StoreRow, pack_row, unpack_row
from pagedkv.lock import CacheLock
from pagedkv.moves import Mover
from pagedkv.pool import SlotPool
from pagedkv.spill import SpillFile

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()
KEYS = [make_key(number) for number in range(64)]
PAGES = make_pages(SPEC, range(64))
MOVED = 10**6


def open_cache(path: Path, num_slots: int, **options: Any) -> pk.PagedKVCache:
    return pk.PagedKVCache(SPEC, num_slots, pk.PageStore.open(path, SPEC, **options))


def prefix(num_pages: int) -> tuple[pk.PageKeys, Array, Array]:
    """Keys and pages of a prefix, and its keys and values ``(kind, layer, token, head, ch)``."""
    keys = pk.page_keys(SPEC, range(4 * num_pages))
    kv = make_kv(SPEC, 4 * num_pages)
    pages = np.stack(kv).reshape(2, 2, num_pages, 4, 1, 2).transpose(2, 1, 0, 3, 4, 5)
    return keys, np.ascontiguousarray(pages), np.stack(kv)


class MovingStore:
    """Gives out rows that are outdated when they are read: the pages have moved meanwhile."""

    def read_quickly(self, *_: Any) -> bool:
        return False  # as if nothing were in the page cache: rows are looked up, and read, by hand

    def __init__(self, store: pk.PageStore, patch: pytest.MonkeyPatch, *, gone: bool) -> None:
        self.stale: set[bytes] = set()
        self.gone = gone
        self.num_stale_reads = 0
        self._find, self._find_rows = store.find, store.find_rows
        self._read, self._read_layer = store.read, store.read_layer
        for name in ("find", "find_rows", "read", "read_layer", "read_quickly"):
            patch.setattr(store, name, getattr(self, name))

    def find(self, key: Any, group: int = 0) -> StoreRow | None:
        row = self._find(key, group)
        return row._replace(row=row.row + MOVED) if row is not None and key in self.stale else row

    def find_rows(self, keys: Any, group: int = 0) -> npt.NDArray[np.int64]:
        found = [self.find(key, group) for key in keys]
        return np.array([-1 if row is None else pack_row(row) for row in found], np.int64)

    def read(self, rows: Any, out: Any, *, at: Any = None, deadline: Any = None) -> None:
        del deadline
        wanted = self._unpacked(rows)
        places = range(len(wanted)) if at is None else at.tolist()
        good = [(r, out[p]) for r, p in zip(wanted, places, strict=True) if r.row < MOVED]
        self._read([row for row, _ in good], [to for _, to in good])
        self._check(wanted)

    def read_layer(self, rows: Any, layer: int, out: Any, *, at: Any) -> None:
        wanted = self._unpacked(rows)
        good = [(r, out[p]) for r, p in zip(wanted, at.tolist(), strict=True) if r.row < MOVED]
        self._read_layer([row for row, _ in good], layer, [to for _, to in good])
        self._check(wanted)

    def _unpacked(self, rows: Any) -> list[StoreRow]:
        return [unpack_row(int(r)) if isinstance(r, np.integer) else r for r in rows]

    def _check(self, wanted: list[StoreRow]) -> None:
        moved = [row for row in wanted if row.row >= MOVED]
        if moved:
            self.num_stale_reads += 1
            keys = tuple(k for k in self.stale if self.find(k) in moved)
            self.stale -= set(keys)
            if self.gone:
                find = self._find
                self._find = lambda k, g=0: None if k in keys else find(k, g)
            positions = tuple(n for n, row in enumerate(wanted) if row.row >= MOVED)
            raise pk.CorruptPageError("the row has moved", keys, positions)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


def stored_prefix(path: Path, num_pages: int) -> tuple[pk.PageKeys, Array, Array]:
    keys, pages, kv = prefix(num_pages)
    with open_cache(path, num_pages) as cache:
        cache.put(keys, pages)
    return keys, pages, kv


@pytest.mark.parametrize("how", ["get", "get one", "acquire", "hold", "hold more", "gather"])
def test_a_page_that_has_moved_is_read_from_its_new_row(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    keys, pages, kv = stored_prefix(path, 4)
    with open_cache(path, 2 if how == "hold more" else 4) as cache:
        assert cache.store is not None
        store = MovingStore(cache.store, monkeypatch, gone=False)
        store.stale = set(keys[1:3])
        if how == "get":
            assert bits(cache.get(keys)) == bits(pages)
        elif how == "get one":
            assert bits(cache.get(keys[1:2])) == bits(pages[1:2])
        elif how == "acquire":
            with cache.acquire(keys) as views:
                assert bits(np.stack(views)) == bits(pages)
        else:
            with cache.open_sequence(range(16)) as sequence:
                assert sequence.num_tokens == 16
                if how == "gather":
                    cache.put(KEYS[:4], PAGES[:4])  # the prefix leaves the pool
                    store.stale = set(keys[:2])
                    with cache._lock:
                        for page in sequence.table(0)[:2]:
                            page.row = store.find(page.key)
                for layer in range(2):
                    with sequence.gather(layer) as (k, _):
                        assert bits(k) == bits(kv[0, layer])
        assert store.num_stale_reads >= 1
        assert not cache.stats().misses_by_reason
        cache.check_invariants()


@pytest.mark.parametrize("how", ["get", "get one", "acquire", "hold"])
def test_a_page_that_was_taken_back_is_a_miss(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    keys, pages, _ = stored_prefix(path, 4)
    with open_cache(path, 4) as cache:
        assert cache.store is not None
        MovingStore(cache.store, monkeypatch, gone=True).stale = {keys[1]}
        if how in ("get", "get one"):
            wanted = keys if how == "get" else keys[1:2]
            with pytest.raises(pk.PageNotFoundError, match=keys[1].hex()):
                cache.get(wanted)
        elif how == "acquire":
            with cache.acquire(keys) as views:
                assert bits(np.stack(views)) == bits(pages[:1])
        else:
            with cache.open_sequence(range(16)) as sequence:
                assert sequence.num_tokens == 4
        assert cache.stats().misses_by_reason["corrupt"] >= 1
        cache.check_invariants()
        cache.put(keys, pages)
        assert bits(cache.get(keys)) == bits(pages)


def test_a_saved_tail_that_has_moved_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(path, 4) as cache:
        sequence = cache.open_sequence()
        sequence.append(*make_kv(SPEC, 6), range(6))
        sequence.save()
    with open_cache(path, 4) as cache:
        assert cache.store is not None
        store = MovingStore(cache.store, monkeypatch, gone=False)
        store.stale = {entry.key for _, entry in cache.store.entries() if entry.num_tokens < 4}
        assert len(store.stale) == 1
        assert cache.open_sequence(range(6)).num_tokens == 6
        assert store.num_stale_reads == 1


# -- lanes of others -------------------------------------------------------------------------


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes all rows that are there so far those of another lane."""

    def make_foreign() -> None:
        monkeypatch.setattr(pk.PageStore, "own_lane", property(lambda _: 7))

    return make_foreign


def test_a_live_prefix_in_another_lane_survives_when_its_owner_takes_the_space_back(
    path: Path, foreign: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, _, kv = stored_prefix(path, 6)
    foreign()
    with open_cache(path, 2) as cache:
        assert cache.store is not None
        sequence = cache.open_sequence(range(24))
        assert sequence.num_tokens == 24
        assert cache.stats().num_pages_spilled >= 4
        cache.put(KEYS[:4], PAGES[:4])  # what was in the pool leaves it
        MovingStore(cache.store, monkeypatch, gone=True).stale = set(keys)
        for layer in range(2):
            with sequence.gather(layer) as (k, v):
                assert (bits(k), bits(v)) == (bits(kv[0, layer]), bits(kv[1, layer]))
        sequence.close()
        cache.check_invariants()
        spill = cache._groups[0].places.spill
        assert spill is not None
        assert spill.num_used == 0


def test_a_prefix_in_the_own_lane_is_not_spilled(path: Path) -> None:
    stored_prefix(path, 6)
    with open_cache(path, 2) as cache:
        assert cache.open_sequence(range(24)).num_tokens == 24
        cache.put(KEYS[:4], PAGES[:4])
        assert cache.stats().num_pages_spilled == 0


def test_a_prefix_in_another_lane_that_cannot_be_kept_is_cut(
    path: Path, foreign: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pages, _ = stored_prefix(path, 6)
    foreign()
    with open_cache(path, 2) as cache:

        def allocate(spill: SpillFile, count: int) -> list[int]:
            raise pk.StoreFullError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(SpillFile, "allocate", allocate)
            sequence = cache.open_sequence(range(24))
        assert sequence.num_tokens == 8
        sequence.close()
        cache.check_invariants()
        assert bits(cache.get(keys)) == bits(pages)


def test_the_store_is_told_which_pages_live_sequences_need(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = SPEC, make_spec(group="b")
    store = pk.PageStore.open(path, specs)
    told: list[Callable[[], Any]] = []
    monkeypatch.setattr(store, "protect", told.append)
    with pk.PagedKVCache(specs, 4, store) as cache:
        for spec in specs:
            cache.put(pk.page_keys(spec, range(8)), make_pages(spec, [1, 2]))
        cache.flush()
        (keep,) = told
        assert keep() == set()
        sequence = cache.open_sequence(range(4))
        held = {(g, page.key) for g in range(2) for page in sequence.table(g)}
        assert keep() == held
        assert len(held) == 2
        sequence.close()
        assert keep() == set()


# -- what other processes store --------------------------------------------------------------


@pytest.mark.parametrize("how", ["match", "get", "get one", "acquire", "open_sequence", "tail"])
def test_a_miss_asks_once_what_others_have_stored(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with open_cache(path, 4) as writer:
        sequence = writer.open_sequence()
        sequence.append(*make_kv(SPEC, 10), range(10))
        sequence.save()
    with open_cache(path, 4) as cache:
        store = cache.store
        assert store is not None
        keys = pk.page_keys(SPEC, range(8))
        hidden = {keys[1]}
        if how == "tail":
            hidden = {entry.key for _, entry in store.entries() if entry.num_tokens < 4}
        find, find_rows, num_calls = store.find, store.find_rows, 0
        find_child = store.find_child

        def refresh() -> bool:
            nonlocal num_calls
            num_calls += 1
            assert not cache._lock._is_owned()  # type: ignore[attr-defined]
            hidden.clear()
            return True

        monkeypatch.setattr(store, "refresh", refresh)
        monkeypatch.setattr(store, "read_quickly", lambda *_: False)
        monkeypatch.setattr(store, "find", lambda k, g=0: None if k in hidden else find(k, g))
        monkeypatch.setattr(
            store,
            "find_rows",
            lambda ks, g=0: np.where([k in hidden for k in ks], -1, find_rows(ks, g)),
        )
        monkeypatch.setattr(
            store, "find_child", lambda *a, **b: None if hidden else find_child(*a, **b)
        )
        if how == "match":
            assert cache.match(keys) == 2
        elif how == "get":
            cache.get(keys)
        elif how == "get one":
            cache.get(keys[1:])
        elif how == "acquire":
            with cache.acquire(keys) as views:
                assert len(views) == 2
        else:
            assert cache.open_sequence(range(10)).num_tokens == 10
        assert num_calls == 1
        with pytest.raises(pk.PageNotFoundError):
            cache.get(KEYS[:2])
        assert cache.match(KEYS) == 0
        assert num_calls == 3
        cache.put(KEYS[:3], PAGES[:3])
        assert num_calls == 3, "put looks at nothing"


# -- scans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 10])
def test_reading_many_pages_once_leaves_a_full_pool_as_it_is(path: Path, at_once: int) -> None:
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:40], PAGES[:40])
        wait_for_writers(cache)
        before = {key for key, page in cache._groups[0].places.index.items()}
        absent = [number for number in range(40) if KEYS[number] not in before]
        for start in range(0, len(absent), at_once):
            numbers = absent[start : start + at_once]
            assert bits(cache.get([KEYS[n] for n in numbers])) == bits(PAGES[numbers])
        assert set(cache._groups[0].places.index) == before


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_is_read_for_the_second_time_comes_into_the_pool(path: Path, at_once: int) -> None:
    with open_cache(path, 16) as cache:
        cache.put(KEYS[:40], PAGES[:40])
        cache.flush()  # so that all may leave
        for time in range(3):
            for start in range(0, 3, at_once):
                part = slice(start, start + at_once)
                assert bits(cache.get(KEYS[part])) == bits(PAGES[part])
            resident = [key in cache._groups[0].places.index for key in KEYS[:3]]
            assert resident == [time > 0] * 3
        stats = cache.stats()
        assert (stats.num_store_hits, stats.num_pool_hits) == (6, 3)
        cache.check_invariants()


def test_what_was_read_long_ago_does_not_count(path: Path) -> None:
    with open_cache(path, 4) as cache:
        cache.put(KEYS[:40], PAGES[:40])
        cache.flush()
        for number in [0, *range(1, 12), 0]:
            cache.get(KEYS[number : number + 1])
        assert KEYS[0] not in cache._groups[0].places.index


def test_free_slots_are_filled_and_the_others_remembered(path: Path) -> None:
    with open_cache(path, 8) as cache:
        cache.put(KEYS[:8], PAGES[:8])
    with open_cache(path, 3) as cache:
        wanted = [0, 5, 5, 2, 7, 0, 6]
        for _ in range(2):
            assert bits(cache.get([KEYS[n] for n in wanted])) == bits(PAGES[wanted])
            assert cache.stats().num_free_slots == 0
            cache.check_invariants()


# -- calls that break off --------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises."""


class Interrupter:
    """Raises at the ``turn``-th call of any of some methods that take long."""

    def __init__(self) -> None:
        self.turn = 0
        self.only = threading.current_thread()

    def patch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            result = real(*args, **options) if after else None
            if threading.current_thread() is self.only:
                self.turn -= 1
                if self.turn == 0:
                    raise Interrupt
            return result if after else real(*args, **options)

        patch.setattr(owner, name, call)

    @contextmanager
    def armed(self, turn: int) -> Iterator[None]:
        self.turn = turn
        try:
            yield
        finally:
            self.turn = 0


POINTS: list[tuple[Any, str, bool]] = [
    (pk.PageStore, "read", False),
    (pk.PageStore, "read", True),
    (pk.PageStore, "read_layer", False),
    (pk.PageStore, "write", False),
    (pk.PageStore, "refresh", False),
    (SpillFile, "allocate", False),
    (SpillFile, "write_page", True),
    (SpillFile, "write_layer", False),
    (SpillFile, "read_layers", False),
    (SlotPool, "allocate", False),
    (Mover, "find_rows", False),
    (CacheLock, "wait", True),
    (keyed, "copy_pages", False),
    (keyed, "copy_pages", True),
]


def calls(cache: pk.PagedKVCache) -> dict[str, Callable[[], Any]]:
    keys, _, _ = prefix(6)
    k, v = make_kv(SPEC, 22)
    fresh = count(1000, 24)

    def put() -> None:
        start = next(fresh)
        cache.put(pk.page_keys(SPEC, range(start, start + 24)), PAGES[:6])

    def acquire() -> None:
        with cache.acquire(keys[:2]):
            pass

    def use_a_sequence() -> None:
        with cache.open_sequence(range(24)) as sequence:
            with sequence.gather(0):
                pass
            with sequence.fork() as fork:
                fork.truncate(min(10, fork.num_tokens))
                fork.append(k, v)
                with fork.gather(1):
                    pass

    def prefill() -> None:
        with cache.open_sequence() as sequence:
            sequence.append(k, v)
            sequence.commit(range(100, 122))
            sequence.save()

    return {
        "put": put,
        "put one": lambda: cache.put([make_key(next(fresh))], PAGES[:1]),
        "get": lambda: cache.get(keys),
        "get twice": lambda: [cache.get(KEYS[n : n + 2]) for n in (0, 2, 0, 2)],
        "acquire": acquire,
        "sequence": use_a_sequence,
        "prefill": prefill,
        "flush": cache.flush,
    }


@pytest.mark.parametrize("name", ["put", "put one", "get", "get twice", "acquire", "flush"])
def test_an_interrupted_call_leaves_nothing_behind(path: Path, name: str) -> None:
    check_interrupts(path, name, 3)


@pytest.mark.parametrize("name", ["sequence", "prefill"])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_an_interrupted_use_of_a_sequence_leaves_nothing_behind(
    path: Path, name: str, num_slots: int
) -> None:
    check_interrupts(path, name, num_slots)


def check_interrupts(path: Path, name: str, num_slots: int) -> None:
    keys, pages, _ = prefix(6)
    num_interrupts = 0
    with open_cache(path, num_slots) as cache:
        cache.put(KEYS[:10], PAGES[:10])
        cache.put(keys, pages)
        call = calls(cache)[name]
        others = count(10_000)
        for owner, method, after in POINTS:
            for turn in (1, 2, 4):
                cache.put([make_key(next(others)) for _ in range(4)], PAGES[:4])
                with pytest.MonkeyPatch.context() as patch:
                    interrupter = Interrupter()
                    interrupter.patch(patch, owner, method, after=after)
                    with interrupter.armed(turn):
                        try:
                            call()
                        except Interrupt:
                            num_interrupts += 1
                wait_for_writers(cache)
                cache.check_invariants()
                stats = cache.stats()
                where = f"{owner.__name__}.{method}, turn {turn}"
                assert stats.num_pinned_slots == 0, where
                assert stats.num_pages_held == 0, where
                places = cache._groups[0].places
                assert (places.num_moving, places.num_copying) == (0, 0), where
                assert places.spill is None or places.spill.num_used == 0, where
        assert num_interrupts > 0
        assert bits(cache.get(keys)) == bits(pages)
        assert bits(cache.get(KEYS[:10])) == bits(PAGES[:10])


# -- put and a page that is only spilled -----------------------------------------------------


def test_a_put_of_a_key_that_only_a_sequence_has_on_disk_outlives_the_sequence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pages, kv = prefix(3)
    with open_cache(path, 2) as cache:
        store = cache.store
        assert store is not None
        sequence = cache.open_sequence()
        sequence.append(kv[0], kv[1])  # one page at least has to be spilled

        def fail(*args: Any, **options: Any) -> Any:
            raise pk.StoreError(f"cannot write to {path}")

        with monkeypatch.context() as patch:
            patch.setattr(store, "write", fail)
            with pytest.raises(pk.StoreError):
                sequence.commit(range(12))
        places = cache._groups[0].places
        found = [places.index.get(key) for key in keys]
        lonely = [n for n, page in enumerate(found) if page is not None and page.slot is None]
        assert lonely
        for number in lonely:
            cache.put([keys[number]], pages[number : number + 1])
        sequence.close()
        for number in lonely:
            assert bits(cache.get([keys[number]])) == bits(pages[number : number + 1])
        cache.check_invariants()


# -- save ------------------------------------------------------------------------------------


def test_save_writes_private_pages_at_once_and_counts_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(SPEC, 14)
    with open_cache(path, 8) as cache:
        store = cache.store
        assert store is not None
        sequence = cache.open_sequence()
        sequence.append(*kv)
        sequence.commit(range(14))
        with cache._lock:  # as if its pages had stayed private
            for page in sequence.table(0)[:3]:
                del cache._groups[0].places.index[page.key]
                page.key = None
        num_calls = 0
        real = store.write

        def write(*args: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return real(*args, **options)

        monkeypatch.setattr(store, "write", write)
        sequence.save()
        assert num_calls == 1
        stats = cache.stats()
        assert stats.num_pages_stored == 4
        assert stats.bytes_written == 4 * SPEC.page_nbytes
        sequence.close()
    with open_cache(path, 8) as cache, cache.open_sequence(range(14)) as sequence:
        assert sequence.num_tokens == 14
        with sequence.gather(1) as (k, _):
            assert bits(k) == bits(kv[0][1])


# -- deadlines -------------------------------------------------------------------------------


def test_a_load_tells_the_store_how_long_it_may_take(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_prefix(path, 4)
    keys, pages, _ = prefix(4)
    with open_cache(path, 4) as cache:
        store = cache.store
        assert store is not None
        deadlines: list[float | None] = []
        real = store.read

        def read(rows: Any, out: Any, *, deadline: float | None = None, **options: Any) -> None:
            deadlines.append(deadline)
            if deadline is not None and deadline < 1:
                raise pk.StoreTimeoutError("the disk did not answer")
            real(rows, out, **options)

        monkeypatch.setattr(store, "read", read)
        with pytest.raises(pk.StoreTimeoutError):
            cache.load(keys, deadline=0.5).result()
        cache.check_invariants()
        assert cache._groups[0].places.num_moving == 0
        assert bits(cache.load(keys, deadline=500).result()) == bits(pages)
        assert bits(cache.load(keys).result()) == bits(pages)
        assert [d is None for d in deadlines] == [False, False]
        assert 100 < (deadlines[1] or 0) <= 500


@pytest.mark.parametrize("error", [pk.StoreTimeoutError("late"), pk.CorruptPageError("unnamed")])
def test_a_read_that_fails_leaves_no_slot_behind(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    keys, pages, _ = stored_prefix(path, 4)
    with open_cache(path, 4) as cache:
        assert cache.store is not None

        def read(*args: Any, **options: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(cache.store, "read", read)
            patch.setattr(cache.store, "read_quickly", lambda *_: False)
            for call in (
                lambda: cache.get(keys),
                lambda: cache.get(keys[:1]),
                lambda: cache.acquire(keys).__enter__(),
                lambda: cache.open_sequence(range(16)),
            ):
                with unchanged(cache), pytest.raises(type(error)):
                    call()
        with cache.acquire(keys) as views:
            assert bits(np.stack(views)) == bits(pages)


# -- one store, one cache --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["a", "r"])
def test_a_store_that_a_cache_has_taken_over_is_refused(path: Path, mode: Any) -> None:
    pk.PageStore.open(path, SPEC).close()
    store = pk.PageStore.open(path, SPEC, mode=mode)
    with pk.PagedKVCache(SPEC, 2, store) as cache:
        with pytest.raises(pk.StoreLockedError, match=rf"{path} belongs to another cache"):
            pk.PagedKVCache(SPEC, 2, store)
        cache.put(KEYS[:1], PAGES[:1])
    with pytest.raises(pk.ClosedError):
        pk.PagedKVCache(SPEC, 2, store)


def test_a_cache_that_is_refused_leaves_the_others_pages_protected(path: Path) -> None:
    keys, pages, _ = prefix(2)
    store = pk.PageStore.open(path, SPEC)
    with pk.PagedKVCache(SPEC, 4, store) as cache:
        cache.put(keys, pages)
        cache.flush()
        with cache.open_sequence(range(8)) as sequence:
            with pytest.raises(pk.StoreLockedError):
                pk.PagedKVCache(SPEC, 2, store)
            store.collect(1)
            assert sequence.num_tokens == 8
            assert store.find_rows(keys).min() >= 0


def test_a_store_whose_cache_was_dropped_is_free(path: Path) -> None:
    store = pk.PageStore.open(path, SPEC)
    pk.PagedKVCache(SPEC, 2, store)
    gc.collect()
    with pk.PagedKVCache(SPEC, 2, store) as cache:
        cache.put(KEYS[:1], PAGES[:1])


def test_a_store_whose_cache_could_not_be_made_is_free(path: Path, tmp_path: Path) -> None:
    (tmp_path / "pool").touch()
    store = pk.PageStore.open(path, SPEC)
    with pytest.raises(FileExistsError):
        pk.PagedKVCache(SPEC, 2, store, pool_path=tmp_path / "pool")
    with pk.PagedKVCache(SPEC, 2, store) as cache:
        cache.put(KEYS[:1], PAGES[:1])


def test_a_resident_page_whose_row_was_given_up_is_written_again(tmp_path: Path) -> None:
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC, max_nbytes=2_000_000)
    with pk.PagedKVCache(SPEC, 4, store) as cache:
        cache.put(KEYS[:1], PAGES[:1])
        cache.flush()
        store.collect(1)  # as if others had needed the room: the page is in the pool only
        assert store.find(KEYS[0]) is None
        assert bits(cache.get(KEYS[:1])) == bits(PAGES[:1])
        for number in range(1, 12):
            cache.put(KEYS[number : number + 1], PAGES[number : number + 1])
        assert bits(cache.get(KEYS[:1])) == bits(PAGES[:1])


def one_page(number: int) -> tuple[list[pk.PageKey], Array]:
    return KEYS[number : number + 1], PAGES[number : number + 1]


def test_a_live_page_stays_while_its_segment_is_on_its_way(tmp_path: Path) -> None:
    keys, pages, kv = prefix(1)
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC, max_nbytes="4MiB")
    with pk.PagedKVCache(SPEC, 4, store) as cache:
        for number in range(3):
            cache.put(*one_page(number))
            cache.flush()
        entries = [pk.PageEntry(key=key, num_tokens=4) for key in [keys[0], *KEYS[10:16]]]
        store.write(0, entries, np.concatenate([pages, PAGES[10:16]]))
        for number in range(20, 24):
            cache.put(*one_page(number))
        cache.flush()
        held = cache.open_sequence(range(4))
        others = [cache.open_sequence() for _ in range(4)]
        for other in others:  # the pool is full of their pages
            other.append(*make_kv(SPEC, 4))

        def keep() -> set[tuple[int, pk.PageKey]]:
            is_leaving = store.num_segments_given_up and store.find(keys[0]) is None
            if is_leaving and len(others) == 4:  # meanwhile another thread needs a slot
                others[0].close()
                others.append(cache.open_sequence())
                others[-1].append(*make_kv(SPEC, 4))
            return cache.pages_in_use()

        store.protect(keep)
        assert store.collect(1).num_pages_moved >= 1
        assert len(others) == 5
        with held.gather(0) as (k, v):
            assert bits(np.stack([k, v])) == bits(kv[:, 0])


def test_a_live_page_stays_though_its_row_leaves_as_soon_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC, max_nbytes="4MiB")
    with pk.PagedKVCache(SPEC, 4, store) as cache:
        kv = make_kv(SPEC, 4)
        held = cache.open_sequence()
        held.append(*kv, range(4))
        write, calls = store.write, []

        def write_and_collect(*args: Any, **options: Any) -> list[StoreRow]:
            rows = write(*args, **options)
            if not calls:
                calls.append(store.collect(1))
                cache.put(*one_page(1))
            return rows

        monkeypatch.setattr(store, "write", write_and_collect)
        cache.flush()
        assert calls
        others = [cache.open_sequence() for _ in range(4)]
        for other in others:
            other.append(*make_kv(SPEC, 4))
        with held.gather(0) as (k, v):
            assert bits(np.stack([k, v])) == bits(np.stack([kv[0][0], kv[1][0]]))
