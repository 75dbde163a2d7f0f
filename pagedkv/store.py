"""``PageStore``: pages on disk, by key, in a Zarr v3 store that never returns wrong bytes."""

import functools
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pagedkv import files, open_stores, opening
from pagedkv.catalog import entry_of
from pagedkv.child_rows import Child
from pagedkv.codec import Codec
from pagedkv.contents import Contents
from pagedkv.errors import (
    ClosedError,
    CorruptPageError,
    PageNotFoundError,
    StoreError,
    StoreFullError,
)
from pagedkv.format import (
    CATALOG,
    PackedRows,
    PageEntry,
    StoreRow,
    lane_name,
    unpack_row,
)
from pagedkv.header import StoreHeader
from pagedkv.lane import LaneGroup, Segment
from pagedkv.lane_lock import LaneLock
from pagedkv.memory import Numbers, PageArrays
from pagedkv.page_reader import PageReader, PayloadViews
from pagedkv.prefix import Tokens
from pagedkv.reclaim import CollectReport, Keep
from pagedkv.row_reader import RowReader
from pagedkv.row_writer import RowWriter
from pagedkv.segment_sources import new_pages
from pagedkv.space import Space
from pagedkv.spec import KVSpec, PageKey, parse_nbytes

Array = npt.NDArray[Any]

_MAX_ROUNDS = 3


