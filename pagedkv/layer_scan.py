"""Attention of one layer to a sequence's pages, wherever these are; nothing comes into the pool.

Pages in the pool are attended in place. Of the others, one layer is read into a staging buffer
while those before them are attended: numbers of the spec's dtype, or records of INT8 as they are
stored. In a store that is mapped into memory they are attended where they lie.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import workers
from pagedkv.format import PackedRows
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
        self._free: list[Bytes] = []
        self._ahead: deque[_Reading] = deque()
        self._windows: dict[int, int | None] = {}

    def start_some(self, todo: "deque[_Wave]", reading: "deque[_Reading]") -> None:
        """Begin to read the next waves, as many as there are buffers that nobody attends to."""
        while todo and len(reading) < _NUM_BUFFERS - 1:
            buffer = self._free.pop() if self._free else aligned(STAGED_NBYTES // _NUM_BUFFERS)
            wave, future = todo.popleft(), Future[None]()
            workers.start_reading(future, partial(wave.stage, buffer))
            reading.append(_Reading(wave, future, buffer))

    def give_back(self, buffer: Bytes) -> None:
        """Take a buffer back that nobody uses any more.

        One that is not given back, since something went wrong, may still be written into.
        """
        self._free.append(buffer)

    def keep_ahead(self, reading: "deque[_Reading]") -> None:
        """Keep what has been begun to be read of the next layer until that is attended."""
        self._ahead = reading

    def take_ahead(self, layer: int, spans: "Sequence[_Span]") -> "deque[_Reading]":
        """What has been begun to be read of this layer; the rest is forgotten."""
        taken: deque[_Reading] = deque()
        for span in spans:
            if not self._ahead or not self._ahead[0].wave.is_of(layer, span):
                break
            taken.append(self._ahead.popleft())
        self.forget_ahead()
        return taken

    @property
    def is_ahead(self) -> bool:
        """Whether something is kept of what was read ahead."""
        return bool(self._ahead)

    def note_window(self, layer: int, window: int | None) -> None:
        """Note that a layer is attended with this window."""
        self._windows[layer] = window

    def had_window(self, layer: int, window: int | None) -> bool:
        """Whether a layer was attended with this window the last time that it was attended."""
        return layer in self._windows and self._windows[layer] == window

    def before_write(self, layer: int, first: int) -> None:
        """Forget what was read ahead if it is of this layer, and of pages from ``first`` on."""
        if any(one.wave.reaches(layer, first) for one in self._ahead):
            self.forget_ahead()

    def forget_ahead(self) -> None:
        """Forget what was read ahead: pages of it may be about to change."""
        while self._ahead:
            self._ahead[0].future.exception()  # then nobody writes into the buffer any more
            self.give_back(self._ahead.popleft().buffer)

    def clear(self) -> None:
        """Give the memory back."""
        self.forget_ahead()
        self._free.clear()


class _Reading(NamedTuple):
    """A wave that is being staged."""

    wave: "_Wave"
    future: "Future[None]"
    buffer: Bytes


class _Span:
    """Consecutive pages that are attended together, and where they are: the same for all layers.

    Made with the lock held, while none of the pages is on its way into its slot.

    Args:
        moves: Moves the group's pages between the tiers.
        first: Number of the first page in the sequence.
        pages: The pages.

    Attributes:
        slots: Slot of each page, -1 for those that are not in the pool.
        starts: Where that slot begins in memory.
        stored: Which pages are attended as the store holds them.
        rows: Where it does.
        others: Which other pages are not in the pool.
    """

    def __init__(self, moves: Mover, first: int, pages: Sequence[Page]) -> None:
        self.first = first
        self.pages = pages
        self._version = moves.places.version
        self.slots: Numbers = np.array([-1 if p.slot is None else p.slot for p in pages], np.int64)
        self.starts = slot_starts(moves.places.pool, self.slots)
        absent = np.flatnonzero(self.slots < 0).tolist()
        stored = [number for number in absent if moves.has_payload(pages[number])]
        self.stored: Numbers = np.array(stored, np.int64)
        self.rows = moves.packed_rows([pages[number] for number in stored])
        others = set(absent).difference(stored)
        self.others: Numbers = np.array(sorted(others), np.int64)

    def now(self, moves: Mover) -> "_Span":
        """The same pages where they are now; called with the lock held."""
        places = moves.places
        if self._version == places.version and not places.num_moving:
            return self
        places.wait_readable(self.pages)
        return _Span(moves, self.first, self.pages)


class Whereabouts:
    """Where a sequence's pages are: the same for every layer of a step, unless a page moves.

    Attributes:
        is_resident: Whether all pages that a query sees are in the pool.
        slots: Slot of each of them, if so.
        starts: Where each slot begins in memory.
        spans: The pages, cut into what is staged together.
    """

    def __init__(self) -> None:
        self.is_resident = False
        self.slots: Numbers = np.zeros(0, np.int64)
        self.starts: Numbers = self.slots
        self.spans: list[_Span] = []
        self._of: tuple[int, int, Sequence[Page]] | None = None

    def find(self, moves: Mover, pages: Sequence[Page], first: int, chunk_pages: int) -> None:
        """Look where pages are, of which ``first`` is the first; called with the lock held."""
        places = moves.places
        places.wait_readable(pages if places.num_moving else ())
        now = (places.version, first, pages)
        if self._of == now and not places.num_moving:
            return
        self._of = None  # whoever interrupts this leaves nothing that looks complete
        slots = [page.slot for page in pages]
        self.is_resident = None not in slots
        self.slots = np.array(slots if self.is_resident else [], np.int64)
        self.starts = slot_starts(places.pool, self.slots)
        cuts = [] if self.is_resident else _cuts(moves, pages, chunk_pages)
        self.spans = [
            _Span(moves, first + begin, pages[begin:end]) for begin, end in pairwise(cuts)
        ]
        self._of = now


def _cuts(moves: Mover, pages: Sequence[Page], chunk_pages: int) -> list[int]:
    """Where the scan of pages is cut: what is between two cuts fits into a buffer."""
    cuts, nbytes = [0], 0
    for start in range(0, len(pages), chunk_pages):
        sizes = map(moves.staged_nbytes, pages[start : start + chunk_pages])
        more = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        if nbytes and nbytes + more > STAGED_NBYTES // _NUM_BUFFERS:
            cuts.append(start)
            nbytes = 0
        nbytes += more
    return [*cuts, len(pages)]


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
        pages: The sequence's pages from ``attention.first_page`` on, and no others.
        layer: Layer within the group.
        attention: The queries.
        staging: The sequence's buffers.
        known: What the sequence keeps of the last call, for the next layer.

    Raises:
        CorruptPageError: A page that is only on disk came back damaged.
        StoreError: The disk failed.
    """
    places, first = moves.places, attention.first_page
    while True:
        with places.lock.mutex:
            known.find(moves, pages, first, attention.chunk_pages)
            if not known.is_resident:
                spans = known.spans
                break
            if not staging.is_ahead:
                places.counters.num_slices_attended += len(known.slots)
                with places.using(known.slots):
                    attention.attend(first, Places(*of_layer(places.pool, layer, known.starts)))
                return
        staging.forget_ahead()  # it needs the lock to be done
    reading, window = staging.take_ahead(layer, spans), attention.rule.window
    staging.note_window(layer, window)
    todo = deque(_Wave(moves, span, layer) for span in spans[len(reading) :])
    after = (layer + 1) % places.spec.held_layers
    if staging.had_window(after, window):
        todo.extend(_waves_ahead(moves, spans, after, attention.num_full_pages))
    try:
        staging.start_some(todo, reading)
        for _ in spans:
            wave, _, buffer = _next_of(reading)
            staging.start_some(todo, reading)
            wave.attend(attention)
            staging.give_back(buffer)
    finally:
        staging.keep_ahead(reading)


