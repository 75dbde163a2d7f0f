"""File operations that fail, each in turn: nothing is lost, the error says where, it works again.

A busy life of a cache is run once to see which file operations it makes; then once for each of
them and each fault, with just that operation harmed.
"""

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fault_system import READS, WRITES, Action, Call, FaultySystem, Hang, Rule, failing, short
from kv_samples import Array, bits, make_key, make_kv, make_pages, make_spec

from pagedkv import PagedKVCache, PageStore, Sequence
from pagedkv import format as fmt
from pagedkv.errors import PageNotFoundError, StoreError, StoreTimeoutError
from pagedkv.format import PageEntry, StoreRow

SPEC = make_spec()
KEYS = [make_key(number) for number in range(14)]
PAGES = make_pages(SPEC, range(14))
KV = make_kv(SPEC, 5 * SPEC.page_tokens)

OPENS = {"open", "mkdir", "replace", "rename", "unlink", "rmdir"}
LOOKS = {"stat", "lstat", "scandir", "listdir", "fstat", "flock", "lseek", "chmod"}
FAULTS: dict[str, tuple[Action, frozenset[str]]] = {
    "ENOSPC": (failing(errno.ENOSPC), WRITES | {"open", "mkdir", "replace", "rename", "fsync"}),
    "EIO": (failing(errno.EIO), READS | WRITES | OPENS | LOOKS | {"fsync"}),
    "EACCES": (failing(errno.EACCES), frozenset(OPENS | LOOKS)),
    "EINTR": (failing(errno.EINTR), READS | WRITES | {"open", "fsync", "flock"}),
    "a short read": (short, READS),
    "a short write": (short, WRITES),
}


