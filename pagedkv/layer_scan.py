"""Attention of one layer to a sequence's pages, wherever these are; nothing comes into the pool.

Pages in the pool are attended in place. Of the others, one layer is read into a staging buffer
while those before them are attended: numbers of the spec's dtype, or records of INT8 as they are
stored. In a store that is mapped into memory they are attended where they lie.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import workers
from pagedkv.memory import Numbers, aligned
from pagedkv.moves import Mover
from pagedkv.page import Page
from pagedkv.page_attention import PageAttention, Places
from pagedkv.pool import SlotPool

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

STAGED_NBYTES = 16 * 2**20
"""Of all staging buffers of a sequence together."""
_NUM_BUFFERS = 3
"""One is attended; two are read into, so that the disk has work when the first of them is full."""
_ALIGNMENT = 64


class Staging:
    """The buffers that a sequence stages in, made when they are first needed."""

    def __init__(self) -> None:
        self._buffers: dict[int, Bytes] = {}

    def buffer(self, wave: int) -> Bytes:
        """The one for this wave, and for every third one after it."""
        number = wave % _NUM_BUFFERS
        if number not in self._buffers:
            self._buffers[number] = aligned(STAGED_NBYTES // _NUM_BUFFERS)
        return self._buffers[number]

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


class Whereabouts:
    """Where a sequence's pages are: the same for every layer of a step, unless a page moves.

    Attributes:
        slots: Slot of each page from the first wanted one on, if all are in the pool; else empty.
        array: The same.
        cuts: Numbers of the pages between which the scan is cut into waves.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.array: Numbers = np.zeros(0, np.int64)
        self.cuts: list[int] = []
        self._of: tuple[int, int, int] | None = None

    def find(self, moves: Mover, pages: Sequence[Page], first: int, chunk_pages: int) -> None:
        """Look where the pages from ``first`` on are; called with the lock held."""
        places = moves.places
        places.wait_readable(pages[first:] if places.num_moving else ())
        now = (places.version, len(pages), first)
        if self._of == now and not places.num_moving:
            return
        slots = [page.slot for page in pages[first:]]
        self.slots = [] if None in slots else [slot for slot in slots if slot is not None]
        self.array = np.array(self.slots, np.int64)
        self.cuts = [first]
        if not self.slots:
            nbytes = 0
            for start in range(first, len(pages), chunk_pages):
                more = sum(map(moves.staged_nbytes, pages[start : start + chunk_pages]))
                if nbytes and nbytes + more > STAGED_NBYTES // _NUM_BUFFERS:
                    self.cuts.append(start)
                    nbytes = 0
                nbytes += more
        self.cuts.append(len(pages))
        self._of = now


def attend(
    moves: Mover,
    pages: Sequence[Page],
    layer: int,
    attention: PageAttention,
    staging: Staging,
    known: Whereabouts,
) -> None:
    """Attend to one layer of consecutive pages.

    Args:
        moves: Moves the group's pages between the tiers.
        pages: The sequence's pages, from the first on.
        layer: Layer within the group.
        attention: The queries.
        staging: The sequence's buffers.
        known: What the sequence keeps of the last call, for the next layer.

    Raises:
        CorruptPageError: A page that is only on disk came back damaged.
        StoreError: The disk failed.
    """
    places, first = moves.places, attention.first_page
    with places.lock:
        known.find(moves, pages, first, attention.chunk_pages)
        slots, cuts = known.slots, known.cuts
        if slots:
            places.counters.num_slices_attended += len(slots)
            with places.using(slots):
                keys, values = slot_addresses(places.pool, layer, known.array)
                attention.attend(first, Places(keys, values))
            return
    waves = [_Wave(moves, begin, pages[begin:end], layer) for begin, end in pairwise(cuts)]
    if len(waves) == 1:  # nothing to read beside it
        waves[0].stage(partial(staging.buffer, 0))
        waves[0].attend(attention)
        return
    reading: deque[Future[None]] = deque()
    num_read = 0
    try:
        for number, wave in enumerate(waves):
            while num_read < min(number + _NUM_BUFFERS - 1, len(waves)):
                buffer = partial(staging.buffer, num_read)
                reading.append(workers.start_reading(waves[num_read].stage, buffer))
                num_read += 1
            reading.popleft().result()
            wave.attend(attention)
    finally:
        for one in reading:
            one.exception()  # nobody writes into the buffers any more


