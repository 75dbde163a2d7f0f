"""One layer of a sequence's pages: tokens written into it, and gathered from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.moves import Mover
from pagedkv.page import Page
from pagedkv.pool import SlotPool
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]


_FEW_NBYTES = 2**16
"""So much is copied without letting go of the lock, which would take longer."""


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
        if len(pages) == 1 and pages[0].slot is not None and kinds[0].nbytes <= _FEW_NBYTES:
            places.free_spill(pages[0])  # its copy is about to be outdated
            _put(places.pool.layer(layer, pages[0].slot), start, kinds)
            return
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
        places.counters.num_slices_attended += len(pages)
        slots = [page.slot for page in pages]
        first = slots[0]
        run = range(first, first + len(slots)) if first is not None else range(0)
        is_run = slots == list(run)
        if is_run:
            places.pin_run(run.start, run.stop)
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
                places.unpin_run(pages, run.start, run.stop)
                places.lock.notify_all()
    else:
        try:
            absent = [number for number, slot in enumerate(slots) if slot is None]
            out = buffer.swapaxes(0, 1)  # (page, kind, token, head, channel)
            moves.read_slices([pages[number] for number in absent], layer, out, np.array(absent))
            flat = buffer.reshape(buffer.shape[0], -1, *buffer.shape[3:])
            filled = flat[:, : len(pages) * places.spec.page_tokens]
            filled.flags.writeable = False
            yield filled
        finally:
            spare.append(buffer)


def _write(
    moves: Mover, pages: Sequence[Page], layer: int, start: int, kinds: Sequence[Array]
) -> None:
    places = moves.places
    slots = [page.slot for page in pages]
    done, at = 0, 0
    while at < len(pages):
        page, num_pages = pages[at], _run_length(slots, at)
        count = min(num_pages * places.spec.page_tokens - start, len(kinds[0]) - done)
        parts = [values[done : done + count] for values in kinds]
        if page.slot is not None:
            for kind, values in enumerate(parts):
                run = places.pool.run(layer, kind, page.slot, num_pages)
                run[start : start + count] = values
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
        at += num_pages
        start = 0


def _put(target: Array, start: int, parts: Sequence[Array]) -> None:
    for kind, values in enumerate(parts):
        target[kind, start : start + len(values)] = values


def _copy_resident(pool: SlotPool, slots: Sequence[int | None], layer: int, out: Array) -> None:
    """Copy one layer of the slots to their numbers in ``out``, ``(kind, page, token, ...)``."""
    number = 0
    while number < len(slots):
        slot, count = slots[number], _run_length(slots, number)
        if slot is not None:
            out[:, number : number + count] = pool.array[layer, :, slot : slot + count]
        number += count


def _run_length(slots: Sequence[int | None], at: int) -> int:
    """How many slots from that one on lie one behind the other; 1 for a page without a slot."""
    slot, count = slots[at], 1
    if slot is not None:
        while at + count < len(slots) and slots[at + count] == slot + count:
            count += 1
    return count


def _take_buffer(spare: list[Array], spec: KVSpec, num_pages: int) -> Array:
    """A buffer ``(kind, page, token, head, channel)`` for at least that many pages."""
    buffer = spare.pop() if spare else None
    if buffer is None or buffer.shape[1] < num_pages:
        room = num_pages + max(1, num_pages // 8)  # so that a decode loop seldom allocates anew
        kinds, *page = spec.layer_shape
        buffer = np.empty((kinds, room, *page), dtype=spec.np_dtype)
    return buffer