class Life:
    """What a process does with a store, in steps that can be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store: PageStore | None = None
        self.cache: PagedKVCache | None = None
        self.sequence: Sequence | None = None
        self.known: set[int] = set()
        self.steps: list[Callable[[], None]] = [
            self.open,
            lambda: self.put(0, 7),
            self.flush,
            *([self.append] * 5),
            self.gather,
            lambda: self.put(7, 10),
            self.gather,
            self.get,
            self.close,
            self.read,
            self.open,
            self.get,
            lambda: self.put(10, 14),
            self.close,
        ]

    def open(self) -> None:
        self.store = PageStore.open(self.path, SPEC)
        assert sorted(p.name for p in self.path.glob("lane-*")) == ["lane-0000"]
        self.cache = PagedKVCache(SPEC, 3, self.store)
        self.sequence = self.cache.open_sequence()

    def put(self, start: int, stop: int) -> None:
        assert self.cache is not None
        self.cache.put(KEYS[start:stop], PAGES[start:stop])
        self.known |= set(range(start, stop))

    def flush(self) -> None:
        assert self.cache is not None
        assert self.store is not None
        self.cache.flush()
        assert all(self.store.find(KEYS[number]) for number in self.known)

    def append(self) -> None:
        """Append a page; after an error, what is missing."""
        assert self.sequence is not None
        start = self.sequence.num_tokens
        assert start % SPEC.page_tokens == 0
        stop = start + SPEC.page_tokens
        self.sequence.append(KV[0][:, start:stop], KV[1][:, start:stop])

    def gather(self) -> None:
        assert self.sequence is not None
        count = self.sequence.num_tokens
        for layer in range(SPEC.num_layers):
            with self.sequence.gather(layer) as kinds:
                assert [bits(kind) for kind in kinds] == [bits(kv[layer][:count]) for kv in KV]

    def get(self) -> None:
        assert self.cache is not None
        for number in sorted(self.known):
            assert bits(self.cache.get([KEYS[number]])[0]) == bits(PAGES[number])
        numbers = sorted(self.known)
        assert bits(self.cache.get([KEYS[n] for n in numbers])) == bits(PAGES[numbers])

    def close(self) -> None:
        assert self.cache is not None
        self.cache.close()
        assert self.store is not None
        assert self.store.is_closed

    def read(self) -> None:
        """Another process reads every page."""
        with PageStore.open(self.path, SPEC, mode="r") as store:
            read_all(store, self.known)

    def check(self) -> None:
        """Nothing is lost, whatever failed."""
        if self.cache is not None and not self.cache.is_closed:
            self.cache.check_invariants()
            self.get()
            self.gather()


def read_all(store: PageStore, numbers: set[int]) -> None:
    rows = [store.find(KEYS[number]) for number in sorted(numbers)]
    if None in rows:  # a chunk of the catalogue could not be read a moment ago
        store.refresh()
        rows = [store.find(KEYS[number]) for number in sorted(numbers)]
    assert None not in rows
    out = np.zeros((len(rows), *SPEC.page_shape), SPEC.np_dtype)
    store.read([row for row in rows if row is not None], list(out))
    assert bits(out) == bits(PAGES[sorted(numbers)])


def live(folder: Path, rule: Rule | None = None) -> list[Call]:
    """Live through all steps, with a fault; the calls."""
    life = Life(folder / "cache.zarr")
    with FaultySystem(folder, syncs=False) as system:
        if rule is not None:
            system.add(rule)
        try:
            for step in life.steps:
                try:
                    step()
                except StoreError as error:
                    assert rule is not None
                    assert rule.harmed
                    assert str(folder) in str(error)
                    life.check()
                    step()
        finally:
            if life.cache is not None:
                life.cache.close()
    with PageStore.open(life.path, SPEC) as store:
        read_all(store, set(range(14)))
    left = [p for p in folder.rglob("*") if p.name.startswith(".tmp-")]
    assert left == []
    return system.calls


def descriptors_below(folder: Path) -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [link for link in links if link.startswith(str(folder))]


def places(calls: list[Call], fault: str, *, all_of_them: bool) -> Iterator[Rule]:
    """Rules that harm one call each: at each line the last, or more of them."""
    action, names = FAULTS[fault]
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for call in calls:
        if call.name in names:
            counts[call.name, call.site] = counts.get((call.name, call.site), 0) + 1
    for (name, site), count in counts.items():
        some = {0, count - 1} if fault == "EIO" else {count - 1}
        for first in range(count) if all_of_them else sorted(some):
            yield Rule(action, (name,), site=site, first=first)


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_nothing_is_lost_the_error_says_where_and_it_works_again(
    tmp_path: Path, fault: str, soak: bool
) -> None:
    (tmp_path / "whole").mkdir()
    calls = live(tmp_path / "whole")
    failures: dict[str, str] = {}
    num_harmed = 0
    for number, rule in enumerate(places(calls, fault, all_of_them=soak)):
        folder = tmp_path / str(number)
        folder.mkdir()
        what = f"{rule.names[0]} at {' '.join(rule.site)}, the {rule.first}th"
        try:
            live(folder, rule)
            assert descriptors_below(folder) == []
        except Exception as error:  # noqa: BLE001 - all of them are listed
            failures[what] = f"{type(error).__name__}: {error}"
        num_harmed += len(rule.harmed)
    assert not failures, "\n".join(f"{what}: {error}" for what, error in failures.items())
    assert num_harmed


def test_every_file_operation_goes_through_the_seam(tmp_path: Path) -> None:
    around = {call.site for call in live(tmp_path) if not call.through_seam}
    assert around == set()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of fourteen pages in seven segments."""
    path = tmp_path / "cache.zarr"
    with PageStore.open(path, SPEC) as store:
        write(store, range(14))
    return path


def write(store: PageStore, numbers: range) -> None:
    entries = [PageEntry(key=KEYS[n], num_tokens=SPEC.page_tokens) for n in numbers]
    store.write(0, entries, list(PAGES[numbers.start : numbers.stop]))


def rows_of(store: PageStore, *numbers: int) -> list[StoreRow]:
    rows = [store.find(KEYS[number]) for number in numbers]
    return [row for row in rows if row is not None]


def same(out: Array, *numbers: int) -> bool:
    return bits(out) == bits(PAGES[list(numbers)])


def segment_file(number: int) -> str:
    return f"kv/{fmt.chunk_name(number, 6)}"


def empty(count: int) -> Array:
    return np.full((count, *SPEC.page_shape), 7, SPEC.np_dtype)


