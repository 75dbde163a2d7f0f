"""``Recording``: what callers do with a cache, line by line, so that it can be replayed.

The file is a trace (docs/traces.md): JSON lines, the first of which says what the cache is like.
Pages are numbered in the order in which they are seen: no token, key or salt is written.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagedkv.prefix import PageKeys
from pagedkv.spec import PageKey
from pagedkv.trace_lines import FORMAT, VERSION

logger = logging.getLogger("pagedkv")


@dataclass(slots=True)
class _State:
    """What has been written of an open sequence."""

    number: int
    num_named: int = 0
    """Pages whose keys are known."""
    num_pages: dict[int | None, tuple[int, bool]] = field(default_factory=dict)
    """Its full pages, and whether there is another, by group; None for all groups."""


class Recording:
    """Writes operations to a file as they begin. Thread-safe; made by ``PagedKVCache.record``.

    Where the file cannot be written any more, the recording ends: the cache goes on, and ``close``
    raises what was the matter.

    Args:
        path: The file; it must not exist.
        header: What the first line says of the cache.

    Raises:
        FileExistsError: There is such a file: it is kept.
        OSError: The file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file = self.path.open("x", encoding="utf-8")
        self._lock = threading.Lock()
        self._failure: OSError | None = None
        self._numbers: dict[PageKey, int] = {}
        self._states: dict[int, _State] = {}  # by the id of an open sequence
        self._num_sequences = 0
        self._num_uses = 0
        self._page_tokens: int = header["page_tokens"]
        self._began = time.monotonic()
        self._file.write(json.dumps({"format": FORMAT, "version": VERSION, **header}) + "\n")

    @property
    def is_closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._file.closed

    def put(self, keys: Sequence[PageKey], group: int) -> None:
        """Pages are put by key."""
        self._by_key("put", keys, group)

    def get(self, keys: Sequence[PageKey], group: int) -> None:
        """Pages are read by key."""
        self._by_key("get", keys, group)

    def match(self, keys: Sequence[PageKey], group: int, num_held: int) -> None:
        """Somebody was told how many pages are held: a request, if they are read or put then."""
        self._by_key("match", keys, group, held=num_held)

    def acquire(self, keys: Sequence[PageKey], group: int) -> int:
        """A run is acquired; the number of this use, for ``release``."""
        with self._lock:
            self._num_uses += 1
            number = self._num_uses
        self._by_key("acquire", keys, group, use=number)
        return number

    def release(self, number: int) -> None:
        """What ``acquire`` named is given back."""
        self._write(op="release", use=number)

    def held(self, key: PageKey, parent: PageKey | None, group: int) -> None:
        """A page is in the pool as the recording begins."""
        named = None if parent is None else self._named([parent])[0]
        self._write(op="held", group=group, pages=self._named([key]), parent=named)

    def open(self, sequence: object, keys: Sequence[PageKey]) -> None:
        """A sequence is opened with a prompt whose full pages have ``keys``."""
        with self._lock:
            self._num_sequences += 1
            state = self._states[id(sequence)] = _State(self._num_sequences)
        self._write(op="open", sequence=state.number, pages=self._named(keys))

    def append(self, sequence: object, num_tokens: int, group: int | None = None) -> None:
        """A sequence has pages for its first ``num_tokens``, in one group or in all.

        Only written when that needs another page, fills one, or may copy one.
        """
        state = self._states.get(id(sequence))
        if state is None:
            return
        full, rest = divmod(num_tokens, self._page_tokens)
        num_pages = full, bool(rest)
        if num_pages > state.num_pages.get(group, (0, False)):
            state.num_pages[group] = num_pages
            where = {} if group is None else {"group": group}
            self._write(op="append", sequence=state.number, tokens=num_tokens, **where)

    @contextmanager
    def appending(
        self, sequence: object, num_tokens: int, group: int | None = None
    ) -> Iterator[None]:
        """``append``, and inside the block it is tried; if it fails the next try is written too."""
        self.append(sequence, num_tokens, group)
        try:
            yield
        except BaseException:
            state = self._states.get(id(sequence))
            if state is not None:
                state.num_pages.clear()
            raise

    def commit(self, sequence: object, keys: Sequence[PageKey]) -> None:
        """A sequence's first pages have ``keys``."""
        state = self._states.get(id(sequence))
        if state is not None and len(keys) > state.num_named:
            start, state.num_named = state.num_named, len(keys)
            pages = self._named(keys[start:])
            self._write(op="commit", sequence=state.number, start=start, pages=pages)

    def truncate(self, sequence: object, num_tokens: int) -> None:
        """A sequence keeps its first ``num_tokens``."""
        state = self._states.get(id(sequence))
        if state is not None:
            state.num_pages.clear()
            state.num_named = min(state.num_named, num_tokens // self._page_tokens)
            self._write(op="truncate", sequence=state.number, tokens=num_tokens)

    def drop(self, sequence: object, num_tokens: int) -> None:
        """A sequence gives up the pages before token ``num_tokens``."""
        self._of(sequence, "drop", tokens=num_tokens)

    def fork(self, sequence: object, child: object) -> None:
        """``child`` is a fork of ``sequence``: whoever writes a common page copies it before."""
        state = self._states.get(id(sequence))
        if state is not None:
            state.num_pages.clear()
            with self._lock:
                self._num_sequences += 1
                own = self._states[id(child)] = _State(self._num_sequences, state.num_named)
            self._write(op="fork", sequence=state.number, child=own.number)

    def save(self, sequence: object) -> None:
        """A sequence is saved."""
        self._of(sequence, "save")

    def close_sequence(self, sequence: object) -> None:
        """A sequence is closed."""
        self._of(sequence, "close")
        self._states.pop(id(sequence), None)

    def flush(self) -> None:
        """The cache is flushed."""
        self._write(op="flush")

    def begin(self) -> None:
        """What came before this line was there when the recording began."""
        self._write(op="begin")

    def close(self) -> None:
        """End the recording. A second call does nothing.

        Raises:
            OSError: The file could not be written to its end.
        """
        with self._lock:
            if not self._file.closed:
                self._end()
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------

    def _by_key(self, op: str, keys: Sequence[PageKey], group: int, **more: int) -> None:
        values: dict[str, Any] = {"op": op, **more, "group": group, "pages": self._named(keys)}
        if type(keys) is PageKeys and len(keys):
            root = keys.spec.root_key()
            parent = keys.parents[0]
            values["parent"] = None if parent == root else self._named([parent])[0]
        else:
            values["chained"] = False
        self._write(**values)

    def _of(self, sequence: object, op: str, **more: int) -> None:
        state = self._states.get(id(sequence))
        if state is not None:
            self._write(op=op, sequence=state.number, **more)

    def _named(self, keys: Iterable[PageKey]) -> list[int]:
        with self._lock:
            return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def _write(self, **values: Any) -> None:
        line = json.dumps({"time": round(time.monotonic() - self._began, 6), **values}) + "\n"
        with self._lock:
            if not self._file.closed:
                try:
                    self._file.write(line)
                except OSError as error:
                    self._end(error)

    def _end(self, failure: OSError | None = None) -> None:
        """Close the file; called with the lock held."""
        try:
            self._file.close()
        except OSError as error:
            failure = failure or error
        if failure is not None:
            self._failure = failure
            logger.warning("the recording to %s ends before its time: %s", self.path, failure)