def _next_of(reading: deque[_Reading]) -> _Reading:
    """Wait for the first wave, and take it out; if the wait is interrupted, it stays."""
    first = reading[0]
    try:
        first.future.result()
    finally:
        if first.future.done():
            reading.popleft()
    return first


def _waves_ahead(
    moves: Mover, spans: Sequence[_Span], layer: int, num_full_pages: int
) -> Iterator["_Wave"]:
    """The first waves of the next layer, as far as nothing will be written into their pages."""
    for span in spans[: _NUM_BUFFERS - 1]:
        if span.first + len(span.pages) <= num_full_pages:
            yield _Wave(moves, span, layer)


class _Wave:
    """One layer of a span; what is not in the pool is staged before it is attended.

    Args:
        moves: Moves the group's pages between the tiers.
        span: The pages.
        layer: Layer within the group.
    """

    def __init__(self, moves: Mover, span: _Span, layer: int) -> None:
        self._moves = moves
        self._span = span
        self._layer = layer
        self._is_staged = np.zeros(len(span.pages), np.bool_)
        self._keys, self._values, self._records = np.zeros((3, len(span.pages)), np.int64)
        self._free = aligned(0)  # what is left of the buffer
        self._kept: list[object] = []  # what staged pages lie in

    def is_of(self, layer: int, span: _Span) -> bool:
        """Whether it is the layer of the span."""
        mine = self._span
        is_same = mine is span or (mine.first == span.first and mine.pages == span.pages)
        return self._layer == layer and is_same

    def reaches(self, layer: int, page: int) -> bool:
        """Whether it is of this layer, and has this page or one behind it."""
        return self._layer == layer and self._span.first + len(self._span.pages) > page

    def stage(self, buffer: Bytes) -> None:
        """Bring what is not in the pool within reach; the buffer is free."""
        self._free = buffer
        self._stage_rest()

    def attend(self, attention: PageAttention) -> None:
        """Attend to all of the pages."""
        places = self._moves.places
        while True:
            with places.lock.mutex:
                self._span = span = self._span.now(self._moves)
                in_pool = ~self._is_staged
                slots = span.slots[in_pool]
                if (slots >= 0).all():
                    places.counters.num_slices_attended += len(span.pages)
                    keys, values = self._keys.copy(), self._values.copy()
                    starts = span.starts[in_pool]
                    keys[in_pool], values[in_pool] = of_layer(places.pool, self._layer, starts)
                    records = self._records if self._records.any() else None
                    with places.using(slots):
                        kept = tuple(self._kept)
                        attention.attend(span.first, Places(keys, values, records, kept))
                    return
            self._stage_rest()  # they have left the pool meanwhile

    def _stage_rest(self) -> None:
        """Stage what is neither in the pool nor staged."""
        moves, spec = self._moves, self._moves.places.spec
        with moves.places.lock.mutex:
            self._span = span = self._span.now(moves)
        is_new = ~self._is_staged[span.stored]
        if is_new.any():
            self._stage_payloads(span.stored[is_new], span.rows[is_new])
        rest = span.others[~self._is_staged[span.others]]
        if len(rest):
            room = self._room(len(rest), spec.layer_nbytes)
            out = room.view(spec.np_dtype).reshape(len(rest), *spec.layer_shape)
            moves.read_slices([span.pages[n] for n in rest.tolist()], self._layer, out)
            self._set_numbers(rest, _starts(room))

    def _stage_payloads(self, numbers: Numbers, rows: PackedRows) -> None:
        """Stage pages, or view them, as the store holds them in these rows."""
        moves = self._moves
        pages = [self._span.pages[number] for number in numbers.tolist()]
        if moves.maps_store:
            starts, maps = moves.view_payloads(pages, rows, self._layer)
            self._kept += maps
        else:
            room = self._room(len(numbers), moves.payload_nbytes)
            moves.read_payloads(pages, rows, self._layer, room.reshape(len(room), 1, 1, 1, -1))
            starts = _starts(room)
        if moves.record_layout is None:
            self._set_numbers(numbers, starts)
        else:
            self._records[numbers] = starts
            self._is_staged[numbers] = True

    def _set_numbers(self, numbers: Numbers, starts: Numbers) -> None:
        """Note where the numbers of pages begin, ``(kind, token, head, channel)``."""
        spec = self._moves.places.spec
        self._keys[numbers] = starts
        self._values[numbers] = starts + spec.layer_nbytes // spec.num_kinds
        self._is_staged[numbers] = True

    def _room(self, count: int, nbytes: int) -> Bytes:
        """Memory ``(count, nbytes)``, out of the buffer if there is enough left."""
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._free) < count * stride:
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
