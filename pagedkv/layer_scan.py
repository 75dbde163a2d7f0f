"""Attention of one layer to a sequence's pages, wherever these are; nothing comes into the pool.

Pages in the pool are attended in place. Of the others, one layer is read into a staging buffer
while those before them are attended: numbers of the spec's dtype, or records of INT8 as they are
stored. In a store that is mapped into memory they are attended where they lie.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, NamedTuple

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
    """A sequence's staging buffers, and what has been begun to be read of the next layer."""

    def __init__(self) -> None:
        self._buffers: dict[int, Bytes] = {}
        self._num_waves = 0
        self._ahead: deque[_Reading] = deque()
        self._cuts: dict[int, list[int]] = {}

    def start(self, wave: "_Wave") -> "_Reading":
        """Begin to read a wave into the next buffer, which nobody needs any more."""
        number = self._num_waves % _NUM_BUFFERS
        self._num_waves += 1

        def buffer() -> Bytes:
            if number not in self._buffers:
                self._buffers[number] = aligned(STAGED_NBYTES // _NUM_BUFFERS)
            return self._buffers[number]

        return _Reading(wave, workers.start_reading(wave.stage, buffer))

    def keep_ahead(self, reading: "deque[_Reading]") -> None:
        """Keep what has been begun to be read of the next layer until that is attended."""
        self._ahead = reading

    def take_ahead(self, layer: int, pages: Sequence[Page], cuts: list[int]) -> "deque[_Reading]":
        """What has been begun to be read of this layer; the rest is forgotten."""
        self._cuts[layer] = cuts
        taken: deque[_Reading] = deque()
        for begin, end in pairwise(cuts):
            if not self._ahead or not self._ahead[0].wave.is_of(layer, begin, pages[begin:end]):
                break
            taken.append(self._ahead.popleft())
        self.forget_ahead()
        return taken

    def cuts_of(self, layer: int) -> list[int]:
        """Where the scan of a layer was cut into waves when it was attended the last time."""
        return self._cuts.get(layer, [])

    def before_write(self, layer: int, first: int) -> None:
        """Forget what was read ahead if it is of this layer, and of pages from ``first`` on."""
        if any(one.wave.reaches(layer, first) for one in self._ahead):
            self.forget_ahead()

    def forget_ahead(self) -> None:
        """Forget what was read ahead: pages of it may be about to change."""
        while self._ahead:
            self._ahead.popleft().future.exception()  # then nobody writes into the buffer any more

    def clear(self) -> None:
        """Give the memory back."""
        self.forget_ahead()
        self._buffers.clear()


class _Reading(NamedTuple):
    """A wave that is being staged."""

    wave: "_Wave"
    future: "Future[None]"


class Whereabouts:
    """Where a sequence's pages are: the same for every layer of a step, unless a page moves.

    Attributes:
        slots: Slot of each page from the first wanted one on, if all are in the pool; else empty.
        starts: Where each slot begins in memory.
        cuts: Numbers of the pages between which the scan is cut into waves.
    """

    def __init__(self) -> None:
        self.slots: Numbers = np.zeros(0, np.int64)
        self.starts: Numbers = self.slots
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
        is_resident = None not in slots
        self.slots = np.array(slots if is_resident else [], np.int64)
        self.starts = slot_starts(places.pool, self.slots)
        self.cuts = [first]
        if not is_resident:
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
    """Attend to one layer of consecutive pages, and begin to read the next layer.

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
        if len(slots):
            staging.take_ahead(layer, pages, [])
            places.counters.num_slices_attended += len(slots)
            with places.using(slots):
                attention.attend(first, Places(*of_layer(places.pool, layer, known.starts)))
            return
    num_full = attention.num_full_pages
    reading = staging.take_ahead(layer, pages, cuts)
    todo = deque(_waves(moves, pages, layer, cuts)[len(reading) :])
    after = (layer + 1) % places.spec.held_layers
    ahead = _waves(moves, pages[:num_full], after, staging.cuts_of(after))
    todo += ahead[: _NUM_BUFFERS - 1]
    try:
        for _ in pairwise(cuts):
            while todo and len(reading) < _NUM_BUFFERS - 1:
                reading.append(staging.start(todo.popleft()))
            wave, future = reading.popleft()
            future.result()
            wave.attend(attention)
    finally:
        staging.keep_ahead(reading)


def _waves(moves: Mover, pages: Sequence[Page], layer: int, cuts: Sequence[int]) -> list["_Wave"]:
    """The waves of a layer, as far as there are pages for whole ones."""
    spans = [(begin, end) for begin, end in pairwise(cuts) if end <= len(pages)]
    return [_Wave(moves, begin, pages[begin:end], layer) for begin, end in spans]


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

    def is_of(self, layer: int, first: int, pages: Sequence[Page]) -> bool:
        """Whether it is one of these pages in this layer."""
        return (self._layer, self._first) == (layer, first) and self._pages == pages

    def reaches(self, layer: int, page: int) -> bool:
        """Whether it is of this layer, and has this page or one behind it."""
        return self._layer == layer and self._first + len(self._pages) > page

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
                    found = np.array(slots, np.int64)
                    with places.using(found):
                        attention.attend(self._first, self._places(found))
                    return
            self._stage_rest()  # they have left the pool meanwhile

    def _places(self, slots: Numbers) -> Places:
        """Where all of the pages are; those that are not staged in these slots."""
        at = ~self._is_staged
        keys, values = self._keys.copy(), self._values.copy()
        pool = self._moves.places.pool
        keys[at], values[at] = of_layer(pool, self._layer, slot_starts(pool, slots))
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


def slot_starts(pool: SlotPool, slots: Numbers) -> Numbers:
    """Where the first layer of slots begins."""
    starts: Numbers = slots * pool.array.strides[2]
    starts += pool.address
    return starts


def of_layer(pool: SlotPool, layer: int, starts: Numbers) -> tuple[Numbers, Numbers]:
    """Where keys and values of a layer begin, in slots whose first layer begins there."""
    keys = starts + layer * pool.array.strides[0]
    return keys, keys + pool.array.strides[1]


def _starts(rows: Bytes) -> Numbers:
    """Address of each row."""
    starts: Numbers = np.arange(len(rows)) * rows.strides[0]
    starts += rows.__array_interface__["data"][0]
    return starts
