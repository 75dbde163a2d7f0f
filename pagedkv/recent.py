"""``RecentKeys``: which keys were seen not long ago."""

from collections.abc import Sequence

from pagedkv.spec import PageKey


class RecentKeys:
    """A bounded memory of keys: of at most ``limit``, of which the older half is forgotten at once.

    Args:
        limit: Most keys that are remembered, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._half = max(1, limit // 2)
        self._young: set[PageKey] = set()
        self._old: set[PageKey] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def __contains__(self, key: object) -> bool:
        return key in self._young or key in self._old

    def among(self, keys: Sequence[PageKey]) -> set[PageKey]:
        """Those of ``keys`` that were seen."""
        return self._young.intersection(keys) | self._old.intersection(keys)

    def add(self, keys: Sequence[PageKey]) -> None:
        """See ``keys``, the last of them last."""
        start = max(0, len(keys) - 2 * self._half)
        while start < len(keys):
            stop = start + self._half - len(self._young)
            self._young.update(keys[start:stop])
            if len(self._young) >= self._half:
                self._old = self._young if self._limit > 1 else set()
                self._young = set()
            start = stop

    def discard(self, keys: set[PageKey]) -> None:
        """Forget ``keys``."""
        self._young -= keys
        self._old -= keys