class TestReadingASegment:
    @pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
    def test_a_segment_that_cannot_be_read_does_not_disturb_the_others(
        self, path: Path, code: int
    ) -> None:
        with FaultySystem(path) as system, PageStore.open(path, SPEC) as store:
            system.add(Rule(failing(code), ("open", "preadv"), part=segment_file(3), times=None))
            with pytest.raises(StoreError, match=rf"cannot read .*{segment_file(3)}"):
                store.read(rows_of(store, *range(14)), list(empty(14)))
            others = [n for n in range(14) if n not in {6, 7}]
            out = empty(len(others))
            store.read(rows_of(store, *others), list(out))
            assert same(out, *others)
            assert len(rows_of(store, 6, 7)) == 2  # it is no loss
            system.heal()
            out = empty(14)
            store.read(rows_of(store, *range(14)), list(out))
            assert same(out, *range(14))
            assert store.num_damaged_pages == 0

    def test_a_cache_that_cannot_read_keeps_what_it_has(self, path: Path) -> None:
        with FaultySystem(path) as system:
            store = PageStore.open(path, SPEC)
            with PagedKVCache(SPEC, 4, store) as cache:
                assert same(cache.get(KEYS[:2]), 0, 1)
                system.add(Rule(failing(errno.EIO), ("open", "preadv"), part="/kv/", times=None))
                with pytest.raises(StoreError, match="cannot read"):
                    cache.get(KEYS[2:8])
                assert same(cache.get(KEYS[:2]), 0, 1)
                cache.check_invariants()
                system.heal()
                assert same(cache.get(KEYS), *range(14))

    def test_short_reads_are_read_on(self, path: Path) -> None:
        with FaultySystem(path) as system, PageStore.open(path, SPEC) as store:
            rule = Rule(short, ("preadv",), times=None)
            system.add(rule)
            out = empty(14)
            store.read(rows_of(store, *range(14)), list(out))
            assert same(out, *range(14))
            assert rule.harmed

    def test_a_vanished_segment_is_a_miss(self, path: Path) -> None:
        store = PageStore.open(path, SPEC)
        with PagedKVCache(SPEC, 4, store) as cache:
            next(path.rglob(segment_file(3))).unlink()
            with pytest.raises(PageNotFoundError):
                cache.get(KEYS)
            assert cache.match(KEYS) == 6
            assert same(cache.get(KEYS[8:]), *range(8, 14))
            cache.put(KEYS[6:8], PAGES[6:8])
            cache.flush()
            assert same(cache.get(KEYS), *range(14))


class TestAHungRead:
    def test_it_ends_at_the_deadline_and_its_memory_is_left_alone(self, path: Path) -> None:
        hang = Hang()
        with FaultySystem(path) as system, PageStore.open(path, SPEC) as store:
            hung = Rule(hang, ("preadv",), part=segment_file(3))
            system.add(hung)
            system.has_page_cache = False
            out = empty(2)
            try:
                with pytest.raises(StoreTimeoutError, match=str(path)):
                    store.read(rows_of(store, 6, 7), list(out), deadline=0.3)
                assert hang.entered.is_set()
                others = [n for n in range(14) if n not in {6, 7}]
                rest = empty(len(others))
                store.read(rows_of(store, *others), list(rest))
                assert same(rest, *others)
                write(store, range(1))
                out[...] = 7
            finally:
                hang.released.set()
            assert hang.ended.wait(60)
            again = empty(2)
            store.read(rows_of(store, 6, 7), list(again))  # it is no loss
            assert same(again, 6, 7)
            assert (out == 7).all()
        assert descriptors_below(path) == []

    def test_a_store_with_a_hung_read_can_be_closed_and_opened_again(self, path: Path) -> None:
        hang = Hang()
        with FaultySystem(path) as system:
            store = PageStore.open(path, SPEC)
            hung = Rule(hang, ("preadv",), part=segment_file(3))
            system.add(hung)
            system.has_page_cache = False
            try:
                with pytest.raises(StoreTimeoutError):
                    store.read(rows_of(store, 6), list(empty(1)), deadline=0.1)
                store.close()
                with PageStore.open(path, SPEC) as again:
                    read_all(again, set(range(14)))
            finally:
                hang.released.set()
            assert hang.ended.wait(60)

    def test_hung_reads_beyond_a_number_fail_at_once_until_they_are_let_go(
        self, path: Path
    ) -> None:
        hang = Hang()
        with FaultySystem(path) as system, PageStore.open(path, SPEC) as store:
            hung = Rule(hang, ("preadv",), part=segment_file(3), times=None)
            system.add(hung)
            system.has_page_cache = False
            try:
                for _ in range(40):
                    with pytest.raises(StoreTimeoutError):
                        store.read(rows_of(store, 6), list(empty(1)), deadline=0.01)
                assert 1 <= len(hung.harmed) < 40
            finally:
                hang.released.set()
                system.heal()
            for _ in range(100):  # until the threads have come back
                out = empty(14)
                with contextlib.suppress(StoreTimeoutError):
                    store.read(rows_of(store, *range(14)), list(out))
                    break
            assert same(out, *range(14))
