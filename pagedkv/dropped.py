"""``DroppedPages``: which pages the pool gave up though no store had them."""

import struct
import time

from pagedkv.spec import PageKey

MAX_DROPPED = 1024
"""Pages that are remembered."""
_ENTRY = struct.Struct("<32sQ")
"""Key, and nanoseconds since 1970; an entry without a page is zeros."""
_pack = _ENTRY.pack_into
_NBYTES = MAX_DROPPED * _ENTRY.size


class DroppedPages:
    """The pages that were dropped last, for explanations. Called with the cache's lock held.

    A ring whose 40 KiB are taken at the start: pages that come and go leave nothing else behind.

    Args:
        policy: Name of the policy that ranked them.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._ring = bytearray(_NBYTES)
        self._next = 0

    def add(self, key: PageKey) -> None:
        """Remember that a page is dropped now; the oldest is forgotten in its favour."""
        start = self._next
        _pack(self._ring, start, key, time.time_ns())
        self._next = (start + _ENTRY.size) % _NBYTES

    @property
    def is_full(self) -> bool:
        """Whether some that were dropped earlier may be forgotten."""
        return self._ring[-_ENTRY.size :] != bytes(_ENTRY.size)

    def dropped_ns(self, key: PageKey) -> int | None:
        """When the page was dropped last, nanoseconds since 1970; None if that is not known."""
        times = (at for one, at in _ENTRY.iter_unpack(self._ring) if one == key)
        return max(times, default=0) or None
