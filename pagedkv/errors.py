"""The exception tree: grouped by what a caller can do about it.

    PagedKVError
    ├── PoolExhaustedError    free pages, or give the cache more slots
    ├── PageNotFoundError     compute the page (also a LookupError)
    ├── SpecMismatchError     use the right model, geometry or store (also a ValueError)
    ├── ClosedError           open it again
    ├── TraceError            mend the line of the trace that it names (also a ValueError)
    └── StoreError            look at the store's folder
        ├── CorruptPageError      the page is lost: compute it again
        ├── StoreFullError        raise max_nbytes, or collect garbage
        ├── StoreLockedError      another writer holds it
        ├── StoreTimeoutError     the disk did not answer in time
        └── FormatVersionError    install the release that wrote it

Arguments of a wrong shape, type or value raise plain ``ValueError`` and ``TypeError``.
"""


class PagedKVError(Exception):
    """Base class of every error that this library raises on its own account."""


class PoolExhaustedError(PagedKVError):
    """No slot could be had: every slot is pinned, or holds a page that may not be lost."""


class PageNotFoundError(PagedKVError, LookupError):
    """A page that was asked for is in no tier."""


class SpecMismatchError(PagedKVError, ValueError):
    """Two things that must describe the same model and geometry do not."""


class ClosedError(PagedKVError):
    """The cache, sequence or store was closed, or belongs to the process that forked this one."""


class TraceError(PagedKVError, ValueError):
    """A trace cannot be read: the message names the file, the line, and what is wrong there."""


class StoreError(PagedKVError):
    """The page store could not do what was asked."""


class CorruptPageError(StoreError):
    """Stored bytes are not those that were written, or are gone.

    Args:
        message: What happened, and what to do.
        keys: Keys of the pages that are lost, as far as they are known.
        positions: Which of the pages that were asked for are lost.
    """

    def __init__(
        self, message: str, keys: tuple[bytes, ...] = (), positions: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.keys = keys
        self.positions = positions


class StoreFullError(StoreError):
    """The store's ``max_nbytes`` leaves no room for what was to be written."""


class StoreLockedError(StoreError):
    """Another writer holds the lane or the store."""


class StoreTimeoutError(StoreError):
    """The disk did not answer before the deadline."""


class FormatVersionError(StoreError):
    """The store was written by a format that this release does not know."""
