"""``LayerGroup``: the pages that sequences hold of one layer group."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import CorruptPageError, PoolExhaustedError
from pagedkv.format import PageEntry
from pagedkv.heads import Head, HeadFinder
from pagedkv.keyed import KeyedPages
from pagedkv.page import Page, PageState
from pagedkv.prefix import Tokens
from pagedkv.retention import Retention
from pagedkv.room import Room
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]


class LayerGroup:
    """The pages of one spec, as sequences hold, own and share them; ``keyed`` finds them by key.

    All methods take the cache's lock themselves; page bytes are copied without it.

    Args:
        room: Makes room in the group's pool.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.moves = room.moves
        self.places = places = room.places
        self.keyed = KeyedPages(room)
        self.heads = HeadFinder(room)
        self.spec = places.spec
        self.page_shape = places.spec.page_shape
        self.dtype = places.spec.np_dtype
        self._lock = places.lock
        self._pool = places.pool
        self._counters = places.counters

    def fits(self, pages: object, num_pages: int) -> bool:
        """Whether ``pages`` is a plain array of so many pages of the spec."""
        return (
            type(pages) is np.ndarray
            and pages.shape == (num_pages, *self.page_shape)
            and pages.dtype == self.dtype
        )

    def hold(self, keys: Sequence[PageKey]) -> list[Page]:
        """Hold the longest leading run of ``keys`` that any tier has, for a sequence.

        Pages that are only on disk are read into the pool as far as slots can be had without
        taking them from live sequences; the others are verified and stay where they are. The run
        ends before the first damaged page.
        """
        with self._lock:
            self.moves.note_request(keys)
            run = self.keyed.hold_run(keys)
            usable: list[Page] = []
            try:
                num_resident = sum(page.slot is not None for page in run)
                self.room.promote(run, at_least=0, spare_held=True)
                self.moves.check_stored(run)
                usable = list(takewhile(lambda page: not page.is_lost, run))
                self.keyed.count_hits(num_resident, len(run), len(usable), len(keys))
            except BaseException:
                usable = []
                raise
            finally:
                self.places.drop_holders(run[len(usable) :])
            return usable

    def share(self, pages: Sequence[Page]) -> None:
        """Hold pages once more, for a forked sequence."""
        with self._lock:
            self.places.add_holders(pages)

    def release(self, pages: Sequence[Page], retention: Retention | None = None) -> None:
        """Give up a sequence's hold; of a prefix the root is kept longest.

        Args:
            pages: Which, the root first.
            retention: For the pages that have keys.
        """
        with self._lock:
            if retention is not None:
                self.places.retain(pages, retention)
            self.places.drop_holders(pages)
            self._lock.notify_all()

    def new_pages(self, count: int, after: Page | None) -> list[Page]:
        """Fresh private pages for a sequence, held once.

        Slots are taken from pages that nobody holds. Pages for which they do not suffice live in
        the spill file from the start, the last one excepted where it can have the slot of another
        page of a live sequence.

        Raises:
            PoolExhaustedError: There is no room, and no writable store to spill to.
            StoreError: A page that had to leave could not be written.
        """
        with self._lock:
            slots = self._slots_for(count, after)[::-1]
            records: list[int] = []
            pages: list[Page] = []
            try:
                records += self.moves.allocate_spill(count - len(slots))[::-1]
                num_leading, num_spilled = max(0, len(slots) - 1), len(records)
                for number in range(count):
                    page = Page()
                    self.places.add_holder(page)
                    pages.append(page)
                    if num_leading <= number < num_leading + num_spilled:
                        page.spill = records.pop()
                    else:
                        self.places.place(page, slots.pop())
            except BaseException:
                self.places.drop_holders(pages)
                for record in records:
                    self.moves.spill_file().free(record)
                raise
            finally:
                for slot in slots:
                    self._pool.free(slot)
            return pages

    def private_copy(self, page: Page, after: Page | None) -> Page:
        """A fresh private page with the bytes of ``page`` (copy on write), held once."""
        values = np.empty(self.spec.page_shape, dtype=self.spec.np_dtype)
        self.read_page(page, values)
        return self.new_filled(values, after)

    def new_filled(self, values: Array, after: Page | None) -> Page:
        """A fresh private page with these bytes, held once.

        Raises:
            PoolExhaustedError: There is no room for it; ``StoreFullError`` is the same.
            StoreError: The disk failed.
        """
        (page,) = self.new_pages(1, after)
        try:
            with self._lock:
                self.places.wait_ready([page])
                if page.slot is not None:
                    self.places.free_spill(page)  # of an eviction that left the page after all
                    with self.places.copying([page]):
                        self._view(page)[...] = values
                else:
                    assert page.spill is not None
                    with self.places.lock.unlocked:
                        self.moves.spill_file().write_page(page.spill, values)
        except BaseException:
            self.release([page])
            raise
        return page

    def bring_back(self, page: Page) -> None:
        """Make a sequence's tail resident again, if a slot can be had, since it will be written."""
        with self._lock:
            self.places.wait_ready([page])
            self.room.promote([page], at_least=0, spare_held=False)
            if page.is_lost:
                raise CorruptPageError(f"{page!r} of a live sequence was lost on disk")

    def read_page(self, page: Page, out: Array) -> None:
        """Copy a page of the caller's sequence into ``(layer, kind, token, head, channel)``.

        Raises:
            CorruptPageError: The page is only on disk, and damaged there.
        """
        with self._lock:
            self.places.wait_readable([page])
            if page.slot is not None:
                with self.places.copying([page]):
                    out[...] = self._view(page)
            elif page.is_lost or self.moves.read_pages([page], [out]):
                raise CorruptPageError(f"{page!r} of a live sequence was lost on disk")

    def give_key(
        self, page: Page, key: PageKey, parent: PageKey, tokens: Tokens, salt: bytes, extra: bytes
    ) -> Page:
        """Make a full page of a sequence shareable under ``key``; return what to hold instead.

        The first bytes under a key win. When another page in the pool has the key, it takes this
        one's place if their bytes are equal. Else, and when the key is in the store already, this
        one stays private.
        """
        with self._lock:
            self.places.wait_ready([page])
            other = self.places.index.get(key)
            if page.key is not None or other is page:
                return page
            if other is None:
                if self.moves.find_row(key) is None:
                    page.name(key, parent, tokens, salt, extra)
                    self.places.index[key] = page
                return page
            self.places.wait_readable([other])
            if page.slot is None or other.slot is None or self.places.index.get(key) is not other:
                return page
            with self.places.copying([page, other]):
                is_equal = np.array_equal(_bits(self._view(page)), _bits(self._view(other)))
            if not is_equal:
                return page
            self.places.add_holder(other)
            self.places.drop_holder(page)
            self._lock.notify_all()
            return other

    def refresh(self) -> bool:
        """Look what other processes did to the store; whether anything has changed."""
        with self._lock:
            return self.moves.refresh()

    def read_head(self, head: Head, num_tokens: int) -> Array:
        """The page of a head, ``(layer, kind, token, head, channel)``, zeros behind its tokens.

        Args:
            head: Which; it was not let go yet.
            num_tokens: How many of its tokens.

        Raises:
            CorruptPageError: The page is only on disk, and damaged there. It is forgotten.
            StoreError: The disk failed.
        """
        values = np.empty(self.spec.page_shape, dtype=self.spec.np_dtype)
        if head.page is None:
            self._read_stored(head.key, values)
        else:
            self.read_page(head.page, values)
        values[:, :, num_tokens:] = 0
        return values

    def is_stored(self, key: PageKey) -> bool:
        """Whether the store holds a page or saved tail under this key."""
        return self.moves.find_row(key) is not None

    def save_pages(self, pages: Sequence[Page], entries: Sequence[PageEntry]) -> None:
        """Write what the store does not hold yet of a sequence's pages, durably.

        Pages in the index are stored as such. Of the others, which are tails or private, the bytes
        are written under the key of their entry.
        """
        with self._lock:
            indexed = (self.places.index.get(entry.key) for entry in entries)
            self.moves.store_pages([page for page in indexed if page is not None])
        todo = [(p, e) for p, e in zip(pages, entries, strict=True) if not self.is_stored(e.key)]
        for start in range(0, len(todo), self.moves.batch):
            batch = todo[start : start + self.moves.batch]
            values = np.zeros((len(batch), *self.spec.page_shape), dtype=self.spec.np_dtype)
            for (page, entry), page_values in zip(batch, values, strict=True):
                self.read_page(page, page_values)
                page_values[:, :, entry.num_tokens :] = 0
            self.moves.write_entries([entry for _, entry in batch], list(values))

    def store(self, pages: Sequence[Page]) -> None:
        """Write those pages that have a key and no row to the store; durable on return."""
        with self._lock:
            self.moves.store_pages(pages)

    def shed_spill(self, pages: Sequence[Page]) -> None:
        """Give back the spill records of pages that the store holds exactly by now.

        Called by the sequence that holds the pages, while it does not read them. Those that other
        sequences hold too are left alone: they may be reading them.
        """
        with self._lock:
            for page in pages:
                is_stored = page.row is not None and page.exact
                if is_stored and page.ref_count == 1 and page.state is PageState.READY:
                    self.places.free_spill(page)

    def flush(self) -> None:
        """Write every page that has a key and no row to the store; durable on return."""
        with self._lock:
            self.moves.store_pages(list(self.places.index.values()))
            self.room.writer.resume()

    def take_untold_error(self) -> BaseException | None:
        """Why the group's writer failed first, if nobody was told yet."""
        with self._lock:
            return self.room.writer.take_untold_error()

    # -- inside ------------------------------------------------------------------------------

    def _read_stored(self, key: PageKey, out: Array) -> None:
        """Read a page of the store that the caller does not hold; ``CorruptPageError`` if gone."""
        source = Page()
        source.key = key
        with self._lock:
            source.row = self.moves.find_row(key)
            if source.row is None or self.moves.read_pages([source], [out]):
                self._counters.misses["corrupt"] += 1
                raise CorruptPageError(f"page {key.hex()} was damaged in the store", (key,))

    def _slots_for(self, count: int, after: Page | None) -> list[int]:
        """Slots for a sequence: ``count``, or as many as can be had if the others can spill."""
        if not self.moves.can_write:
            return self.room.take_slots(count, at_least=count, spare_held=False, after=after)
        try:
            return self.room.take_some(count, after, forget=True)
        except PoolExhaustedError:
            return []

    def _view(self, page: Page) -> Array:
        assert page.slot is not None
        return self._pool.page(page.slot)


def _bits(page: Array) -> Array:
    return page.view(f"u{page.dtype.itemsize}")
