"""``Space``: how many bytes a store takes, and how many its bound leaves."""

import threading

from pagedkv.errors import StoreFullError
from pagedkv.spec import format_nbytes


class Space:
    """Counts the bytes of a store on disk against its bound. Thread-safe.

    Args:
        where: The store, for messages.
        max_nbytes: The bound; None for none.
    """

    def __init__(self, where: str, max_nbytes: int | None) -> None:
        self.max_nbytes = max_nbytes
        self._where = where
        self._lock = threading.Lock()
        self._written_nbytes = 0
        self._reserved_nbytes = 0
        self._scratch_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk: pages, catalogues, derived columns and scratch files."""
        return self._written_nbytes + self._scratch_nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch files."""
        return self._scratch_nbytes

    @scratch_nbytes.setter
    def scratch_nbytes(self, nbytes: int) -> None:
        with self._lock:
            self._scratch_nbytes = nbytes

    def count(self, nbytes: int) -> None:
        """Count ``nbytes`` that are already on disk."""
        with self._lock:
            self._written_nbytes += nbytes

    def require(self, nbytes: int) -> None:
        """Raise ``StoreFullError`` if the bound has no room for ``nbytes`` more."""
        used = self.nbytes + self._reserved_nbytes
        if self.max_nbytes is not None and nbytes > 0 and used + nbytes > self.max_nbytes:
            raise StoreFullError(
                f"{self._where} has {format_nbytes(used)} ({used}) of its max_nbytes"
                f" {format_nbytes(self.max_nbytes)} ({self.max_nbytes}) in use: no room for"
                f" {format_nbytes(nbytes)} ({nbytes}) more"
            )

    def reserve(self, nbytes: int) -> None:
        """Set ``nbytes`` apart for a write; ``StoreFullError`` if there is no room."""
        with self._lock:
            self.require(nbytes)
            self._reserved_nbytes += nbytes

    def release(self, nbytes: int, *, written: bool) -> None:
        """End a reservation, with its bytes ``written`` to disk or not."""
        with self._lock:
            self._reserved_nbytes -= nbytes
            self._written_nbytes += nbytes if written else 0

    def grow_scratch(self, nbytes: int) -> None:
        """Count ``nbytes`` more of scratch files; ``StoreFullError`` if there is no room."""
        with self._lock:
            self.require(nbytes)
            self._scratch_nbytes += nbytes

    def check_invariants(self) -> None:
        """Assert that no count is negative."""
        assert min(self._written_nbytes, self._reserved_nbytes, self._scratch_nbytes) >= 0
