"""``PageStore``: pages on disk, by key, in a Zarr v3 store that never returns wrong bytes."""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from pagedkv import files, root
from pagedkv.catalog import entry_of
from pagedkv.codec import Codec, get_codec
from pagedkv.errors import (
    ClosedError,
    CorruptPageError,
    PageNotFoundError,
    StoreError,
    StoreLockedError,
)
from pagedkv.format import (
    CATALOG,
    KV,
    Geometry,
    PageEntry,
    StoreRow,
    group_name,
    lane_name,
    pack_row,
    unpack_row,
)
from pagedkv.header import StoreHeader
from pagedkv.lane import LaneGroup, Segment
from pagedkv.lane_lock import LaneLock, holder_of, lanes_of
from pagedkv.row_index import RowIndex
from pagedkv.segment import SegmentFormat
from pagedkv.space import Space
from pagedkv.spec import KVSpec, PageKey, parse_nbytes

logger = logging.getLogger("pagedkv")

Array = npt.NDArray[Any]


class PageStore:
    """Pages of one or several specs on disk, found by key. Made by ``PageStore.open``.

    Thread-safe; no lock is held while it reads or writes pages. Several processes may have one
    store open: each writer owns a lane, and all read all lanes as they were on opening.
    """

    def __init__(self, path: Path, header: StoreHeader, lane_lock: LaneLock | None) -> None:
        self.path = path
        self._header = header
        self._lane_lock = lane_lock
        self._space = Space(f"the store {path}", header.max_nbytes)
        self._groups: dict[tuple[int, int], LaneGroup] = {}
        self._indexes = [RowIndex() for _ in header.specs]
        self._lock = threading.Lock()
        self._no_writers = threading.Condition(self._lock)
        self._num_writers = 0
        self._num_damaged_pages = 0
        self._closed = ""
        self._load_lanes()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        spec: KVSpec | Sequence[KVSpec] | None = None,
        *,
        mode: Literal["a", "r"] = "a",
        codec: Codec | str | None = None,
        max_nbytes: int | str | None = None,
        store_tokens: bool = True,
    ) -> "PageStore":
        """Open the store at ``path``; with mode ``"a"`` make it if it is not there.

        Args:
            path: The store's folder.
            spec: What the pages look like, one spec a layer group; None takes the store's own.
            mode: ``"a"`` reads and writes, ``"r"`` only reads.
            codec: How a new store keeps numbers (raw by default); must be that of an existing one.
            max_nbytes: Bound of the bytes on disk; replaces that of an existing store. Not used
                with mode ``"r"``.
            store_tokens: Keep token ids in the catalogue. False keeps them out; so does a store
                that was made with False, whatever is asked for here.

        Raises:
            SpecMismatchError: The store is of another spec or codec; both are named.
            FormatVersionError: The store has a later format.
            StoreLockedError: This process already has it open for writing.
            StoreError: There is no store, or no folder that can be one; the path is named.
            ValueError: An argument is out of range.
        """
        if sys.platform == "win32":
            raise StoreError("PageStore needs POSIX file locks and pread, which Windows lacks")
        if mode not in ("a", "r"):
            raise ValueError(f"mode is {mode!r}: it must be 'a' or 'r'")
        specs = None if spec is None else (spec,) if isinstance(spec, KVSpec) else tuple(spec)
        for one in specs or ():
            if not isinstance(one, KVSpec):
                raise TypeError(f"spec is {spec!r}: give a KVSpec, or several")
        bound = None if max_nbytes is None else parse_nbytes(max_nbytes)
        chosen = None if codec is None else get_codec(codec)
        place = Path(path).absolute()
        header = root.read_header(place)
        if header is None:
            if mode == "r":
                raise StoreError(f"there is no store at {place}")
            if not specs:
                raise ValueError(f"there is no store at {place}: give the spec of a new one")
            wanted = StoreHeader.new(specs, get_codec(codec), bound, store_tokens=store_tokens)
            header = root.create(place, wanted)
        header.require_match(specs, chosen, f"the store {place}")
        if mode == "r":
            return _register(cls(place, header, None))
        with _opening, files.translated(place, "write to the store"):
            _require_no_writer(place)
            lane_lock = LaneLock.take(place)
            try:
                lane_lock.prepare()
                if bound is not None and bound != header.max_nbytes:
                    root.set_max_nbytes(place, bound)
                    header = replace(header, max_nbytes=bound)
                keep_tokens = store_tokens and header.store_tokens
                return _register(cls(place, replace(header, store_tokens=keep_tokens), lane_lock))
            except BaseException:
                lane_lock.release()
                raise

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        """What the pages look like; a page's group is an index into this."""
        return self._header.specs

    @property
    def codec(self) -> Codec:
        """How the pages' numbers become bytes."""
        return self._header.codec

    @property
    def is_closed(self) -> bool:
        """Whether every call raises ``ClosedError``."""
        return bool(self._closed)

    @property
    def read_only(self) -> bool:
        """Whether the store was opened with mode ``"r"``."""
        return self._lane_lock is None

    @property
    def max_nbytes(self) -> int | None:
        """Bound of the bytes on disk, if there is one."""
        return self._space.max_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes on disk: segments, catalogues and derived columns of all lanes, and scratch."""
        return self._space.nbytes

    @property
    def num_pages(self) -> int:
        """Keys that the store holds."""
        return sum(len(index) for index in self._indexes)

    @property
    def num_damaged_pages(self) -> int:
        """Pages that a read found damaged or gone, since the store was opened."""
        return self._num_damaged_pages

    @property
    def num_torn_chunks(self) -> int:
        """Segments left out on opening: their catalogue chunk is torn, or their file gone."""
        return sum(group.num_torn_chunks for group in self._groups.values())

    @property
    def scratch_dir(self) -> Path:
        """Folder of the own lane, for nameless scratch files."""
        return self._own_lane().path

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch files on disk, as the cache reports them; counted in ``nbytes``."""
        return self._space.scratch_nbytes

    @scratch_nbytes.setter
    def scratch_nbytes(self, nbytes: int) -> None:
        self._check_open()
        self._space.scratch_nbytes = nbytes

    def reserve(self, nbytes: int) -> None:
        """Raise ``StoreFullError`` if the store's bound has no room for ``nbytes`` more."""
        self._check_open()
        self._space.require(nbytes)

    def reserve_scratch(self, nbytes: int) -> None:
        """Count ``nbytes`` more of scratch files; ``StoreFullError`` if the bound has no room."""
        self._check_open()
        self._space.grow_scratch(nbytes)

    def find(self, key: PageKey, group: int = 0) -> StoreRow | None:
        """Where a page of a group (index into ``specs``) is, in any lane; None if nowhere."""
        self._check_open()
        return self._indexes[group].get(key)

    def find_rows(self, keys: Sequence[PageKey], group: int = 0) -> npt.NDArray[np.int64]:
        """Packed rows of many keys, -1 where there is none."""
        self._check_open()
        rows = map(self._indexes[group].get, keys)
        return np.array([-1 if row is None else pack_row(row) for row in rows], dtype=np.int64)

    def refresh(self) -> bool:
        """Whether other processes have changed anything; a stand-in that looks at nothing."""
        self._check_open()
        return False

    @property
    def own_lane(self) -> int | None:
        """The lane that this store writes."""
        return None if self._lane_lock is None else self._lane_lock.lane

    def __contains__(self, key: object) -> bool:
        self._check_open()
        return any(key in index for index in self._indexes)

    def entry(self, row: StoreRow) -> PageEntry:
        """What the catalogue says of the page in ``row``; the salt is not recoverable.

        Raises:
            PageNotFoundError: No page is there.
            CorruptPageError: Its record is damaged or gone.
            StoreError: The disk failed.
        """
        self._check_open()
        group, segment, place = self._locate(row)
        key = segment.keys[place]
        assert key is not None
        path = group.chunk_path(CATALOG, segment.number)
        with files.translated(path, "read"):
            try:
                entry = entry_of(group.read_record(segment.number, place)[0])
                if entry.key != key:
                    raise ValueError("it is the record of another page")
            except (ValueError, OSError) as error:
                if isinstance(error, OSError) and not files.is_vanished(error):
                    raise
                message = f"the record of {row} in {path} is damaged: {error}"
                raise CorruptPageError(message, (key,)) from error
        return entry

    def entries(self) -> Iterator[tuple[StoreRow, PageEntry]]:
        """All pages that the store holds as the iteration starts, in the order of their rows."""
        self._check_open()
        with self._lock:
            rows = sorted(row for index in self._indexes for _, row in index)
        for row in rows:
            yield row, self.entry(row)

    def write(
        self,
        group: int,
        entries: Sequence[PageEntry],
        pages: Sequence[Array] | Array,
        *,
        at: npt.NDArray[np.int64] | None = None,
        keep: Callable[[], Collection[StoreRow]] | None = None,
    ) -> list[StoreRow]:
        """Store pages of one spec; they are durable when this returns.

        Pages whose key the store already holds are not written again: first bytes win. In a tail,
        the places beyond ``num_tokens`` are stored as zeros. Each call makes at least one segment,
        whose index and catalogue have room for all its rows (up to 256 KiB): write in batches.

        Args:
            group: Index into ``specs``.
            entries: What the catalogue shall say of each page.
            pages: Arrays of ``spec.page_shape`` and the spec's dtype, maybe strided.

        Returns:
            Where each page is.

        Raises:
            ValueError: A shape, dtype or entry does not fit the spec, or the codec cannot represent
                a number (INT8: NaN and infinity). Nothing has changed.
            StoreFullError: ``max_nbytes`` leaves no room. Nothing has changed.
            StoreError: The store is read-only, or the disk failed. Nothing has changed.
        """
        self._check_open()
        del keep
        pages = [pages[i] for i in at.tolist()] if at is not None else list(pages)
        lane = self._own_lane().lane
        if not 0 <= group < len(self.specs):
            raise ValueError(f"group is {group}: the store has {len(self.specs)} specs")
        if len(entries) != len(pages):
            raise ValueError(f"{len(entries)} entries for {len(pages)} pages")
        spec, target = self.specs[group], self._groups[lane, group]
        for entry, page in zip(entries, pages, strict=True):
            entry.check(spec)
            _check_array(page, spec.page_shape, spec, "a page")
        rows: dict[PageKey, StoreRow] = {}
        fresh: dict[PageKey, tuple[PageEntry, Array]] = {}
        with self._lock:
            self._check_open()
            for entry, page in zip(entries, pages, strict=True):
                row = self._indexes[group].get(entry.key)
                if row is None:
                    fresh.setdefault(entry.key, (entry, page))
                else:
                    rows[entry.key] = row
            nbytes = target.geometry.write_nbytes(len(fresh))
            self._space.reserve(nbytes)
            first = target.next_segment
            target.next_segment += -(-len(fresh) // target.geometry.rows)
            self._num_writers += 1
        written = False
        try:
            rows |= self._commit(lane, group, first, list(fresh.values()))
            written = True
        finally:
            self._space.release(nbytes, written=written)
            with self._lock:
                self._num_writers -= 1
                self._no_writers.notify_all()
        return [rows[entry.key] for entry in entries]

    def read(
        self,
        rows: Sequence[StoreRow] | npt.NDArray[np.int64],
        out: Sequence[Array] | Array,
        *,
        at: npt.NDArray[np.int64] | None = None,
        deadline: float | None = None,
    ) -> None:
        """Read whole pages; every layer is verified.

        Args:
            rows: Where the pages are.
            out: For each an array of its spec's ``page_shape`` and dtype, maybe strided.

        Raises:
            CorruptPageError: Some pages are damaged or gone. All others have been read; the store
                has forgotten those that ``keys`` names, and their ``out`` is undefined.
            PageNotFoundError: The store never had a page in one of the rows.
            StoreError: The disk failed.
            ValueError: An ``out`` does not fit.
        """
        del deadline
        self._read(*_unpacked(rows, None, out, at))

    def read_layer(
        self,
        rows: Sequence[StoreRow] | npt.NDArray[np.int64],
        layer: int,
        out: Sequence[Array] | Array,
        *,
        at: npt.NDArray[np.int64] | None = None,
        deadline: float | None = None,
    ) -> None:
        """Read one layer of each page, as ``read`` does.

        Args:
            rows: Where the pages are.
            layer: Counts within the layers that the spec holds, from 0.
            out: For each row an array of its spec's ``layer_shape`` and dtype, maybe strided.
        """
        del deadline
        self._read(*_unpacked(rows, layer, out, at))

    def close(self) -> None:
        """Wait for writes in progress and give the lane back; every later call raises."""
        if self._closed:
            return
        with self._lock:
            self._closed = f"the store {self.path} is closed"
            while self._num_writers:
                self._no_writers.wait()
        _open_stores.discard(self)
        if self._lane_lock is not None:
            try:
                with files.translated(self.path, "close the store"):
                    for (lane, _), group in self._groups.items():
                        if lane == self._lane_lock.lane:
                            group.trim()
            finally:
                self._lane_lock.release()

    def __enter__(self) -> "PageStore":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "read-only" if self.read_only else "open"
        return f"<PageStore {self.path}: {self.num_pages} pages, {self.codec.name}, {state}>"

    def check_invariants(self) -> None:
        """Assert that index and segments agree."""
        self._check_open()
        with self._lock:
            self._space.check_invariants()
            for number, index in enumerate(self._indexes):
                index.check_invariants()
                for key, row in index:
                    _, segment, place = self._locate(row)
                    assert row.group == number
                    assert segment.keys[place] == key

    def _load_lanes(self) -> None:
        own = None if self._lane_lock is None else self._lane_lock.lane
        formats = [
            SegmentFormat(spec, self.codec, Geometry.of(spec, self.codec, rows))
            for spec, rows in zip(self.specs, self._header.segment_rows, strict=True)
        ]
        with files.translated(self.path, "open the store"):
            for lane in lanes_of(self.path):
                for number, form in enumerate(formats):
                    path = self.path / lane_name(lane) / group_name(form.spec)
                    group = self._groups[lane, number] = LaneGroup(path, form)
                    for segment in group.load():
                        self._publish(lane, number, segment)
                    if lane == own:
                        group.prepare()
                    self._space.count(group.measure())

    def _commit(
        self, lane: int, group: int, first: int, pages: Sequence[tuple[PageEntry, Array]]
    ) -> dict[PageKey, StoreRow]:
        """Write pages into segments from number ``first`` on; where their keys are found now."""
        if not pages:
            return {}
        spec, target = self.specs[group], self._groups[lane, group]
        padded = [(entry, _without_rest(spec, entry, page)) for entry, page in pages]
        size = target.geometry.rows
        batches = [padded[at : at + size] for at in range(0, len(padded), size)]
        with files.translated(target.path, "write pages to"):
            target.grow(first + len(batches))
            segments = target.commit(first, batches, store_tokens=self._header.store_tokens)
        with self._lock:
            rows: dict[PageKey, StoreRow] = {}
            for segment in segments:
                rows |= self._publish(lane, group, segment)
            return rows

    def _publish(self, lane: int, group: int, segment: Segment) -> dict[PageKey, StoreRow]:
        """Make a committed segment's pages known; where each of their keys is found now."""
        target = self._groups[lane, group]
        target.segments[segment.number] = segment
        first = segment.number * target.geometry.rows
        return {
            key: self._indexes[group].add(key, StoreRow(lane, group, first + place))
            for place, key in enumerate(segment.keys)
            if key is not None
        }

    def _read(self, rows: Sequence[StoreRow], layer: int | None, out: Sequence[Array]) -> None:
        self._check_open()
        if len(rows) != len(out):
            raise ValueError(f"{len(rows)} rows for {len(out)} arrays")
        work: dict[tuple[int, int, int], tuple[LaneGroup, Segment, list[int]]] = {}
        places = []
        for position, (row, array) in enumerate(zip(rows, out, strict=True)):
            group, segment, place = self._locate(row)
            spec = self.specs[row.group]
            if layer is not None and not 0 <= layer < spec.held_layers:
                raise ValueError(f"layer is {layer}: the spec holds {spec.held_layers} layers")
            shape: tuple[int, ...] = spec.page_shape if layer is None else spec.layer_shape
            _check_array(array, shape, spec, "an out array")
            if not array.flags.writeable:
                raise ValueError("an out array is read-only")
            where = (row.lane, row.group, segment.number)
            work.setdefault(where, (group, segment, []))[2].append(position)
            places.append(place)
        lost: list[StoreRow] = []
        for group, segment, positions in work.values():
            with files.translated(group.chunk_path(KV, segment.number), "read"):
                damaged = group.read(
                    segment, [places[p] for p in positions], layer, [out[p] for p in positions]
                )
            lost += [rows[positions[number]] for number in damaged]
        if lost:
            self._lose(lost)

    def _locate(self, row: StoreRow) -> tuple[LaneGroup, Segment, int]:
        group = self._groups.get((row.lane, row.group))
        found = None if group is None else group.locate(row.row)
        if group is None or found is None:
            raise PageNotFoundError(f"the store {self.path} has no page in {row}")
        return group, *found

    def _lose(self, rows: Sequence[StoreRow]) -> NoReturn:
        """Forget damaged pages, each in favour of its next copy if there is one, and raise."""
        keys = []
        with self._lock:
            for row in rows:
                _, segment, place = self._locate(row)
                key = segment.keys[place]
                assert key is not None
                keys.append(key)
                self._num_damaged_pages += self._indexes[row.group].remove(key, row)
        message = (
            f"{len(rows)} pages of {self.path} are damaged or gone, the first {keys[0].hex()} in"
            f" {rows[0]}: compute them again"
        )
        logger.warning("%s", message)
        raise CorruptPageError(message, tuple(keys))

    def _own_lane(self) -> LaneLock:
        self._check_open()
        if self._lane_lock is None:
            raise StoreError(f"the store {self.path} was opened read-only (mode='r')")
        return self._lane_lock

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self._closed)

    def _abandon(self) -> None:
        """In a forked child: leave everything to the parent."""
        self._closed = f"the store {self.path} belongs to the process that forked this one"
        if self._lane_lock is not None:
            self._lane_lock.drop()


