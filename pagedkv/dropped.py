"""``DroppedPages``: which pages the pool gave up though no store had them."""

import time
from collections import deque

from pagedkv.spec import PageKey

MAX_DROPPED = 4096
"""Pages that are remembered."""


class DroppedPages:
    """The pages that were dropped last, for explanations. Called with the cache's lock held.

    Args:
        policy: Name of the policy that ranked them.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._pages: deque[tuple[PageKey, int]] = deque(maxlen=MAX_DROPPED)

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, key: PageKey) -> None:
        """Remember that a page is dropped now; the oldest is forgotten in its favour."""
        self._pages.append((key, time.time_ns()))

    def dropped_ns(self, key: PageKey) -> int | None:
        """When the page was dropped last, nanoseconds since 1970; None if that is not known."""
        return next((at for one, at in reversed(self._pages) if one == key), None)
