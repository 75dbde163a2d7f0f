"""``replay_recorded``: a recorded trace through a real cache whose pages are tiny.

Each page of the recorded cache has three tokens here: 0, 0 and its number; one that was not full
has two, or one if it was cut and not written again. Block tables, ranking and eviction are the
cache's own. So the same policy at the same size gives the same hits, as long as one thread at a
time used the cache, it was fresh when the recording began, and equal prompts had equal bytes.

At another size, or under another policy, callers are taken to act on what ``match`` says there:
they read the pages that it finds, and put the others.
"""

import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.admission import AdmissionPolicy, make_admission
from pagedkv.cache import PagedKVCache
from pagedkv.errors import PagedKVError, TraceError
from pagedkv.policy import EvictionPolicy
from pagedkv.prefix import PageKeys, Tokens, chain_key
from pagedkv.recorded import Operation, Recorded
from pagedkv.sequence import Sequence as CacheSequence
from pagedkv.spec import KVSpec, PageKey
from pagedkv.store import PageStore
from pagedkv.trace_lines import Progress

_EVERY = 1024
_MOST_MATCHES = 64
_TINY_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCounts:
    """What the replay counted; the names are those of ``CacheStats``.

    Args:
        requested: Pages of each prompt that was opened, matched, acquired or read ``(request,)``.
        hits: Those that were found until the next prompt ``(request,)``.
        store_hits: Those of them that were on disk only ``(request,)``.
        num_pool_hits: As in ``CacheStats``; so are those that follow.
    """

    requested: tuple[int, ...]
    hits: tuple[int, ...]
    store_hits: tuple[int, ...]
    num_pool_hits: int
    num_store_hits: int
    num_misses: int
    num_pages_stored: int
    num_pages_loaded: int


def replay_recorded(
    recorded: Recorded,
    policy: EvictionPolicy,
    num_slots: Sequence[int] | None = None,
    *,
    admission: AdmissionPolicy | None = None,
    progress: Progress | None = None,
) -> ReplayCounts:
    """Do again what was recorded, perhaps under another policy or at another size.

    Where the recorded cache had a store, this one has an unbounded one in a temporary folder.

    Args:
        recorded: What was done.
        policy: A fresh policy.
        num_slots: Slots of each layer group; those of the recorded cache by default.
        admission: A fresh admission policy; one of the recorded name by default.
        progress: Is told how many operations of how many have been done.

    Returns:
        What the cache counted from where the recording began.

    Raises:
        ValueError: There are not as many numbers of slots as layer groups, or there is no admission
            policy of the recorded name.
        TraceError: The operations contradict each other.
    """
    slots = recorded.num_slots if num_slots is None else tuple(num_slots)
    if len(slots) != len(recorded.num_slots):
        raise ValueError(f"{len(slots)} numbers of slots for {len(recorded.num_slots)} groups")
    if admission is None and recorded.uses_admission:
        admission = make_admission(recorded.admission)
    specs = [_tiny_spec(number) for number in range(len(slots))]
    with ExitStack() as stack:
        store = None
        if recorded.has_store:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pagedkv-replay-"))
            store = PageStore.open(f"{folder}/cache.zarr", specs)
        cache = stack.enter_context(
            PagedKVCache(
                specs,
                slots,
                store,
                policy,
                write_policy="write-through" if recorded.writes_through else "on-evict",
                admission=admission,
                token_match=False,  # its tokens are made up; what was taken over is recorded
            )
        )
        replay = _Replay(recorded, cache)
        total = len(recorded.operations)
        for number, operation in enumerate(recorded.operations):
            if progress is not None and number % _EVERY == 0:
                progress(number, total)
            try:
                replay.do(operation)
            except TraceError:
                raise
            except PagedKVError:
                pass  # the recorded cache may have raised it too
            replay.attribute_hits()
        if progress is not None:
            progress(total, total)
        return replay.counted()


def _tiny_spec(number: int) -> KVSpec:
    return KVSpec(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        page_tokens=_TINY_TOKENS,
        num_kinds=1,
        dtype="float16",
        model="replay",
        group=str(number),
    )


@dataclass(slots=True)
class _Match:
    """What a caller asked for, how much of it there was when it was recorded, and is here."""

    group: int
    pages: tuple[int, ...]
    keys: Sequence[PageKey]
    was_held: int = 0
    num_held: int = 0
    is_followed: bool = False

    def is_of(self, group: int, pages: Sequence[int]) -> bool:
        """Whether it asked for exactly these pages."""
        return self.group == group and self.pages == tuple(pages)

    def covers(self, op: str, group: int, pages: Sequence[int]) -> bool:
        """Whether somebody reads its first pages, or puts its last ones."""
        if self.group != group or not pages or op in ("match", "held"):
            return False
        count = len(pages)
        own = self.pages[-count:] if op == "put" else self.pages[:count]
        return own == tuple(pages)


