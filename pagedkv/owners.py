"""Which cache has taken each open store over: a store has one at a time, which closes it."""

import functools
import threading
import weakref
from typing import Protocol

from pagedkv.errors import StoreLockedError
from pagedkv.reclaim import HeldPage
from pagedkv.store import PageStore


class Owner(Protocol):
    """What is known of a cache here."""

    def pages_in_use(self) -> set[HeldPage]:
        """Pages that the store may not give up."""


_owners: "weakref.WeakKeyDictionary[PageStore, weakref.ref[Owner]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def take_over(store: PageStore, cache: Owner) -> None:
    """Note that the store is the cache's, and what the store must keep for it.

    A cache that was dropped without being closed is not kept alive; its store is free.

    Raises:
        StoreLockedError: The store is another cache's.
    """
    with _lock:
        owner = _owners.get(store)
        other = None if owner is None else owner()
        if other is not None and other is not cache:
            raise StoreLockedError(
                f"the store at {store.path} belongs to another cache of this process ({other!r}): "
                "use that one, or open the store again"
            )
        _owners[store] = weakref.ref(cache)
        if not store.read_only:
            store.protect(functools.partial(_pages_in_use, _owners[store]))


def let_go(store: PageStore) -> None:
    """Note that the store is no cache's any more."""
    with _lock:
        _owners.pop(store, None)


def _pages_in_use(owner: "weakref.ref[Owner]") -> set[HeldPage]:
    cache = owner()
    return set() if cache is None else cache.pages_in_use()
