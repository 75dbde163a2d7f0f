"""One layer of a sequence's pages: tokens written into it, and gathered from it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import workers
from pagedkv.memory import Numbers
from pagedkv.moves import Mover
from pagedkv.page import Page
from pagedkv.page_attention import PageAttention
from pagedkv.pool import SlotPool
from pagedkv.residency import Residency
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

_STAGED_NBYTES = 16 * 2**20
"""Of the two staging buffers together."""
_STAGED = 0
"""Any slot: it stands for a page that is attended from a staging buffer."""


def write_tokens(
    moves: Mover, pages: Sequence[Page], layer: int, start: int, kinds: Sequence[Array]
) -> None:
    """Write one layer of consecutive tokens into private pages.

    Args:
        moves: Moves the group's pages between the tiers.
        pages: The pages that the tokens go to, in order; of the caller's sequence alone.
        layer: Layer within the group.
        start: Place of the first token in the first page.
        kinds: For each kind the values, ``(token, head, channel)``.

    Raises:
        StoreError: A page that lives in the spill file could not be written.
    """
    places = moves.places
    with places.lock:
        places.wait_ready(pages)
        resident = [page for page in pages if page.slot is not None]
        for page in resident:
            places.free_spill(page)  # its copy below is about to be outdated
        with places.copying(resident):
            _write(moves, pages, layer, start, kinds)
        num_spilled = len(pages) - len(resident)
        places.counters.num_slices_spilled += num_spilled
        places.counters.bytes_written += num_spilled * places.spec.layer_nbytes


@contextmanager
def gather(moves: Mover, pages: Sequence[Page], layer: int, spare: list[Array]) -> Iterator[Array]:
    """One layer of consecutive pages, ``(kind, token, head, channel)``, valid inside the block.

    A view of the pool where the pages lie one behind the other there; else a buffer, into which
    resident pages are copied and the others are read from disk.

    Args:
        moves: Moves the group's pages between the tiers.
        pages: Pages of the caller's sequence, at least one.
        layer: Layer within the group.
        spare: Buffers that the sequence keeps; one is taken, and put back afterwards.

    Raises:
        CorruptPageError: A page that is only on disk came back damaged.
        StoreError: The disk failed.
    """
    places = moves.places
    with places.lock:
        places.wait_readable(pages)
        slots = [page.slot for page in pages]
        first = slots[0]
        run = range(first, first + len(slots)) if first is not None else range(0)
        is_run = slots == list(run)
        if is_run:
            for page in pages:
                places.pin(page)
        else:
            buffer = _take_buffer(spare, places.spec, len(pages))
            with places.copying([page for page in pages if page.slot is not None]):
                _copy_resident(places.pool, slots, layer, buffer)
    if is_run:
        try:
            view = places.pool.array[layer, :, run.start : run.stop]
            view = view.reshape(view.shape[0], -1, *view.shape[3:])
            view.flags.writeable = False
            yield view
        finally:
            with places.lock:
                for page in pages:
                    places.unpin(page)
                places.lock.notify_all()
    else:
        try:
            absent = [number for number, slot in enumerate(slots) if slot is None]
            out = [buffer[:, number] for number in absent]
            moves.read_slices([pages[number] for number in absent], layer, out)
            flat = buffer.reshape(buffer.shape[0], -1, *buffer.shape[3:])
            filled = flat[:, : len(pages) * places.spec.page_tokens]
            filled.flags.writeable = False
            yield filled
        finally:
            spare.append(buffer)


class ResidentRun:
    """Where a sequence's pages are if all are in the pool: the same for every layer of a step.

    Attributes:
        slots: Slot of each page from the first wanted one on; empty if not all are there.
        array: The same.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.array: Numbers = np.zeros(0, np.int64)
        self._of: tuple[int, int, int] | None = None

    def is_valid(self, places: Residency, pages: Sequence[Page], first: int) -> bool:
        """Whether all pages from ``first`` on are in the pool; called with the lock held."""
        places.wait_readable(pages[first:] if places.num_moving else ())
        now = (places.version, len(pages), first)
        if self._of != now or places.num_moving:
            slots = [page.slot for page in pages[first:]]
            self.slots = [] if None in slots else [slot for slot in slots if slot is not None]
            self.array = np.array(self.slots, np.int64)
            self._of = now
        return bool(self.slots)


def attend(
    moves: Mover,
    pages: Sequence[Page],
    layer: int,
    attention: PageAttention,
    staging: list[Array],
    known: ResidentRun,
) -> None:
    """Attend to one layer of consecutive pages: in the pool, and from a staging buffer.

    While some pages are attended, what is only on disk of the next ones is read. Nothing comes into
    the pool for that.

    Args:
        moves: Moves the group's pages between the tiers.
        pages: The sequence's pages, from the first on.
        layer: Layer within the group.
        attention: The queries.
        staging: Two buffers that the sequence keeps, made here when they are first needed.
        known: What the sequence keeps of the last call, for the next layer.

    Raises:
        CorruptPageError: A page that is only on disk came back damaged.
        StoreError: The disk failed.
    """
    first, step, spec = attention.first_page, len(pages), moves.places.spec
    with moves.places.lock:
        if known.is_valid(moves.places, pages, first):
            with moves.places.using(known.slots):
                attention.attend(first, *_addresses(moves.places.pool, layer, known.array))
            return
    if not known.slots:
        num_chunks = _STAGED_NBYTES // 2 // (attention.chunk_pages * spec.layer_nbytes)
        step = max(1, num_chunks) * attention.chunk_pages
        while len(staging) < 2:
            staging.append(np.empty((step, *spec.layer_shape), spec.np_dtype))
    waves = [
        _Wave(moves, number, pages[number : number + step], layer)
        for number in range(first, len(pages), step)
    ]
    reading: Future[None] | None = None
    try:
        for number, wave in enumerate(waves):
            if reading is not None:
                reading.result()
                reading = None
            if not known.slots:
                wave.stage(staging[number % 2])
                if number + 1 < len(waves):
                    reading = workers.start(waves[number + 1].stage, staging[(number + 1) % 2])
            wave.attend(attention, staging)
    finally:
        if reading is not None:
            reading.exception()  # nobody writes into the buffer any more


