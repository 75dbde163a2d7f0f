"""Checks of the arrays and numbers that callers hand in."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.codec import check_finite
from pagedkv.spec import KVSpec

Array = npt.NDArray[Any]

SMALL_PAGE_NBYTES = 4096
"""Up to here, what Python does for a page costs more than copying it."""


def check_pages(name: str, pages: Array, num_pages: int, spec: KVSpec, *, finite: bool) -> None:
    """Raise unless ``pages`` is an array ``(page, layer, kind, token, head, channel)`` of the spec.

    Raises:
        TypeError: It is no numpy array.
        ValueError: Its shape or dtype differs, or (``finite``) a number is NaN or infinite.
    """
    if not isinstance(pages, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(pages).__name__}")
    wanted = (num_pages, *spec.page_shape)
    if pages.shape != wanted:
        raise ValueError(
            f"{name} has shape {pages.shape}: it must be {wanted} "
            "(page, layer, kind, token, head, channel)"
        )
    _check_dtype(name, pages, spec)
    if finite:
        check_finite(pages, name)


def check_kinds(
    kinds: Sequence[Any], lead: tuple[int, ...], spec: KVSpec, *, finite: bool
) -> list[Array]:
    """The arrays of the spec's kinds, each ``(*lead, token, head, channel)``.

    Args:
        kinds: Keys and values; ``None`` in place of the values where ``num_kinds`` is 1.
        lead: The leading axes that they must have.
        spec: Its dtype, heads and channels.
        finite: Refuse NaN and infinity.

    Raises:
        ValueError: A shape or dtype differs, or (``finite``) a number is NaN or infinite.
    """
    names = ("k", "v")[: spec.num_kinds]
    if spec.num_kinds == 1 and kinds[1] is not None:
        raise ValueError("v was given, but the spec has num_kinds 1: one array a token")
    arrays = [np.asarray(values) for values in kinds[: spec.num_kinds]]
    for name, values in zip(names, arrays, strict=True):
        shape = values.shape
        fits = shape[: len(lead)] == lead and shape[-2:] == (spec.held_heads, spec.head_dim)
        if len(shape) != len(lead) + 3 or not fits:
            axes = ", ".join([*map(str, lead), "tokens", str(spec.held_heads), str(spec.head_dim)])
            raise ValueError(f"{name} has shape {shape}: it must be ({axes})")
        if shape != arrays[0].shape:
            raise ValueError(f"v has shape {shape}, but k has {arrays[0].shape}")
        _check_dtype(name, values, spec)
        if finite:
            check_finite(values, name)
    return arrays


def copy_pages(to: Array, places: Sequence[int], source: Array, at: Sequence[int]) -> None:
    """Copy ``source[at[i]]`` to ``to[places[i]]``, for every i.

    Args:
        to: Pages, ``(page, layer, kind, token, head, channel)``, maybe strided.
        places: Where in ``to``; each at most once.
        source: Pages, likewise.
        at: Which of them; as many as ``places``.
    """
    if len(places) > 1 and to[0].nbytes <= SMALL_PAGE_NBYTES:
        to[places] = source[at]  # one copy more, but no loop in Python
    else:
        for place, number in zip(places, at, strict=True):
            to[place] = source[number]


def as_int(name: str, value: Any) -> int:
    """``value`` as an ``int``, numpy's integers too; ``TypeError`` naming it if it is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r}: it must be an integer")


def _check_dtype(name: str, values: Array, spec: KVSpec) -> None:
    if values.dtype != spec.np_dtype:
        raise ValueError(f"{name} is {values.dtype}: the spec says {spec.dtype}")
