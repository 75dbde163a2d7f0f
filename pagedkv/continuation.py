"""Where a prompt goes on inside a cached page: the longest beginning that all layer groups have."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pagedkv.errors import CorruptPageError, PoolExhaustedError, StoreFullError
from pagedkv.group import LayerGroup
from pagedkv.heads import Head
from pagedkv.page import Page
from pagedkv.prefix import Tokens
from pagedkv.spec import PageKey

Array = npt.NDArray[Any]

_MAX_DAMAGED = 8
"""So many damaged pages are tried, one after the other, before nothing is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer group's share of a sequence that is just opened.

    Args:
        group: The group.
        parent: Key of its last page, or the root key.
        last: Its last page, if there is one.
    """

    group: LayerGroup
    parent: PageKey
    last: Page | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is looked for behind the last pages.

    Args:
        tokens: Ids that the prompt goes on with.
        salt: The sequence's.
        extra: Of the page that these tokens begin.
        whole: Only saved tails of which all tokens are wanted.
    """

    tokens: Tokens
    salt: bytes
    extra: bytes
    whole: bool


def copy_longest(parts: Sequence[Part], wish: Wish, *, refresh: bool) -> tuple[int, list[Page]]:
    """Copy the longest beginning of a cached page that goes on with the wished tokens.

    Each group may have it in another page: its tokens are the same, and so is all before them.

    Args:
        parts: All groups of the sequence.
        wish: What is looked for.
        refresh: Look what other processes have stored, if not all is found.

    Returns:
        The number of its tokens, and a fresh private page for each group, held once; 0 and none
        if nothing is found, or there is no room for the pages.
    """
    for _ in range(_MAX_DAMAGED):
        with ExitStack() as stack:
            heads = _find(parts, wish, stack)
            if refresh and _length(heads) < _most(parts, wish) and parts[0].group.refresh():
                heads = _find(parts, wish, stack)
            refresh = False
            count = _length(heads)
            if count == 0:
                break
            try:
                copies = _read(parts, heads, count)
            except CorruptPageError:
                continue
        try:
            return count, _new_pages(parts, copies)
        except (PoolExhaustedError, StoreFullError):
            break
    return 0, []


def _most(parts: Sequence[Part], wish: Wish) -> int:
    return min(len(wish.tokens), parts[0].group.spec.page_tokens - 1)


def _length(heads: Sequence[Head | None]) -> int:
    return min(0 if head is None else head.num_tokens for head in heads)


def _find(parts: Sequence[Part], wish: Wish, stack: ExitStack) -> list[Head | None]:
    """The longest head in each group; the stack lets them go."""
    heads: list[Head | None] = []
    tokens = wish.tokens
    for part in parts:
        finder = part.group.heads
        head = finder.find(part.parent, tokens, wish.salt, wish.extra, whole=wish.whole)
        if head is None:
            return [None]
        stack.callback(finder.let_go, head)
        heads.append(head)
    return heads


def _read(parts: Sequence[Part], heads: Sequence[Head | None], count: int) -> list[Array]:
    """The first tokens of each head."""
    return [
        part.group.read_head(head, count)
        for part, head in zip(parts, heads, strict=True)
        if head is not None
    ]


def _new_pages(parts: Sequence[Part], copies: Sequence[Array]) -> list[Page]:
    """A fresh page with these numbers for each group, or for none."""
    pages: list[Page] = []
    try:
        for part, values in zip(parts, copies, strict=True):
            pages.append(part.group.new_filled(values, part.last))
    except BaseException:
        for part, page in zip(parts, pages, strict=False):
            part.group.release([page])
        raise
    return pages