class _Wave:
    """Pages that are attended together; those that are not in the pool are staged before.

    Args:
        moves: Moves the group's pages between the tiers.
        first: Number of the first page in the sequence.
        pages: The pages.
        layer: Layer within the group.
    """

    def __init__(self, moves: Mover, first: int, pages: Sequence[Page], layer: int) -> None:
        self._moves = moves
        self._first = first
        self._pages = pages
        self._layer = layer
        self._is_staged = np.zeros(len(pages), np.bool_)
        self._keys, self._values, self._records = np.zeros((3, len(pages)), np.int64)
        self._buffer: Callable[[], Bytes] | None = None
        self._free: Bytes | None = None  # what is left of it
        self._kept: list[object] = []  # what staged pages lie in

    def stage(self, buffer: Callable[[], Bytes]) -> None:
        """Bring what is not in the pool within reach; ``buffer`` gives the one that is free."""
        self._buffer = buffer
        self._stage_rest()

    def attend(self, attention: PageAttention) -> None:
        """Attend to all of the pages."""
        places = self._moves.places
        while True:
            with places.lock:
                places.wait_readable(self._pages)
                staged = self._is_staged.tolist()
                slots = [
                    p.slot
                    for p, is_staged in zip(self._pages, staged, strict=True)
                    if not is_staged
                ]
                if None not in slots:
                    places.counters.num_slices_attended += len(self._pages)
                    found = [slot for slot in slots if slot is not None]
                    with places.using(found):
                        attention.attend(self._first, self._places(found))
                    return
            self._stage_rest()  # they have left the pool meanwhile

    def _places(self, slots: Sequence[int]) -> Places:
        """Where all of the pages are; those that are not staged in these slots."""
        at = ~self._is_staged
        keys, values = self._keys.copy(), self._values.copy()
        keys[at], values[at] = slot_addresses(self._moves.places.pool, self._layer, slots)
        return Places(keys, values, self._records if self._records.any() else None)

    def _stage_rest(self) -> None:
        moves, spec = self._moves, self._moves.places.spec
        with moves.places.lock:
            moves.places.wait_readable(self._pages)
            absent = [
                number
                for number, page in enumerate(self._pages)
                if page.slot is None and not self._is_staged[number]
            ]
            ways = [moves.has_payload(self._pages[number]) for number in absent]
        stored = [number for number, way in zip(absent, ways, strict=True) if way]
        if stored:
            self._stage_payloads(stored)
        rest = [number for number, way in zip(absent, ways, strict=True) if not way]
        if rest:
            room = self._room(len(rest), spec.layer_nbytes)
            out = room.view(spec.np_dtype).reshape(len(rest), *spec.layer_shape)
            moves.read_slices([self._pages[n] for n in rest], self._layer, out)
            self._set_numbers(rest, _starts(room))

    def _stage_payloads(self, numbers: list[int]) -> None:
        moves = self._moves
        pages = [self._pages[number] for number in numbers]
        if moves.maps_store:
            starts, maps = moves.view_payloads(pages, self._layer)
            self._kept += maps
        else:
            room = self._room(len(numbers), moves.payload_nbytes)
            moves.read_payloads(pages, self._layer, room.reshape(len(room), 1, 1, 1, -1))
            starts = _starts(room)
        if moves.record_layout is None:
            self._set_numbers(numbers, starts)
        else:
            self._records[numbers] = starts
            self._is_staged[numbers] = True

    def _set_numbers(self, numbers: list[int], starts: Numbers) -> None:
        """Note where the numbers of pages begin, ``(kind, token, head, channel)``."""
        spec = self._moves.places.spec
        self._keys[numbers] = starts
        self._values[numbers] = starts + spec.layer_nbytes // spec.num_kinds
        self._is_staged[numbers] = True

    def _room(self, count: int, nbytes: int) -> Bytes:
        """Memory ``(count, nbytes)``, out of the buffer if there is enough left."""
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._free is None and self._buffer is not None:
            self._free = self._buffer()
        if self._free is None or len(self._free) < count * stride:
            self._free = aligned(count * stride)
        room = self._free[: count * stride].reshape(count, stride)
        self._free = self._free[count * stride :]
        self._kept.append(room)
        return room[:, :nbytes]


def slot_addresses(
    pool: SlotPool, layer: int, slots: Sequence[int] | Numbers
) -> tuple[Numbers, Numbers]:
    """Where the keys and the values of one layer of slots begin."""
    array = pool.array
    keys = np.array(slots, np.int64)
    keys *= array.strides[2]
    keys += pool.address + layer * array.strides[0]
    return keys, keys + array.strides[1]


def _starts(rows: Bytes) -> Numbers:
    """Address of each row."""
    starts: Numbers = np.arange(len(rows)) * rows.strides[0]
    starts += rows.__array_interface__["data"][0]
    return starts
