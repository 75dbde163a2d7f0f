"""``CacheStats``: what a cache has done so far, in numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot of a cache's counters since it was made, and of its sizes now.

    Args:
        num_pool_hits: Pages that were asked for by key and found in the pool.
        num_store_hits: Pages that were asked for by key and found on disk only.
        num_misses: Pages that were asked for by key and found nowhere.
        misses_by_reason: ``num_misses`` by reason: "absent" or "corrupt".
        num_pages_evicted: Pages whose slot was taken from them.
        num_pages_dropped: Those of them that were forgotten, since no store could take them, or
            would.
        num_pages_refused: Those that the admission policy kept out of the store.
        num_pages_spilled: Pages of live sequences written, whole, to the spill file.
        num_pages_stored: Pages written to the store.
        num_pages_loaded: Whole pages read from disk, into the pool or a caller's array.
        num_slices_attended: Single layers of pages that ``Sequence.attend`` and ``gather`` saw, in
            any tier.
        num_slices_loaded: Those of them that were read from disk, or seen there in a memory map.
            What is read ahead is counted before it is attended.
        num_slices_spilled: Single layers of pages written to the spill file.
        bytes_written: Page bytes handed to store and spill file, uncompressed.
        bytes_read: Page bytes read back, uncompressed.
        write_seconds: Time spent in these writes, summed over threads.
        read_seconds: Time spent in these reads, summed over threads.
        num_slots: Slots of the pool.
        num_free_slots: Those that hold no page.
        num_pinned_slots: Those in use by a caller now.
        num_pages_held: Pages of live sequences, each counted once, wherever they are.
        pool_nbytes: Bytes of the pool.
        store_nbytes: Bytes of the store on disk, spill file included; 0 without one.
    """

    num_pool_hits: int
    num_store_hits: int
    num_misses: int
    misses_by_reason: Mapping[str, int]
    num_pages_evicted: int
    num_pages_dropped: int
    num_pages_refused: int
    num_pages_spilled: int
    num_pages_stored: int
    num_pages_loaded: int
    num_slices_attended: int
    num_slices_loaded: int
    num_slices_spilled: int
    bytes_written: int
    bytes_read: int
    write_seconds: float
    read_seconds: float
    num_slots: int
    num_free_slots: int
    num_pinned_slots: int
    num_pages_held: int
    pool_nbytes: int
    store_nbytes: int


@dataclass(slots=True)
class Counters:
    """The counters behind ``CacheStats``, changed under the cache's lock."""

    num_pool_hits: int = 0
    num_store_hits: int = 0
    num_pages_evicted: int = 0
    num_pages_dropped: int = 0
    num_pages_refused: int = 0
    num_pages_spilled: int = 0
    num_pages_stored: int = 0
    num_pages_loaded: int = 0
    num_slices_attended: int = 0
    num_slices_loaded: int = 0
    num_slices_spilled: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
    misses: Counter[str] = field(default_factory=Counter)

    def snapshot(self) -> dict[str, Any]:
        """The counters by the names of ``CacheStats``."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "misses"}
        by_reason = {reason: n for reason, n in self.misses.items() if n}
        values["num_misses"] = self.misses.total()
        values["misses_by_reason"] = MappingProxyType(by_reason)
        return values