class PageStore:
    """Pages of one or several specs on disk, found by key. Made by ``PageStore.open``.

    Thread-safe; no lock is held while it reads or writes pages. Several processes may have one
    store open: each writer owns a lane, and all read all lanes. What others have done since, a
    process notices when it calls ``refresh``.
    """

    def __init__(
        self,
        path: Path,
        header: StoreHeader,
        lane_lock: LaneLock | None,
        *,
        read_deadline: float | None,
        read_threads: int,
        direct: bool,
        memory_map: bool,
    ) -> None:
        self.path = path
        self.memory_map = memory_map
        """Whether segments are mapped into memory for attention."""
        self.lane_lock = lane_lock
        self._header = header
        self._contents = Contents(path, header)
        self._files = PageReader(num_threads=read_threads, direct=direct)
        weakref.finalize(self, self._files.close).atexit = False
        self._rows = RowReader(self._contents, self._files)
        self.read_deadline = read_deadline
        """Seconds after which a read that hangs in the system is given up; None waits for ever."""
        self._lock = threading.Lock()
        self._no_writes = threading.Condition(self._lock)
        self._num_writes = 0
        self._closed = ""
        self._writer: RowWriter | None = None
        with files.translated(path, "open the store"):
            if lane_lock is None:
                self._space = Space.reading(path, header)
                self._contents.load_all()
            else:
                self._space = Space.open(path, header, lane_lock.lane, lane_lock.holder())
                self._contents.load_all()
                self._prepare(lane_lock.lane)
        open_stores.add(self)

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
        read_deadline: float | None = 60.0,
        read_threads: int = 4,
        direct: bool = False,
        memory_map: bool = False,
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
            read_deadline: Seconds after which a read that hangs in the system is given up with
                ``StoreTimeoutError``; None waits for ever.
            read_threads: Requests to the disk that are in flight at once. What lies in the page
                cache is read by the caller's own thread.
            direct: Read past the page cache where the file system can: for stores much larger than
                memory whose pages are seldom read twice.
            memory_map: Let ``Sequence.attend`` see pages in memory-mapped segments without copying
                them. Only for local disks: where one fails under a map, the system kills the
                process, and there is no deadline. Codecs ``raw`` and ``int8``, not with ``direct``.

        Raises:
            SpecMismatchError: The store is of another spec or codec; both are named.
            FormatVersionError: The store has a later format.
            StoreLockedError: This process already has it open for writing.
            StoreError: There is no store, or no folder that can be one; the path is named.
            ValueError: An argument is out of range.
        """
        opening.check_options(mode, read_deadline, read_threads)
        if memory_map and direct:
            raise ValueError("memory_map reads through the page cache, direct past it: choose one")
        bound = None if max_nbytes is None else parse_nbytes(max_nbytes)
        place = Path(path).absolute()
        header = opening.find_header(
            place, spec, codec, bound, store_tokens=store_tokens, make=mode == "a"
        )
        if memory_map and not header.codec.fixed_size:
            raise ValueError(
                f"pages of codec {header.codec.name!r} cannot be attended where they are stored: "
                "open the store without memory_map"
            )
        make = functools.partial(
            cls,
            place,
            read_deadline=read_deadline,
            read_threads=read_threads,
            direct=direct,
            memory_map=memory_map,
        )
        if mode == "r":
            return make(header, None)
        with opening.lane_taken(place, header, bound) as (header, lane_lock):
            keep_tokens = store_tokens and header.store_tokens
            return make(replace(header, store_tokens=keep_tokens), lane_lock)

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
        return self.lane_lock is None

    @property
    def own_lane(self) -> int | None:
        """The lane that this process writes; None if it only reads."""
        return None if self.lane_lock is None else self.lane_lock.lane

    @property
    def max_nbytes(self) -> int | None:
        """Bound of the bytes on disk, if there is one."""
        return self._space.max_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes on disk: segments, catalogues and derived columns of all lanes, and scratch.

        Columns that are still to be written are counted as if they were there.
        """
        return self._space.nbytes

    @property
    def num_pages(self) -> int:
        """Keys that the store holds."""
        return sum(len(index) for index in self._contents.indexes)

    @property
    def num_damaged_pages(self) -> int:
        """Pages that a read found damaged or gone, since the store was opened."""
        return self._rows.num_damaged_pages

    @property
    def num_segments_given_up(self) -> int:
        """Segments that left since the store was opened, by whomever: their rows are void."""
        return self._contents.num_dropped

    @property
    def num_torn_chunks(self) -> int:
        """Segments left out on opening: their catalogue chunk is torn, or their file gone."""
        return sum(group.num_torn_chunks for group in list(self._contents.groups.values()))

    @property
    def scratch_dir(self) -> Path:
        """Folder of the own lane, for nameless scratch files."""
        self._own_writer()
        assert self.lane_lock is not None
        return self.lane_lock.path

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch files on disk, as the cache reports them; counted in ``nbytes``."""
        return self._space.scratch_nbytes

    def protect(self, keep: Keep) -> None:
        """Never give up the pages that ``keep`` names, group and key, until the next call.

        A cache names the pages of its live sequences.

        Args:
            keep: Called without locks for each segment that is about to be given up.
        """
        self._own_writer().protect(keep)

    def make_room(self, nbytes: int) -> None:
        """Give up the pages used least lately, if need be, so that ``nbytes`` more have room.

        It does what it can; ``reserve_scratch`` and ``write`` say whether that is enough.
        """
        writer = self._own_writer()
        with self._writing(), files.translated(self.path, "make room in"):
            writer.make_room(nbytes)

    def reserve_scratch(self, nbytes: int) -> None:
        """Count ``nbytes`` more of scratch files; ``StoreFullError`` if the bound has no room."""
        self._check_open()
        self._space.grow_scratch(nbytes)

    def find(self, key: PageKey, group: int = 0) -> StoreRow | None:
        """Where a page of a group (index into ``specs``) is, in any lane; None if nowhere.

        What other processes have committed since the store was opened, ``refresh`` makes known.
        """
        self._check_open()
        return self._contents.indexes[self._check_group(group)].get(key)

    def find_rows(self, keys: Sequence[PageKey], group: int = 0) -> PackedRows:
        """``find`` for many keys: packed rows (``pack_row``), -1 where there is no page."""
        self._check_open()
        return self._contents.indexes[self._check_group(group)].get_many(keys)

    def holds(self, row: StoreRow) -> bool:
        """Whether a page can be read by this row, though ``find`` may know it no more."""
        self._check_open()
        group = self._contents.groups.get((row.lane, row.group))
        return group is not None and group.locate(row.row) is not None

    def find_leaving(self, key: PageKey, group: int) -> StoreRow | None:
        """The row of a page whose segment is being given up; None if it is in none such.

        If the page is protected it is moved, and ``find`` tells its new row afterwards.
        """
        self._check_open()
        return self._contents.find_withdrawn(key, self._check_group(group))

    def find_child(
        self,
        parent: PageKey,
        tokens: Tokens,
        salt: bytes = b"",
        extra: bytes = b"",
        group: int = 0,
        *,
        whole: bool = False,
    ) -> Child | None:
        """The page, or saved tail, after ``parent`` that begins most like ``tokens``.

        Only pages whose tokens the catalogue tells are found by a part of them; a saved tail also
        if ``tokens`` begin with all of its own.

        Args:
            parent: Key of the page before; the spec's root key where there is none.
            tokens: Ids of what follows.
            salt: Only pages of this salt are found,
            extra: and of this extra.
            group: Index into ``specs``.
            whole: Only saved tails of which all tokens are wanted.

        Returns:
            Its key, and how many tokens are the same, at least one; None if there is no such page.
            Other processes' pages are found as by ``find``.

        Raises:
            StoreError: The disk failed.
        """
        self._check_open()
        number, ids = self._check_group(group), tokens.astype("<i4", copy=False).tobytes()
        look = self._contents.find_tail if whole else self._contents.find_child
        with files.translated(self.path, "look for a page in"):
            return look(number, parent, ids, salt, extra)

    def refresh(self) -> bool:
        """Notice what other processes have committed or removed; whether anything changed.

        It costs a few system calls for each lane if nothing has.
        """
        self._check_open()
        with files.translated(self.path, "look into the store"):
            changed, gone = self._contents.refresh(self.own_lane)
        for segment in gone:
            self._files.forget(segment)
        return changed

    def __contains__(self, key: object) -> bool:
        self._check_open()
        return any(key in index for index in self._contents.indexes)

    def entry(self, row: StoreRow) -> PageEntry:
        """What the catalogue says of the page in ``row``; the salt is not recoverable.

        Raises:
            PageNotFoundError: No page is there.
            CorruptPageError: Its record is damaged or gone.
            StoreError: The disk failed.
        """
        self._check_open()
        group, segment, place, key = self._locate(row)
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
        with self._contents.lock:
            rows = sorted(row for index in self._contents.indexes for _, row in index)
        for row in rows:
            try:
                entry = self.entry(row)
            except PageNotFoundError:  # given up, or moved, since the iteration began
                continue
            except CorruptPageError as error:
                if self.find(PageKey(error.keys[0]), row.group) == row:
                    raise
                continue  # it is about to be
            yield row, entry

    def write(
        self,
        group: int,
        entries: Sequence[PageEntry],
        pages: Sequence[Array] | Array,
        *,
        at: Numbers | None = None,
    ) -> list[StoreRow]:
        """Store pages of one spec; they are durable when this returns.

        Pages whose key the store already holds are not written again: first bytes win. In a tail,
        the places beyond ``num_tokens`` are stored as zeros. Each call makes at least one segment,
        whose index and catalogue have room for all its rows (up to 256 KiB): write in batches.

        Where the bound leaves no room, the segments of own or ownerless lanes whose pages were used
        least lately are given up, as far as needed.

        Args:
            group: Index into ``specs``.
            entries: What the catalogue shall say of each page.
            pages: Arrays of ``spec.page_shape`` and the spec's dtype, maybe strided; or one array
                whose first axis is the page.
            at: For one array, the places of its first axis; all of them by default.

        Returns:
            Where each page is.

        Raises:
            ValueError: A shape, dtype or entry does not fit the spec, or the codec cannot represent
                a number (INT8: NaN and infinity). Nothing has changed.
            StoreFullError: ``max_nbytes`` leaves no room, and none can be made. The pages are not
                all stored; old ones may have been given up.
            StoreError: The store is read-only, or the disk failed; the same.
        """
        writer = self._own_writer()
        spec = self.specs[self._check_group(group)]
        arrays = PageArrays(pages, at, spec.page_shape, spec.np_dtype, "a page")
        if len(entries) != arrays.count:
            raise ValueError(f"{len(entries)} entries for {arrays.count} pages")
        for entry in entries:
            entry.check(spec)
        keys, index = [entry.key for entry in entries], self._contents.indexes[group]
        own = {(group, key) for key in keys}
        packed = index.get_many(keys)
        if (packed < 0).any():
            arrays.fill()
        for _ in range(_MAX_ROUNDS):
            if not (packed < 0).any():
                return [unpack_row(row) for row in packed.tolist()]
            fresh = {keys[n]: n for n in np.flatnonzero(packed < 0)[::-1].tolist()}
            source = new_pages(
                self._contents.formats[group],
                entries,
                arrays,
                sorted(fresh.values()),
                store_tokens=self._header.store_tokens,
            )
            with self._writing(), files.translated(self.path, "write pages to"):
                writer.write(group, source, own)
            packed = index.get_many(keys)  # a page may have been given up meanwhile, to make room
        raise StoreFullError(
            f"the store {self.path} gives up pages as fast as they are written: raise max_nbytes"
        )

    def read(
        self,
        rows: Sequence[StoreRow] | PackedRows,
        out: Sequence[Array] | Array,
        *,
        at: Numbers | None = None,
        deadline: float | None = None,
    ) -> None:
        """Read whole pages; every layer is verified.

        Args:
            rows: Where the pages are; an array of packed rows (``find_rows``) is fastest.
            out: For each an array of its spec's ``page_shape`` and dtype, maybe strided; or one
                array whose first axis is the page, for pages of one spec.
            at: For one array, the places of its first axis; from its beginning by default.
            deadline: Seconds from now after which to give up; the store's ``read_deadline`` by
                default.

        Raises:
            CorruptPageError: Some pages are damaged or gone. All others have been read; the store
                has forgotten the rows of those that ``keys`` and ``positions`` name, and their
                ``out`` is undefined. A page that was moved is found under its key again.
            PageNotFoundError: The store never had a page in one of the rows.
            StoreTimeoutError: The disk did not answer in time. ``out`` is not touched any more.
            StoreError: The disk failed.
            ValueError: An ``out`` does not fit.
        """
        self._check_open()
        self._rows.read(rows, None, out, at, self._deadline(deadline))

    def read_quickly(self, key: PageKey, group: int, out: Array) -> bool:
        """Read one page by its key if no disk has to be waited for.

        Args:
            key: Of the page.
            group: Index into ``specs``.
            out: Of the spec's ``page_shape`` and dtype.

        Returns:
            Whether it was read; if not (it is not in the page cache, damaged, or not there at all),
            ``find`` and ``read`` tell.
        """
        self._check_open()
        packed = self._contents.indexes[group].get_packed(key)
        return packed is not None and self._rows.read_quickly(packed, out)

    def read_layer(
        self,
        rows: Sequence[StoreRow] | PackedRows,
        layer: int,
        out: Sequence[Array] | Array,
        *,
        at: Numbers | None = None,
        deadline: float | None = None,
    ) -> None:
        """Read one layer of each page, as ``read`` does.

        Args:
            rows: Where the pages are.
            layer: Counts within the layers that the spec holds, from 0.
            out: For each row an array of its spec's ``layer_shape`` and dtype, maybe strided; or
                one array of them.
            at: As for ``read``.
            deadline: As for ``read``.
        """
        self._check_open()
        self._rows.read(rows, layer, out, at, self._deadline(deadline))

    def read_payloads(
        self,
        rows: Sequence[StoreRow] | PackedRows,
        layer: int,
        out: Array,
        *,
        at: Numbers | None = None,
        deadline: float | None = None,
    ) -> None:
        """Read one layer of each page as the codec stores it, verified but not decoded.

        Only for codecs of fixed size, on processors that have the kernels.

        Args:
            rows: Where the pages are; of one spec.
            layer: Counts within the layers that the spec holds, from 0.
            out: uint8 ``(row, 1, 1, 1, byte)``.
            at: As for ``read``.
            deadline: The same.

        Raises:
            CorruptPageError: As for ``read``.
            StoreError: The disk failed, or did not answer in time.
        """
        self._check_open()
        formats = self._contents.payload_formats
        self._rows.read(rows, layer, out, at, self._deadline(deadline), formats)

    def view_payloads(self, rows: Sequence[StoreRow] | PackedRows, layer: int) -> PayloadViews:
        """Where one layer of each page lies in memory-mapped segments, verified and not copied.

        Only for a store that was opened with ``memory_map``. The bytes are those on disk: they were
        verified just now, and are as good as the disk and what others do to the file.

        Args:
            rows: Where the pages are; of one spec.
            layer: Counts within the layers that the spec holds, from 0.

        Raises:
            CorruptPageError: As for ``read``.
            StoreError: A file could not be mapped.
        """
        self._check_open()
        return self._rows.view(rows, layer)

    def touch(self, rows: Iterable[StoreRow]) -> None:
        """Count pages as used now, though they were not read; rows without a page do no harm."""
        self._check_open()
        used_at = self._contents.tick()
        for row in rows:
            group = self._contents.groups.get((row.lane, row.group))
            found = None if group is None else group.locate(row.row)
            if found is not None:
                segment, place = found
                segment.used_at[place] = used_at

    def collect(self, max_nbytes: int | str) -> CollectReport:
        """Give up the pages that were used least lately until the store takes ``max_nbytes``.

        Only segments of the own lane, and of lanes that no process owns, are given up.

        Raises:
            StoreError: The store is read-only, or the disk failed.
        """
        writer, bound = self._own_writer(), parse_nbytes(max_nbytes)
        with self._writing(), files.translated(self.path, "collect"):
            return writer.collect(bound)

    def close(self) -> None:
        """Wait for writes in progress and give the lane back; every later call raises."""
        if self._closed:
            return
        with self._lock:
            self._closed = f"the store {self.path} is closed"
            while self._num_writes:
                self._no_writes.wait()
        open_stores.discard(self)
        self._files.close()
        if self.lane_lock is not None:
            with files.translated(self.path, "close the store"):
                try:
                    for (lane, _), group in list(self._contents.groups.items()):
                        if lane == self.lane_lock.lane:
                            group.write_columns()
                            group.arrays.trim(group.next_segment)
                    self._space.close()
                finally:
                    self.lane_lock.release()

    def write_columns(self) -> None:
        """Write the derived columns of the segments that lack them so far; ``close`` does it too.

        Plain Zarr readers of a store that is being written see them from then on.
        """
        if self.lane_lock is not None and not self._closed:
            for (lane, _), group in list(self._contents.groups.items()):
                if lane == self.lane_lock.lane:
                    group.write_columns()

    def abandon(self) -> None:
        """In a forked child: leave everything to the parent."""
        self._closed = f"the store {self.path} belongs to the process that forked this one"
        if self.lane_lock is not None:
            self.lane_lock.drop()

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
        with self._contents.lock:
            self._space.check_invariants()
            self._contents.check_invariants()

    def _prepare(self, lane: int) -> None:
        """Make the own lane ready to be written."""
        groups = [self._contents.groups[lane, number] for number in range(len(self.specs))]
        for group in groups:
            group.clean()
        self._space.measure()
        self._writer = RowWriter(self._contents, self._space, self._files, lane)
        nbytes = sum(group.missing_nbytes() for group in groups)
        try:
            self._space.reserve(nbytes)
        except StoreFullError:
            self._writer.make_room(nbytes)
            self._space.reserve(nbytes)
        try:
            for group in groups:
                group.prepare()
            # Their own names last, so that what is committed later hangs on to the root.
            files.sync_dir(self.path / lane_name(lane))
            files.sync_dir(self.path)
        finally:
            self._space.measure(nbytes)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Let ``close`` wait for the block's end."""
        with self._lock:
            self._check_open()
            self._num_writes += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_writes -= 1
                self._no_writes.notify_all()

    def _locate(self, row: StoreRow) -> tuple[LaneGroup, Segment, int, PageKey]:
        group = self._contents.groups.get((row.lane, row.group))
        found = None if group is None else group.locate(row.row)
        if group is None or found is None:
            raise PageNotFoundError(f"the store {self.path} has no page in {row}")
        segment, place = found
        key = segment.keys[place]
        assert key is not None
        return group, segment, place, key

    def _own_writer(self) -> RowWriter:
        self._check_open()
        if self._writer is None:
            raise StoreError(f"the store {self.path} was opened read-only (mode='r')")
        return self._writer

    def _deadline(self, deadline: float | None) -> float | None:
        return self.read_deadline if deadline is None else deadline

    def _check_group(self, group: int) -> int:
        if not 0 <= group < len(self.specs):
            raise ValueError(f"group is {group}: the store has {len(self.specs)} specs")
        return group

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self._closed)
