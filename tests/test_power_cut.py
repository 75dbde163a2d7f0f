"""A power cut at any moment: every state the disk may be left in opens, and holds what was flushed.

A busy run is recorded; the model ``fault_system.Disk`` says what each prefix of its file operations
may have left on the disk. Every such state is laid out in a folder and opened.
"""

import fcntl
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fault_system import Content, Disk, Op, Recorder, tree_of
from store_samples import bits, empty_like, make_entries, make_pages, make_spec

from pagedkv import PagedKVCache
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError, StoreError
from pagedkv.store import PageStore

SPEC = make_spec(num_layers=2, num_kv_heads=1, head_dim=128)
PAGES = make_pages(SPEC, 60)
ENTRIES = make_entries(SPEC, 60, parent=None)  # none is dead because another was given up
BITS = [bits(page) for page in PAGES]
KEYS = [entry.key for entry in ENTRIES]
EXTRA = 59
"""Number of the page that is written into a state after the power cut."""

NAME = "cache.zarr"


class Promise(NamedTuple):
    """What a state must hold: numbers of the pages, and which bound the store may have."""

    pages: frozenset[int]
    bounds: frozenset[int | None]


NOTHING = Promise(frozenset(), frozenset({None}))


class Run:
    """Steps of a busy process, each noted in the log as it ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / NAME
        self.recorder = Recorder(self.path)

    def note(self, store: PageStore) -> None:
        held = frozenset(n for n, key in enumerate(KEYS) if store.find(key))
        self.recorder.mark(Promise(held, frozenset({store.max_nbytes})))

    def write(self, store: PageStore, *numbers: int) -> None:
        store.write(0, [ENTRIES[n] for n in numbers], [PAGES[n] for n in numbers])
        assert all(store.find(KEYS[n]) for n in numbers)
        self.note(store)

    def in_another_lane(self) -> PageStore:
        """The store, opened as if another process had the first lane."""
        fd = os.open(self.path / "lane-0000", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        store = PageStore.open(self.path, SPEC)
        os.close(fd)
        return store


def busy(run: Run) -> None:
    """Several flushes, two lanes, arrays that grow, a bound that changes."""
    with PageStore.open(run.path, SPEC) as store:
        run.note(store)
        run.write(store, 0, 1, 2)
        run.write(store, 3)
        run.write(store, 4, 5, 6, 7, 8)
    with run.in_another_lane() as store:
        run.note(store)
        run.write(store, 9, 10, 11)
        run.write(store, 1, 12)
    store = PageStore.open(run.path, SPEC, max_nbytes=10**9)
    run.note(store)
    cache = PagedKVCache(SPEC, 3, store)
    numbers = range(13, 18)
    cache.put([KEYS[n] for n in numbers], np.stack([PAGES[n] for n in numbers]))
    cache.flush()
    assert all(store.find(KEYS[n]) for n in numbers)
    run.note(store)
    cache.close()


def bounded(run: Run) -> None:
    """A full store gives old pages up for new ones, moves hot ones, and keeps what is held."""

    def step(store: PageStore, first: int) -> None:
        hot = store.find(KEYS[0])
        if hot is not None:
            store.read([hot], empty_like(PAGES[:1]))
        numbers = [first, first + 1]
        store.protect(lambda: [(0, KEYS[3])])
        store.write(0, [ENTRIES[n] for n in numbers], [PAGES[n] for n in numbers])
        assert all(store.find(KEYS[n]) for n in (*numbers, 0, 3) if n < first + 2)
        run.note(store)

    with PageStore.open(run.path, SPEC, max_nbytes=MAX_NBYTES) as store:
        run.note(store)
        for first in range(0, 12, 2):
            step(store, first)
    with PageStore.open(run.path, SPEC) as store:
        run.note(store)
        for first in range(12, 16, 2):
            step(store, first)
        assert store.num_pages < 16


MAX_NBYTES = 130_000


def record(folder: Path, scenario: Callable[[Run], None]) -> Recorder:
    """The log of a scenario, which was left closed."""
    run = Run(folder)
    with run.recorder as recorder:
        scenario(run)
    disk = Disk(recorder)
    for op in recorder.log:
        disk.advance(op)
    assert disk.tree() == tree_of(folder), "a change was not recorded"
    return recorder


class States:
    """Lays states of the disk out in a folder and says what is wrong with them.

    Args:
        folder: Where; it is made.
        write_every: Every which state is also opened for writing.
    """

    def __init__(self, folder: Path, write_every: int = 1) -> None:
        folder.mkdir()
        self.folder = folder
        self.num_checked = 0
        self._write_every = write_every
        self._lies: dict[str, Content | None] = {}
        self._right: set[Any] = set()

    def problem(self, tree: dict[str, Content | None], required: Promise | None) -> str:
        """What is wrong; empty if nothing is."""
        known = (_without_temps(tree), required)
        if known in self._right:
            return ""
        self.num_checked += 1
        problem = self._torn_document(tree)
        if not problem:
            self._lay_out(tree)
            problem = self._open("r", required)
        if not problem and self.num_checked % self._write_every == 0:
            problem = self._open("a", required)
            self._clear()
        if not problem:
            self._right.add(known)
        return problem

    @staticmethod
    def _torn_document(tree: dict[str, Content | None]) -> str:
        for name, data in tree.items():
            if name.endswith("/zarr.json") and data is not None:
                try:
                    json.loads(data)
                except ValueError:
                    return f"{name} is torn"
        return ""

    def _open(self, mode: Any, required: Promise | None) -> str:
        path = self.folder / NAME
        try:
            store = PageStore.open(path, SPEC, mode=mode)
        except StoreError as error:
            return "" if mode == "r" and required is None else f"mode {mode}: {error}"
        pages, bounds = required or NOTHING
        with store:
            if required and store.max_nbytes not in bounds:
                return f"max_nbytes is {store.max_nbytes}, not {bounds}"
            problem = self._wrong_page(store, pages)
            if problem or mode == "r":
                return problem and f"mode {mode}: {problem}"
            store.write(0, [ENTRIES[EXTRA]], [PAGES[EXTRA]])
            is_bounded = store.max_nbytes is not None
            nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            if is_bounded and nbytes > store.max_nbytes:
                return f"{nbytes} bytes are more than {store.max_nbytes}"
        with PageStore.open(path, SPEC, mode="r") as store:
            problem = self._wrong_page(store, frozenset() if is_bounded else pages | {EXTRA})
        return problem and f"reopened: {problem}"

    def _wrong_page(self, store: PageStore, required: frozenset[int]) -> str:
        found = {n: row for n, key in enumerate(KEYS) if (row := store.find(key)) is not None}
        while True:
            out = empty_like(PAGES[: len(found)])
            try:
                store.read(list(found.values()), out)
                break
            except CorruptPageError as error:  # maybe there is another copy
                for number in [n for n in found if KEYS[n] in error.keys]:
                    row = store.find(KEYS[number])
                    if row is None:
                        del found[number]
                    else:
                        found[number] = row
        if wrong := [n for n, page in zip(found, out, strict=True) if bits(page) != BITS[n]]:
            return f"pages {wrong} are wrong"
        if lost := sorted(required - found.keys()):
            return f"pages {lost} are lost"
        for lane in {found[number].lane for number in required}:
            last = max(found[number].row for number in required if found[number].lane == lane)
            for array in ("kv", "catalog"):
                length = self._length(store, lane, array)
                if last >= length:
                    return f"plain readers see {length} rows of {array}, but not row {last}"
        return ""

    @staticmethod
    def _length(store: PageStore, lane: int, array: str) -> int:
        place = Path(fmt.lane_name(lane), fmt.group_name(SPEC), array, "zarr.json")
        return int(json.loads((store.path / place).read_bytes())["shape"][0])

    def _clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._lies = {}

    def _lay_out(self, tree: dict[str, Content | None]) -> None:
        """Make the folder hold ``tree``; it still holds the one before, if that was only read."""
        if any(tree.get(name, b"") != data for name, data in self._lies.items() if data is None):
            self._clear()
        for name, data in self._lies.items():
            if data is not None and name not in tree:
                os.unlink(self.folder / name)
        for name, data in sorted(tree.items()):
            if data is None and name not in self._lies:
                (self.folder / name).mkdir()
            elif data is not None and self._lies.get(name) is not data:
                (self.folder / name).write_bytes(data)
        self._lies = tree


def _without_temps(tree: dict[str, Content | None]) -> Any:
    """The tree without what is in temporary files: no process reads those of another."""
    parts = {
        (name.partition("/.tmp-")[0], "") if "/.tmp-" in name else (name, data)
        for name, data in tree.items()
    }
    return frozenset(parts)


Fate = Callable[[int, Op], str]


def is_name(op: Op) -> bool:
    return op.kind in {"link", "unlink"}


def all_dropped(*_: object) -> str:
    return "drop"


def all_kept(*_: object) -> str:
    return "keep"


def only_names(_: int, op: Op) -> str:
    return "keep" if is_name(op) else "drop"


def names_and_zeros(_: int, op: Op) -> str:
    return "keep" if is_name(op) else "zeros"


def only_bytes(_: int, op: Op) -> str:
    return "drop" if is_name(op) else "keep"


SIMPLE_FATES: tuple[Fate, ...] = (all_dropped, all_kept, only_names, names_and_zeros, only_bytes)


def fates(pending: list[Op], rng: random.Random, *, many: bool) -> Iterator[Fate]:
    """Choices of what became of the changes that were not synced."""
    yield from SIMPLE_FATES
    last = len(pending) - 1
    yield lambda n, _: "half" if n == last else "keep"
    recent = range(max(0, last - (8 if many else 1)), last + 1)
    for one in {*recent, *rng.sample(range(last + 1), min(last + 1, 3 if many else 1))}:
        yield lambda n, _, one=one: "drop" if n == one else "keep"
        yield lambda n, _, one=one: "keep" if n == one else "drop"
    for _ in range(8 if many else 2):
        weights = [rng.random() for _ in range(4)]
        chosen = rng.choices(["keep", "drop", "half", "zeros"], weights, k=last + 1)
        yield lambda n, _, chosen=chosen: chosen[n]


def required_after(log: list[Op]) -> list[Promise | None]:
    """What each prefix of the log must hold; None before there is a store.

    The pages that the store held at the last note before, unless they were gone at the next: they
    may have been evicted meanwhile.
    """
    notes = [(place, op.data) for place, op in enumerate(log) if op.kind == "mark"]
    required: list[Promise | None] = []
    before: Promise | None = None
    for place in range(len(log) + 1):
        while notes and notes[0][0] < place:
            before = notes.pop(0)[1]
        after = notes[0][1] if notes else before
        required.append(
            before and Promise(before.pages & after.pages, before.bounds | after.bounds)
        )
    return required


def check_all(recorder: Recorder, states: States, *, seed: int, many: bool) -> None:
    """Check what every prefix of the log may have left."""
    rng = random.Random(seed)
    required = required_after(recorder.log)
    disk = Disk(recorder)
    for place, op in enumerate(recorder.log):
        disk.advance(op)
        if op.kind == "mark":
            continue
        some = many or place % 3 == 0
        chosen = fates(disk.pending, rng, many=many) if some else SIMPLE_FATES
        for number, fate in enumerate(chosen):
            problem = states.problem(disk.tree(fate), required[place + 1])
            assert not problem, f"{problem}: cut after change {place} at {op.site}, fate {number}"


def is_missed(recorder: Recorder, sync: int, states: States) -> bool:
    """Whether some state is wrong if the sync at this place of the log is not made."""
    required = required_after(recorder.log)
    disk = Disk(recorder)
    for op in recorder.log[:sync]:
        disk.advance(op)
    target = recorder.log[sync].target
    unsynced = [op for op in disk.pending if op.target == target]
    if not unsynced:
        return False
    choices: list[Fate] = [
        lambda _, op: "drop" if op in unsynced else "keep",
        lambda _, op: "zeros" if op in unsynced and not is_name(op) else "keep",
        lambda _, op: "keep" if op in unsynced else "drop",
        *SIMPLE_FATES,
    ]
    for place, op in enumerate(recorder.log[sync + 1 :], start=sync + 1):
        if op.kind == "mark" or place == sync + 1 or is_name(op):
            for fate in choices:
                if states.problem(disk.tree(fate), required[place]):
                    return True
        disk.advance(op)
        if op.kind == "sync" and op.target == target:  # which makes up for it
            return False
    return any(states.problem(disk.tree(fate), required[-1]) for fate in choices)


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", 2)


@pytest.mark.parametrize("scenario", [busy, bounded])
def test_every_state_that_a_power_cut_may_leave_opens_and_holds_what_was_flushed(
    memory_folder: Path, scenario: Callable[[Run], None], soak: bool
) -> None:
    recorder = record(memory_folder / "run", scenario)
    states = States(memory_folder / "state", write_every=1 if soak else 4)
    check_all(recorder, states, seed=1, many=soak)


@pytest.mark.parametrize("scenario", [busy, bounded])
def test_without_the_syncs_of_any_kind_of_file_some_state_is_wrong(
    memory_folder: Path, scenario: Callable[[Run], None]
) -> None:
    recorder = record(memory_folder / "run", scenario)
    states = States(memory_folder / "state", write_every=10**9)
    missed: dict[tuple[str, ...], bool] = {}
    for place, op in enumerate(recorder.log):
        if op.kind == "sync":
            kind = (re.sub(r"\d+", "N", recorder.labels[op.target]), *op.site)
            missed[kind] = missed.get(kind, False) or is_missed(recorder, place, states)
    assert [kind for kind, is_needed in missed.items() if not is_needed] == []