def _addresses(pool: SlotPool, layer: int, slots: Numbers) -> tuple[Numbers, Numbers]:
    """Where the keys and the values of slots begin."""
    array = pool.array
    keys = slots * array.strides[2] + (pool.address + layer * array.strides[0])
    return keys, keys + array.strides[1]


class _Wave:
    """Pages that are attended together; those that are not in the pool are staged before.

    Args:
        moves: Moves the group's pages between the tiers.
        number: Of the first page in the sequence.
        pages: The pages.
        layer: Layer within the group.
    """

    def __init__(self, moves: Mover, number: int, pages: Sequence[Page], layer: int) -> None:
        self._moves = moves
        self._number = number
        self._pages = pages
        self._layer = layer
        self._staged: dict[int, int] = {}
        self._buffer: Array | None = None

    def stage(self, buffer: Array) -> None:
        """Read what is neither in the pool nor staged yet."""
        with self._moves.places.lock:
            self._moves.places.wait_readable(self._pages)
            absent = self._absent()
        places = range(len(self._staged), len(self._staged) + len(absent))
        out = [buffer[place] for place in places]
        self._moves.read_slices([self._pages[n] for n in absent], self._layer, out)
        self._buffer = buffer
        self._staged.update(zip(absent, places, strict=True))

    def attend(self, attention: PageAttention, staging: Sequence[Array]) -> None:
        """Attend to all of the pages."""
        places = self._moves.places
        while True:
            with places.lock:
                places.wait_readable(self._pages)
                slots = [page.slot for page in self._pages]
                for number in self._staged:
                    slots[number] = _STAGED
                if None not in slots:
                    resident: Sequence[Page] = self._pages
                    if self._staged:
                        resident = [p for n, p in enumerate(resident) if n not in self._staged]
                    with places.copying(resident):
                        attention.attend(self._number, *self._places(slots))
                    return
            self.stage(self._buffer if self._buffer is not None else staging[0])

    def _absent(self) -> list[int]:
        return [
            n for n, page in enumerate(self._pages) if page.slot is None and n not in self._staged
        ]

    def _places(self, slots: Sequence[int | None]) -> tuple[Numbers, Numbers]:
        """Where the keys and the values of each page begin, by its slot or where it is staged."""
        numbers = np.array(slots, np.int64)
        keys, values = _addresses(self._moves.places.pool, self._layer, numbers)
        if self._staged:
            assert self._buffer is not None
            staged = np.array(list(self._staged.items()), np.int64)
            start = self._buffer.__array_interface__["data"][0]
            keys[staged[:, 0]] = start + staged[:, 1] * self._buffer.strides[0]
            values[staged[:, 0]] = keys[staged[:, 0]] + self._buffer.strides[1]
        return keys, values


def _write(
    moves: Mover, pages: Sequence[Page], layer: int, start: int, kinds: Sequence[Array]
) -> None:
    places = moves.places
    done = 0
    for page in pages:
        count = min(places.spec.page_tokens - start, len(kinds[0]) - done)
        parts = [values[done : done + count] for values in kinds]
        if page.slot is not None:
            _put(places.pool.layer(layer, page.slot), start, parts)
        else:
            assert page.spill is not None
            spill = moves.spill_file()
            after = np.empty(places.spec.layer_shape, dtype=places.spec.np_dtype)
            before = None
            if count < places.spec.page_tokens:
                spill.read_layer(page.spill, layer, after)
                before = after.copy()
            _put(after, start, parts)
            spill.write_layer(page.spill, layer, after, before)
        done += count
        start = 0


def _put(target: Array, start: int, parts: Sequence[Array]) -> None:
    for kind, values in enumerate(parts):
        target[kind, start : start + len(values)] = values


def _copy_resident(pool: SlotPool, slots: Sequence[int | None], layer: int, out: Array) -> None:
    """Copy one layer of the slots to their numbers in ``out``, ``(kind, page, token, ...)``."""
    number = 0
    while number < len(slots):
        slot = slots[number]
        count = 1
        if slot is not None:
            while number + count < len(slots) and slots[number + count] == slot + count:
                count += 1
            out[:, number : number + count] = pool.array[layer, :, slot : slot + count]
        number += count


def _take_buffer(spare: list[Array], spec: KVSpec, num_pages: int) -> Array:
    """A buffer ``(kind, page, token, head, channel)`` for at least that many pages."""
    buffer = spare.pop() if spare else None
    if buffer is None or buffer.shape[1] < num_pages:
        room = num_pages + max(1, num_pages // 8)  # so that a decode loop seldom allocates anew
        kinds, *page = spec.layer_shape
        buffer = np.empty((kinds, room, *page), dtype=spec.np_dtype)
    return buffer
