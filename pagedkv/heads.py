"""``HeadFinder``: the cached page whose beginning goes on with a prompt best, in pool and store."""

from dataclasses import dataclass

import numpy as np

from pagedkv.page import Page
from pagedkv.prefix import Tokens, chain_key
from pagedkv.room import Room
from pagedkv.spec import PageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first tokens of a cached page, or of a saved tail.

    Args:
        key: Key of the page.
        num_tokens: How many of its tokens are wanted: fewer than a page has.
        page: The page, if the pool knows it; it stays where it is until ``let_go``.
        is_pinned: Whether it is pinned; else it is held.
    """

    key: PageKey
    num_tokens: int
    page: Page | None
    is_pinned: bool = False


class HeadFinder:
    """Finds heads among the pages of one spec. Its methods take the cache's lock themselves.

    Args:
        room: Of the group's pool.
    """

    def __init__(self, room: Room) -> None:
        self._moves = room.moves
        self._places = room.places
        self._page_tokens = room.places.spec.page_tokens

    def find(
        self, parent: PageKey, tokens: Tokens, salt: bytes, extra: bytes, *, whole: bool
    ) -> Head | None:
        """The head that shares most leading tokens with ``tokens``; the caller lets it go.

        It costs time logarithmic in the number of pages that follow ``parent``.

        Args:
            parent: Key of the page before; the root key where there is none.
            tokens: What the prompt goes on with.
            salt: Only pages of this salt count,
            extra: and of this extra.
            whole: Only saved tails of which all tokens are wanted.
        """
        most = min(len(tokens), self._page_tokens - 1)
        if most == 0:
            return None
        tokens = tokens[: self._page_tokens]
        with self._places.lock:
            best = None if whole else self._find_in_pool(parent, tokens, salt, extra)
            if best is not None and best.num_tokens == most:
                return best
            try:
                child = self._moves.find_child(parent, tokens, salt, extra, whole=whole)
            except BaseException:
                self._drop(best)
                raise
            if child is None or (best and child.num_tokens <= best.num_tokens):
                return best
            self._drop(best)
            return Head(key=child.key, num_tokens=min(child.num_tokens, most), page=None)

    def let_go(self, head: Head) -> None:
        """Take back what keeps a head's page. It does not count as used: a part of it was."""
        with self._places.lock:
            self._drop(head)
            self._places.lock.notify_all()

    def _find_in_pool(
        self, parent: PageKey, tokens: Tokens, salt: bytes, extra: bytes
    ) -> Head | None:
        most = min(len(tokens), self._page_tokens - 1)
        for num_common, page in self._places.index.nearest(parent, tokens.tobytes(), salt, extra):
            if page.key is None or page.key != _key_of(page, parent, salt, extra):
                continue  # a caller made the key up
            self._places.wait_readable([page])
            if self._places.index.get(page.key) is not page or page.is_lost:
                continue  # it has gone meanwhile
            head = Head(
                key=page.key,
                num_tokens=min(num_common, most),
                page=page,
                is_pinned=not page.ref_count,
            )
            if head.is_pinned:
                self._places.pin(page)
            else:
                self._places.add_holder(page)
            return head
        return None

    def _drop(self, head: Head | None) -> None:
        if head is None or head.page is None:
            return
        if head.is_pinned:
            self._places.unpin(head.page)
        else:
            self._places.drop_holder(head.page)


def _key_of(page: Page, parent: PageKey, salt: bytes, extra: bytes) -> PageKey:
    assert page.tokens is not None
    return chain_key(parent, np.frombuffer(page.tokens, np.int32), salt, extra)
