"""``list_runs``: the pages of a store as a tree of prefixes, for ``pagedkv ls``."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from pagedkv.catalog import HAS_TOKENS, IS_TAIL
from pagedkv.spec import PageKey
from pagedkv.stored_pages import PrefixTree, Start, read_store


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    """Pages that follow one another, up to where prefixes part.

    Args:
        group: Index into the store's specs.
        level: How often prefixes have parted before it.
        start: ``FIRST``: of a prompt; ``AFTER``: after the page with the key ``parent``;
            ``OPAQUE``: a page that names no other; ``ORPHAN``: the page before it is gone.
        parent: Key of the page before it, if it names one.
        first_key: Key of its first page.
        last_key: Key of its last page.
        depth: Pages before it.
        num_pages: Its pages.
        start_token: Tokens before it.
        num_tokens: Its tokens.
        ends_in_tail: Whether its last page is a saved tail.
        first_tokens: Its first token ids, if they are kept.
        created_ns: When its first page was stored, nanoseconds since 1970.
        lane: The lane of its first page.
        row: The row of its first page.
    """

    group: int
    level: int
    start: Start
    parent: PageKey | None
    first_key: PageKey
    last_key: PageKey
    depth: int
    num_pages: int
    start_token: int
    num_tokens: int
    ends_in_tail: bool
    first_tokens: tuple[int, ...]
    created_ns: int
    lane: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The prefix tree of a store, depth first.

    Args:
        path: The store's folder.
        num_pages: Different pages of all groups.
        num_runs: Runs that there are.
        runs: Runs that are listed: all, or as many as were asked for.
    """

    path: str
    num_pages: int
    num_runs: int
    runs: tuple[PageRun, ...]


def list_runs(
    path: str | os.PathLike[str], *, single: bool = False, limit: int | None = None
) -> Listing:
    """The pages of the store at ``path`` as a prefix tree.

    Args:
        path: The store's folder.
        single: Let every page be a run of its own.
        limit: How many runs to list.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
        ValueError: ``limit`` is negative.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"the limit is {limit}: it must be 0 or more")
    place, _, groups = read_store(path)
    runs: list[PageRun] = []
    num_runs = num_pages = 0
    for pages in groups:
        tree = PrefixTree(pages)
        num_pages += len(tree.first)
        for run in _runs(tree, single=single):
            num_runs += 1
            if limit is None or num_runs <= limit:
                runs.append(run)
    return Listing(path=str(place), num_pages=num_pages, num_runs=num_runs, runs=tuple(runs))


def _runs(tree: PrefixTree, *, single: bool) -> Iterator[PageRun]:
    """All runs, depth first; what is older comes first."""
    pages = tree.pages
    work = [(at, start, 0, 0, 0) for at, start in tree.starts.items()]
    work.sort(key=lambda item: tree.age(item[0]), reverse=True)
    while work:
        at, start, level, depth, start_token = work.pop()
        run = [at]
        after = tree.children.get(at, [])
        while len(after) == 1 and not single:
            run.append(after[0])
            after = tree.children.get(run[-1], [])
        num_tokens = int(pages.num_tokens[run].sum())
        yield _run(tree, run, start, level, depth, start_token, num_tokens)
        inner = (level + (len(after) > 1), depth + len(run), start_token + num_tokens)
        after = sorted(after, key=tree.age, reverse=True)
        work += [(child, Start.AFTER, *inner) for child in after]


def _run(
    tree: PrefixTree,
    run: list[int],
    start: Start,
    level: int,
    depth: int,
    token: int,
    num_tokens: int,
) -> PageRun:
    pages, first, last = tree.pages, run[0], run[-1]
    parent = pages.parents[first]
    has_tokens = bool(pages.flags[first] & HAS_TOKENS)
    count = int(pages.num_tokens[first]) if has_tokens else 0
    return PageRun(
        group=pages.group,
        level=level,
        start=start,
        parent=None if parent is None else PageKey(parent),
        first_key=PageKey(pages.keys[first]),
        last_key=PageKey(pages.keys[last]),
        depth=depth,
        num_pages=len(run),
        start_token=token,
        num_tokens=num_tokens,
        ends_in_tail=bool(pages.flags[last] & IS_TAIL),
        first_tokens=tuple(pages.tokens[first, :count].tolist()),
        created_ns=int(pages.created_ns[first]),
        lane=int(pages.lanes[first]),
        row=int(pages.rows[first]),
    )
