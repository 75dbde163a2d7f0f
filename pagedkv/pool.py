"""``SlotPool``: the numpy array of slots, which of them are free, and which are pinned."""

import heapq
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import PoolExhaustedError
from pagedkv.memory import Numbers
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]


class SlotPool:
    """A fixed number of slots of one spec, allocated once; each holds one page.

    The array is layer-first, so that one layer of consecutive slots is one contiguous run of
    tokens, which can be handed on without a copy.

    Args:
        spec: Geometry of a page.
        num_slots: How many pages fit.
        path: File to map the pool on (tmpfs, DAX); anonymous memory if ``None``. The file must
            not exist yet. Its name is removed at once, so that nothing is left after a crash.

    Raises:
        ValueError: ``num_slots`` is not at least 1.
        FileExistsError: ``path`` exists: it is never overwritten.
        OSError: The memory or the file's space cannot be had.
    """

    def __init__(self, spec: KVSpec, num_slots: int, path: str | Path | None = None) -> None:
        if isinstance(num_slots, bool) or not isinstance(num_slots, int):
            raise TypeError(f"num_slots is {num_slots!r}: it must be an integer")
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}: a pool needs at least one slot")
        self.spec = spec
        self.num_slots = num_slots
        shape = (
            spec.held_layers,
            spec.num_kinds,
            num_slots,
            spec.page_tokens,
            spec.held_heads,
            spec.head_dim,
        )
        memory = _map_memory(num_slots * spec.page_nbytes, path)
        self.array: Array = np.frombuffer(memory, dtype=spec.np_dtype).reshape(shape)
        """All slots: ``(layer, kind, slot, token, head, channel)``."""
        self.address: int = self.array.__array_interface__["data"][0]
        """Where it begins in memory."""
        self.by_page: Array = np.moveaxis(self.array, 2, 0)
        """The same, ``(slot, layer, kind, token, head, channel)``."""
        self._free_flags = bytearray(b"\1") * num_slots  # one slot's flag is quicker than in numpy
        self._is_free = np.frombuffer(self._free_flags, dtype=np.bool_)  # the same bytes
        self.num_free = num_slots
        """Slots that can be allocated."""
        self._free = list(range(num_slots))  # a heap; slots taken from its middle stay as stale
        self.pins = [0] * num_slots
        """How often each slot is pinned, by ``pin`` and ``unpin`` only; ``use`` counts apart."""
        self._num_pinned = 0
        self._uses = np.zeros(num_slots, np.int32)  # the pins of ``use``
        self._num_using = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots; constant."""
        return int(self.array.nbytes)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` free slots, consecutive ones where there are such.

        Args:
            count: How many.
            after: Try the slots behind this one first, so that a sequence stays contiguous.

        Raises:
            PoolExhaustedError: Fewer are free; nothing has changed.
        """
        if count > self.num_free:
            raise PoolExhaustedError(
                f"{count} slots were asked for, but only {self.num_free} of {self.num_slots} "
                "are free"
            )
        slots = self._choose(count, after) if count else []
        for slot in slots:
            self._free_flags[slot] = False
        self.num_free -= count
        return slots

    def allocate_one(self) -> int:
        """Take one free slot, where there is one."""
        assert self.num_free, "no slot is free"
        slot = self._first_free()
        self._free_flags[slot] = False
        self.num_free -= 1
        return slot

    def free(self, slot: int) -> None:
        """Give an allocated, unpinned slot back."""
        assert not self._free_flags[slot], f"slot {slot} is free already"
        assert not self.is_pinned(slot), f"slot {slot} is pinned"
        self._free_flags[slot] = True
        self.num_free += 1
        heapq.heappush(self._free, slot)
        if len(self._free) > 2 * self.num_slots:
            self._free = np.flatnonzero(self._is_free).tolist()  # sorted, so a heap

    def pin(self, slot: int) -> None:
        """Protect the slot's residency until ``unpin``; pins count."""
        assert not self._free_flags[slot], f"slot {slot} is free"
        self._num_pinned += not self.pins[slot]
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Take one pin back."""
        assert self.pins[slot] > 0, f"slot {slot} is not pinned"
        self.pins[slot] -= 1
        self._num_pinned -= not self.pins[slot]

    def use(self, slots: Numbers | slice) -> None:
        """``pin`` many slots, each named once, in little time."""
        self._uses[slots] += 1
        self._num_using += 1

    def end_use(self, slots: Numbers | slice) -> None:
        """Take the pins of ``use`` back."""
        self._uses[slots] -= 1
        self._num_using -= 1

    def is_pinned(self, slot: int) -> bool:
        """Whether somebody uses the slot now."""
        return self.pins[slot] > 0 or (self._num_using > 0 and self._uses[slot] > 0)

    @property
    def num_pinned(self) -> int:
        """Slots with at least one pin."""
        if not self._num_using:
            return self._num_pinned
        return int(np.count_nonzero((np.array(self.pins) > 0) | (self._uses > 0)))

    def page(self, slot: int) -> Array:
        """The slot's page, ``(layer, kind, token, head, channel)``: a view."""
        view: Array = self.by_page[slot]
        return view

    def layer(self, layer: int, slot: int) -> Array:
        """One layer of the slot's page, ``(kind, token, head, channel)``: a view."""
        view: Array = self.array[layer, :, slot]
        return view

    def run(self, layer: int, kind: int, slot: int, num_slots: int) -> Array:
        """One layer and kind of consecutive slots, ``(token, head, channel)``: a view."""
        part = self.array[layer, kind, slot : slot + num_slots]
        view: Array = part.reshape(-1, *part.shape[2:])
        return view

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the free slots, their heap and the pins contradict."""
        assert self.num_free == int(np.count_nonzero(self._is_free))
        assert set(np.flatnonzero(self._is_free).tolist()) <= set(self._free)
        assert min(self.pins) >= 0
        assert self._num_pinned == sum(pins > 0 for pins in self.pins)
        assert self._uses.min() >= 0
        assert (self._num_using > 0) == bool(self._uses.any())
        assert not any(map(self.is_pinned, np.flatnonzero(self._is_free).tolist()))

    def _first_free(self) -> int:
        while not self._free_flags[slot := heapq.heappop(self._free)]:
            pass
        return slot

    def _choose(self, count: int, after: int | None) -> list[int]:
        if after is not None:
            following = self._is_free[after + 1 : after + 1 + count]
            if len(following) == count and following.all():
                return list(range(after + 1, after + 1 + count))
        if count == 1:
            return [self._first_free()]
        free = np.flatnonzero(self._is_free)
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        first = int(starts[0]) if len(starts) else 0
        chosen: list[int] = free[first : first + count].tolist()
        return chosen


def _map_memory(nbytes: int, path: str | Path | None) -> mmap.mmap:
    """Page-aligned memory, zeroed: anonymous, or a file whose space is really there."""
    if path is None:
        # Not shared: the system has large pages for private memory only, by default.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)  # attention walks all of it: fewer TLB misses
        return memory
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
        if hasattr(os, "posix_fallocate"):  # a hole would kill the process when the disk is full
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