class _Replay:
    """Does the operations one after another."""

    def __init__(self, recorded: Recorded, cache: PagedKVCache) -> None:
        self._source = recorded.source
        self._page_tokens = recorded.page_tokens
        self._cache = cache
        self._parents = _parents(recorded)
        self._keys: list[dict[int, PageKey]] = [{} for _ in cache.specs]
        self._sequences: dict[int, tuple[CacheSequence, list[int]]] = {}
        self._uses: dict[int, AbstractContextManager[Any]] = {}
        self._matches: deque[_Match] = deque(maxlen=_MOST_MATCHES)
        self._before = self._last = cache.stats()
        self._requests: list[list[int]] = []

    def do(self, operation: Operation) -> None:
        """Do one operation."""
        op = operation["op"]
        if op in ("put", "get", "match", "acquire", "held"):
            self._by_key(op, operation)
        elif op == "release":
            use = self._uses.pop(operation["use"], None)
            if use is not None:
                use.__exit__(None, None, None)
        elif op == "open":
            self._count(operation["pages"])
            sequence = self._cache.open_sequence(_tokens(operation["pages"]))
            self._sequences[operation["sequence"]] = sequence, list(operation["pages"])
        elif op == "flush":
            self._cache.flush()
        elif op == "begin":
            self._before = self._last = self._cache.stats()
            self._requests.clear()
        elif operation["sequence"] in self._sequences:  # else it could not be opened
            with suppress(ValueError):  # it may hold less than there, or not equally much of all
                self._of_sequence(op, operation)

    def attribute_hits(self) -> None:
        """Count what the last operation hit for the last prompt."""
        stats, before = self._cache.stats(), self._last
        if self._requests:
            stored = stats.num_store_hits - before.num_store_hits
            self._requests[-1][1] += stats.num_pool_hits - before.num_pool_hits + stored
            self._requests[-1][2] += stored
        self._last = stats

    def counted(self) -> ReplayCounts:
        """What was counted since the recording began; then all is closed."""
        stats, before = self._cache.stats(), self._before
        for use in self._uses.values():
            use.__exit__(None, None, None)
        return ReplayCounts(
            requested=tuple(one[0] for one in self._requests),
            hits=tuple(one[1] for one in self._requests),
            store_hits=tuple(one[2] for one in self._requests),
            num_pool_hits=stats.num_pool_hits - before.num_pool_hits,
            num_store_hits=stats.num_store_hits - before.num_store_hits,
            num_misses=stats.num_misses - before.num_misses,
            num_pages_stored=stats.num_pages_stored - before.num_pages_stored,
            num_pages_loaded=stats.num_pages_loaded - before.num_pages_loaded,
        )

    def _by_key(self, op: str, operation: Operation) -> None:
        group, pages = operation["group"], operation["pages"]
        keys = self._keys_of(group, pages, is_chained=operation.get("chained", True))
        found = next((one for one in reversed(self._matches) if one.covers(op, group, pages)), None)
        if op == "match":
            is_again = bool(self._matches) and self._matches[-1].is_of(group, pages)
            match = self._matches.pop() if is_again else _Match(group, tuple(pages), keys)
            match.was_held, match.num_held = operation["held"], self._cache.match(keys, group)
            self._matches.append(match)
        elif op == "held":
            self._put(keys, group)
        elif found is not None:
            self._follow(found, op, operation)
        elif op == "put":
            self._put(keys, group)
        else:
            self._count(pages)
            self._read(op, keys, operation)

    def _follow(self, match: _Match, op: str, operation: Operation) -> None:
        """Do what a caller does who was told what is held here, not what was held there."""
        group, held = match.group, match.keys[: match.num_held]
        if not match.is_followed:
            self._count(match.pages)
        if op == "put":
            if not match.is_followed and match.num_held:
                self._cache.get(held, group=group)
            self._put(match.keys[match.num_held :], group)
        elif op == "get":
            self._read(op, held, operation)
        else:
            most = max(match.num_held, len(operation["pages"]))
            self._read(op, match.keys[:most], operation)
        if not match.is_followed and match.was_held == len(match.pages) > match.num_held:
            self._put(match.keys[match.num_held :], group)  # there it was not needed
        match.is_followed = True

    def _read(self, op: str, keys: Sequence[PageKey], operation: Operation) -> None:
        if op == "get":
            self._cache.get(keys, group=operation["group"])
        else:
            use = self._cache.acquire(keys, operation["group"])
            use.__enter__()
            self._uses[operation["use"]] = use

    def _put(self, keys: Sequence[PageKey], group: int) -> None:
        shape = (len(keys), *self._cache.specs[group].page_shape)
        self._cache.put(keys, np.zeros(shape, np.float16), group)

    def _count(self, pages: Sequence[int]) -> None:
        self._requests.append([len(pages), 0, 0])

    def _keys_of(self, group: int, pages: Sequence[int], *, is_chained: bool) -> Sequence[PageKey]:
        keys = tuple(self._key(group, page) for page in pages)
        if not is_chained or any(page not in self._parents for page in pages):
            return keys
        return PageKeys(
            spec=self._cache.specs[group],
            keys=keys,
            parents=tuple(self._parent_key(group, page) for page in pages),
            tokens=_tokens(pages).reshape(-1, _TINY_TOKENS),
        )

    def _of_sequence(self, op: str, operation: Operation) -> None:
        sequence, pages = self._sequences[operation["sequence"]]
        if op == "append":
            group, target = operation.get("group"), self._tiny(operation["tokens"], 2)
            if target % _TINY_TOKENS and sequence.layer_tokens(group or 0) == target:
                sequence.truncate(target - 1)  # so that the page is written again, maybe copied
            self._append(sequence, target, group)
        elif op == "commit":
            pages[operation["start"] :] = operation["pages"]
            self._append(sequence, _TINY_TOKENS * len(pages), None)
            sequence.commit(_tokens(pages))
        elif op == "truncate":
            sequence.truncate(min(self._tiny(operation["tokens"], 1), sequence.num_tokens))
            del pages[operation["tokens"] // self._page_tokens :]
        elif op == "drop":
            sequence.drop_before(min(self._tiny(operation["tokens"], 0), sequence.num_tokens))
        elif op == "fork":
            self._sequences[operation["child"]] = sequence.fork(), list(pages)
        elif op == "save":
            sequence.save()
        else:
            del self._sequences[operation["sequence"]]
            sequence.close()

    def _append(self, sequence: CacheSequence, num_tokens: int, group: int | None) -> None:
        """Make a sequence hold so many tokens, in one group or in all; a layer is a group here."""
        for layer in range(self._cache.num_layers) if group is None else (group,):
            count = num_tokens - sequence.layer_tokens(layer)
            if count > 0:
                sequence.append_layer(layer, np.zeros((count, 1, 1), np.float16))

    def _tiny(self, num_tokens: int, partial: int) -> int:
        """How many tokens that is here, ``partial`` of them in a page that is not full."""
        full, rest = divmod(num_tokens, self._page_tokens)
        return _TINY_TOKENS * full + (partial if rest else 0)

    def _parent_key(self, group: int, page: int) -> PageKey:
        parent = self._parents[page]
        if parent is None:
            return self._cache.specs[group].root_key()
        return self._key(group, parent)

    def _key(self, group: int, page: int) -> PageKey:
        """The key of a page: that of a sequence's page where prefixes of it are known."""
        keys = self._keys[group]
        path: dict[int, None] = {}
        at: int | None = page
        while at is not None and at not in keys and at in self._parents:
            if at in path:
                raise TraceError(
                    f"{self._source}: page {at} comes before itself, by its parents; a page has "
                    "one parent, which comes before it"
                )
            path[at] = None
            at = self._parents[at]
        if at is not None and at not in keys:  # opaque, or behind such a page
            keys[at] = PageKey(at.to_bytes(32, "little"))
        for number in reversed(path):
            keys[number] = chain_key(self._parent_key(group, number), _tokens([number]))
        return keys[page]


def _tokens(pages: Sequence[int]) -> Tokens:
    tokens = np.zeros((len(pages), _TINY_TOKENS), np.int32)
    tokens[:, -1] = pages
    return tokens.reshape(-1)


def _parents(recorded: Recorded) -> dict[int, int | None]:
    """The page before each page, None before the first of a prompt; of those that have one."""
    parents: dict[int, int | None] = {}
    tables: dict[int, list[int]] = {}
    for operation in recorded.operations:
        op, pages = operation["op"], operation.get("pages", ())
        before: int | None = None
        if op in ("put", "get", "match", "acquire", "held"):
            if not operation.get("chained", True):
                continue
            before = operation.get("parent")
        elif op == "open":
            tables[operation["sequence"]] = [*pages]
        elif op == "commit":
            table = tables[operation["sequence"]]
            start = operation["start"]
            if start > len(table):
                raise TraceError(
                    f"{recorded.source}: sequence {operation['sequence']} has {len(table)} pages "
                    f"with names, and its 'commit' starts at page {start}"
                )
            before = table[start - 1] if start else None
            table[start:] = pages
        elif op == "fork":
            tables[operation["child"]] = list(tables[operation["sequence"]])
        for page in pages:
            parents.setdefault(page, before)
            before = page
    return parents
