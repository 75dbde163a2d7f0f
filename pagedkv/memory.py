"""Where pages lie in memory, as the kernels see it: addresses and strides."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_ALIGNMENT = 4096


class PageMemory(NamedTuple):
    """Pages whose (token, head, channel) of each layer and kind is one contiguous block.

    Whoever holds one keeps the arrays alive that it points into.
    """

    addresses: Numbers
    """Of each page's first byte."""
    layer_stride: int
    """Bytes from one layer to the next."""
    kind_stride: int
    """Bytes from one kind to the next."""

    def part(self, numbers: "slice | Numbers") -> "PageMemory":
        """Those of the pages."""
        return PageMemory(self.addresses[numbers], self.layer_stride, self.kind_stride)


def aligned(nbytes: int) -> "npt.NDArray[np.uint8]":
    """Fresh memory of at least ``nbytes`` that begins and ends with a page of the system.

    Reads past the page cache need that; for others the system copies several times faster so.
    """
    size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + size]


class PageArrays:
    """Pages, or one layer of each, that a caller handed in: the arrays and their memory.

    Arrays that a kernel cannot walk (a block that is not contiguous, unlike strides) are staged:
    copied on the way in by ``fill``, and on the way out by ``deliver``.

    Args:
        arrays: One array for each page, or one array whose first axis is the page.
        at: Which places of that axis; all of them by default. Only for one array.
        shape: Of a page ``(layer, kind, token, head, channel)``, or of one layer of it.
        dtype: Of the numbers.
        what: What to call one of the arrays in messages.

    Attributes:
        count: How many pages.
        memory: Where they are: in the caller's arrays, or staged.

    Raises:
        ValueError: A shape, dtype or place does not fit; the message names it.
        TypeError: ``at`` is no row of integers.
    """

    def __init__(
        self,
        arrays: "Sequence[Array] | Array",
        at: "Numbers | None",
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        what: str,
    ) -> None:
        at = _as_places(at)
        self._shape = shape
        self._arrays = arrays
        self._at = at
        self._chosen: Numbers | None = None
        self._staged: Array | None = None
        if isinstance(arrays, np.ndarray):
            _check(arrays.shape[1:], arrays.dtype, shape, dtype, what)
            whole = arrays
            count = len(arrays)
            if at is not None:
                if len(at) and not 0 <= int(at.min()) <= int(at.max()) < count:
                    raise ValueError(f"{what} has {count} places: at names {at.min()}..{at.max()}")
                count = len(at)
        else:
            if at is not None:
                raise ValueError("at chooses places of one array: give one, not a sequence")
            for array in arrays:
                _check(array.shape, array.dtype, shape, dtype, what)
            count = len(arrays)
            whole = arrays[0][None] if count == 1 else np.empty(0)
        self.count = count
        if count and not isinstance(arrays, np.ndarray) and count > 1:
            self.memory = self._of_sequence(arrays)
        elif count and _has_blocks(whole):
            start = whole.__array_interface__["data"][0]
            numbers = np.arange(count) if at is None or whole is not arrays else at
            layer_stride, kind_stride = _strides(whole)
            self.memory = PageMemory(start + numbers * whole.strides[0], layer_stride, kind_stride)
        else:
            self.memory = self._stage()

    def page(self, number: int) -> Array:
        """The array of one page: the staged one if there is one, else the caller's."""
        if self._staged is not None:
            staged: Array = self._staged[self.number_of(number)]
            return staged
        return self._given(number)

    def part(self, numbers: Numbers) -> "PageArrays":
        """Only these of the pages."""
        part = copy.copy(self)
        part.count = len(numbers)
        part.memory = self.memory.part(numbers)
        part._chosen = numbers if self._chosen is None else self._chosen[numbers]
        return part

    @property
    def is_writable(self) -> bool:
        """Whether all arrays may be written."""
        if isinstance(self._arrays, np.ndarray):
            return bool(self._arrays.flags.writeable)
        return all(array.flags.writeable for array in self._arrays)

    def fill(self) -> None:
        """Copy the caller's numbers to the staging area, if there is one."""
        if self._staged is not None:
            for number in range(self.count):
                self.page(number)[...] = self._given(number)

    def deliver(self) -> None:
        """Copy the pages from the staging area, if there is one, to the caller's arrays."""
        if self._staged is not None:
            for number in range(self.count):
                self._given(number)[...] = self.page(number)

    def number_of(self, number: int) -> int:
        """Which of the arrays that were handed in a page of a ``part`` is."""
        return number if self._chosen is None else int(self._chosen[number])

    def _given(self, number: int) -> Array:
        place = self.number_of(number)
        array: Array = self._arrays[place if self._at is None else int(self._at[place])]
        return array

    def _of_sequence(self, arrays: Sequence[Array]) -> PageMemory:
        strides = arrays[0].strides
        alike = all(array.strides == strides for array in arrays)
        if not alike or not _has_blocks(arrays[0][None]):
            return self._stage()
        starts = [array.__array_interface__["data"][0] for array in arrays]
        return PageMemory(np.array(starts, dtype=np.int64), *_strides(arrays[0][None]))

    def _stage(self) -> PageMemory:
        dtype = self._given(0).dtype if self.count else np.dtype(np.uint8)
        self._staged = staged = np.empty((self.count, *self._shape), dtype)
        start = staged.__array_interface__["data"][0]
        addresses = start + np.arange(self.count) * staged.strides[0]
        return PageMemory(addresses, *_strides(staged))


def _as_places(at: "Numbers | None") -> "Numbers | None":
    if at is None:
        return None
    places = np.asarray(at)
    if places.ndim != 1 or places.dtype.kind not in "iu":
        raise TypeError(f"at is {at!r}: it must be one row of integers")
    return places.astype(np.int64, copy=False)


def _strides(pages: Array) -> tuple[int, int]:
    """Layer and kind stride of ``(page, [layer,] kind, token, head, channel)``."""
    kind_stride = pages.strides[-4]
    return (pages.strides[1] if pages.ndim == 6 else 0), kind_stride


def _has_blocks(pages: Array) -> bool:
    """Whether (token, head, channel) is contiguous and aligned in every page."""
    if not pages.flags.aligned:
        return False
    expected = pages.itemsize
    for axis in (-1, -2, -3):
        if pages.shape[axis] != 1 and pages.strides[axis] != expected:
            return False
        expected *= pages.shape[axis]
    return True


def _check(
    found: tuple[int, ...],
    found_dtype: np.dtype[Any],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    what: str,
) -> None:
    if found != shape or found_dtype != dtype:
        raise ValueError(
            f"{what} is {found_dtype} of shape {found}: the spec needs {dtype} of shape {shape}"
        )