_open_stores: "weakref.WeakSet[PageStore]" = weakref.WeakSet()
_opening = threading.RLock()
"""Held while a store is opened for writing, and across a fork."""


def _register(store: PageStore) -> PageStore:
    _open_stores.add(store)
    return store


def _require_no_writer(path: Path) -> None:
    for store in list(_open_stores):
        if store._lane_lock is not None and _is_same(store.path, path):
            raise StoreLockedError(
                f"{path} is already open for writing in this process"
                f" ({holder_of(store._lane_lock.path)}, lane {store._lane_lock.lane}):"
                " share that PageStore, or close it first"
            )


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except FileNotFoundError:  # the folder of an open store was removed
        return False


def _after_fork_in_child() -> None:
    for store in list(_open_stores):
        store._abandon()
    _open_stores.clear()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_opening.acquire,
        after_in_parent=_opening.release,
        after_in_child=_after_fork_in_child,
    )


def _unpacked(
    rows: Sequence[StoreRow] | npt.NDArray[np.int64],
    layer: int | None,
    out: Sequence[Array] | Array,
    at: npt.NDArray[np.int64] | None,
) -> tuple[Sequence[StoreRow], int | None, Sequence[Array]]:
    if isinstance(rows, np.ndarray):
        rows = [unpack_row(row) for row in rows.tolist()]
    return rows, layer, [out[i] for i in at.tolist()] if at is not None else list(out)


def _check_array(array: Array, shape: tuple[int, ...], spec: KVSpec, what: str) -> None:
    if array.shape != shape or array.dtype != spec.np_dtype:
        raise ValueError(
            f"{what} is {array.dtype} of shape {array.shape}: the spec needs {spec.dtype} of"
            f" shape {shape}"
        )


def _without_rest(spec: KVSpec, entry: PageEntry, page: Array) -> Array:
    if entry.num_tokens == spec.page_tokens:
        return page
    tail = np.zeros(spec.page_shape, spec.np_dtype)
    tail[:, :, : entry.num_tokens] = page[:, :, : entry.num_tokens]
    return tail
