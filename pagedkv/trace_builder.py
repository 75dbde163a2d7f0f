"""``TraceBuilder``: requests are checked, numbered and put into the arrays of a ``Trace``."""

import math
from array import array
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from pagedkv.errors import TraceError
from pagedkv.trace import Trace

_MAX_TOKENS = 2**40


class TraceBuilder:
    """Collects the requests of one file.

    Args:
        path: The file, for messages.
        format: As for ``Trace``.
        page_tokens: The same.
        page_nbytes: The same.
        is_chained: The same.
    """

    def __init__(
        self,
        path: Path,
        format: str,  # noqa: A002 # as the field of Trace
        *,
        page_tokens: int,
        page_nbytes: int | None = None,
        is_chained: bool = True,
    ) -> None:
        self.path = path
        self.page_tokens = page_tokens
        self._format = format
        self._page_nbytes = page_nbytes
        self._is_chained = is_chained
        self._numbers: dict[Hashable, int] = {}
        self._parents = array("q")
        self._pages = array("q")
        self._starts = array("q", [0])
        self._times = array("d")
        self._prompt_tokens = array("q")
        self._output_tokens = array("q")
        self._first_time = 0.0
        self._last_time = -math.inf
        self._num_moved = 0
        self._first_moved = ""

    def error(self, line: int, message: str) -> TraceError:
        """The error to raise about a line."""
        return TraceError(f"{self.path}, line {line}: {message}")

    def add(
        self,
        line: int,
        pages: Sequence[Hashable],
        *,
        time: float,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """Add a request.

        Args:
            line: Its line, for messages.
            pages: What names its pages in the file, the root first.
            time: Seconds, from wherever the file counts them.
            prompt_tokens: Tokens of the prompt.
            output_tokens: Tokens that were generated.

        Raises:
            TraceError: Time went backwards, or a page is named twice.
        """
        if time < self._last_time:
            raise self.error(
                line,
                f"its time is {time:g} s, before the {self._last_time:g} s of the request before"
                " it; sort the requests by time",
            )
        if len(pages) > 1 and len(set(pages)) < len(pages):
            double = next(page for at, page in enumerate(pages) if page in pages[:at])
            raise self.error(
                line, f"{double!r} comes twice in one request; a prompt has each page once"
            )
        if not self._times:
            self._first_time = time
        self._last_time = time
        numbers, parents, out = self._numbers, self._parents, self._pages
        before = -1
        for page in pages:
            number = numbers.get(page)
            if number is None:
                number = numbers[page] = len(parents)
                parents.append(before)
            elif self._is_chained and parents[number] != before:
                self._note_moved(line, page)
            out.append(number)
            if self._is_chained:
                before = number
        self._starts.append(len(out))
        self._times.append(time - self._first_time)
        self._prompt_tokens.append(prompt_tokens)
        self._output_tokens.append(output_tokens)

    def build(self) -> Trace:
        """The trace; the builder must not be used again.

        Raises:
            TraceError: There is no request, or no page in any.
        """
        if not self._times:
            raise TraceError(f"{self.path} is empty: it holds no request")
        if not self._pages:
            raise TraceError(f"{self.path} holds {len(self._times):,} requests, none with a page")
        warnings: list[str] = []
        if self._num_moved:
            warnings.append(
                f"{self.path}: {self._num_moved:,} times a page comes behind another one than"
                f" where it came first ({self._first_moved}), though a page of a"
                " chained trace names its whole prefix; where it came first counts as its parent"
            )
        return Trace(
            source=str(self.path),
            format=self._format,
            page_tokens=self.page_tokens,
            page_nbytes=self._page_nbytes,
            is_chained=self._is_chained,
            pages=np.array(self._pages, np.int64),
            starts=np.array(self._starts, np.int64),
            times=np.array(self._times, np.float64),
            prompt_tokens=np.array(self._prompt_tokens, np.int64),
            output_tokens=np.array(self._output_tokens, np.int64),
            parents=np.array(self._parents, np.int64),
            num_moved=self._num_moved,
            warnings=tuple(warnings),
        )

    def seconds(self, line: int, name: str, value: object) -> float:
        """``value`` if it is a finite number that is not negative; ``name`` says where it stood."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(line, f"{name} is {_shown(value)}; it must be a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(line, f"{name} is {value}; it must be finite")
        if not 0 <= value < 2**62:
            raise self.error(line, f"{name} is {_shown(value)}; it must be in 0..2**62")
        return float(value)

    def tokens(self, line: int, name: str, value: object) -> int:
        """``value`` if it is a number of tokens."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(line, f"{name} is {_shown(value)}; it must be an integer")
        if value < 0:
            raise self.error(line, f"{name} is {value}; it must not be negative")
        if value > _MAX_TOKENS:
            raise self.error(line, f"{name} is {_shown(value)}; no prompt has so many tokens")
        return value

    def ids(self, line: int, name: str, value: object, *, allow_text: bool) -> list[Hashable]:
        """``value`` if it is a list of what may name pages: integers from 0, or texts."""
        if not isinstance(value, list):
            raise self.error(line, f"{name} is {_shown(value)}; it must be a list")
        for at, page in enumerate(value):
            if type(page) is int:
                if page < 0:
                    raise self.error(
                        line, f"{name}[{at}] is {_shown(page)}; ids must not be negative"
                    )
            elif not allow_text or type(page) is not str:
                wanted = "an integer or a text" if allow_text else "an integer"
                raise self.error(line, f"{name}[{at}] is {_shown(page)}; an id must be {wanted}")
            elif not page:
                raise self.error(line, f"{name}[{at}] is an empty text; give each page an id")
        return value

    def _note_moved(self, line: int, page: Hashable) -> None:
        if not self._num_moved:
            self._first_moved = f"first {_shown(page)} in line {line}"
        self._num_moved += 1


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
