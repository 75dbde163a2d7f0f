"""``Trace``: which pages were asked for, request by request, as arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagedkv.spec import PageKey

Numbers = npt.NDArray[np.int64]
Request = tuple[list[PageKey], list[PageKey | None]]
"""Keys of one request, the root first, and their parents."""

ROOT = PageKey(b"\xff" * 32)
"""The parent of every first page of a prompt, as ``KVSpec.root_key`` is in a cache; no page."""

_AT_ONCE = 1024
"""Requests whose keys are made together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The requests of a trace, in the order in which they came.

    Its pages are numbered 0, 1, … in the order of their first request, whatever they are called in
    the file; 8 bytes an access, and nothing else grows with the accesses.

    Args:
        source: Where it comes from, for messages.
        format: ``"mooncake"``, ``"pagedkv"`` or ``"csv"``.
        page_tokens: Tokens of a full page.
        page_nbytes: Bytes of a page; None if the trace does not say.
        is_chained: Whether each page of a request names its whole prefix, so that it is of no use
            without the page before it. Else every page is on its own.
        pages: Numbers of all requested pages, request after request, the root first ``(access,)``.
        starts: Where in ``pages`` a request begins, and behind the last where it ends
            ``(request + 1,)``.
        times: Seconds from the beginning ``(request,)``.
        prompt_tokens: Tokens of the prompt ``(request,)``.
        output_tokens: Tokens that were generated ``(request,)``.
        parents: The page before each page, -1 for none ``(page,)``; of a page that came behind
            several ones the first.
        num_moved: How often a page came behind another one than at first.
        warnings: What is strange about it, for people.
    """

    source: str
    format: str
    page_tokens: int
    page_nbytes: int | None
    is_chained: bool
    pages: Numbers
    starts: Numbers
    times: npt.NDArray[np.float64]
    prompt_tokens: Numbers
    output_tokens: Numbers
    parents: Numbers
    num_moved: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """How many requests there are."""
        return len(self.times)

    @property
    def num_pages(self) -> int:
        """How many pages were asked for, all requests together: the page accesses."""
        return len(self.pages)

    @property
    def num_distinct(self) -> int:
        """How many different pages there are."""
        return len(self.parents)

    @property
    def lengths(self) -> Numbers:
        """Pages of each request ``(request,)``."""
        return np.diff(self.starts)

    @property
    def is_prefix_closed(self) -> bool:
        """Whether a page always came behind the same one, so that prefixes are all that can hit."""
        return self.is_chained and not self.num_moved

    def keys(self) -> list[PageKey]:
        """A key for each page ``(page,)``: its number as 32 little-endian bytes."""
        return [PageKey(number.to_bytes(32, "little")) for number in range(self.num_distinct)]

    def requests(self, keys: Sequence[PageKey]) -> Iterator[list[Request]]:
        """The requests in batches, as policies want them; pages on their own have no parents.

        Args:
            keys: The key of each page, as ``keys`` makes them.
        """
        parent_of = None if self.is_prefix_closed or not self.is_chained else self.parents.tolist()
        for first in range(0, self.num_requests, _AT_ONCE):
            starts = self.starts[first : first + _AT_ONCE + 1].tolist()
            numbers = self.pages[starts[0] : starts[-1]].tolist()
            run = [keys[number] for number in numbers]
            batch: list[Request] = []
            for start, stop in pairwise(starts):
                own = run[start - starts[0] : stop - starts[0]]
                parents: list[PageKey | None]
                if not self.is_chained:
                    parents = [None] * len(own)
                elif parent_of is None:
                    parents = [ROOT, *own[:-1]][: len(own)]
                else:
                    ids = numbers[start - starts[0] : stop - starts[0]]
                    befores = [parent_of[number] for number in ids]
                    parents = [ROOT if before < 0 else keys[before] for before in befores]
                batch.append((own, parents))
            yield batch

    def part(self, start: int, stop: int) -> "Trace":
        """The requests ``start..stop - 1`` as a trace of its own."""
        first, end = int(self.starts[start]), int(self.starts[stop])
        found, at, inverse = np.unique(
            self.pages[first:end], return_index=True, return_inverse=True
        )
        order = np.argsort(at)
        number = np.empty(len(found), np.int64)
        number[order] = np.arange(len(found))
        kept = found[order]
        renumber = np.full(self.num_distinct + 1, -1, np.int64)
        renumber[kept] = np.arange(len(kept))
        return Trace(
            source=self.source,
            format=self.format,
            page_tokens=self.page_tokens,
            page_nbytes=self.page_nbytes,
            is_chained=self.is_chained,
            pages=number[inverse.reshape(-1)],
            starts=self.starts[start : stop + 1] - first,
            times=self.times[start:stop] - (self.times[start] if stop > start else 0.0),
            prompt_tokens=self.prompt_tokens[start:stop],
            output_tokens=self.output_tokens[start:stop],
            parents=renumber[self.parents[kept]],
            num_moved=self.num_moved,
            warnings=self.warnings,
        )
