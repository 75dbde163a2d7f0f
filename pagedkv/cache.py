"""``PagedKVCache``: pages in a pool, and below it a store, shared by sequences and by key."""

import copy
import logging
import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from pagedkv import owners
from pagedkv.admission import AdmissionPolicy, AdmitAll, check_admission
from pagedkv.arrays import as_int, check_pages
from pagedkv.errors import ClosedError, SpecMismatchError, StoreFullError
from pagedkv.explain import Prompt
from pagedkv.explanation import Explanation
from pagedkv.group import LayerGroup
from pagedkv.live_explain import explain_live
from pagedkv.loading import Loader, LoadHandle
from pagedkv.lock import CacheLock
from pagedkv.moves import Mover
from pagedkv.page import Page
from pagedkv.policies.lru import LRU
from pagedkv.policy import EvictionPolicy, check_policy
from pagedkv.pool import SlotPool
from pagedkv.prefix import Extra, PageKeys, as_tokens, check_salt, extra_per_page, page_keys
from pagedkv.recording import Recording
from pagedkv.residency import Residency
from pagedkv.retention import Retention
from pagedkv.room import Room
from pagedkv.sequence import Sequence
from pagedkv.spec import KVSpec, PageKey
from pagedkv.stats import CacheStats, Counters
from pagedkv.store import PageStore

Array = npt.NDArray[Any]

logger = logging.getLogger("pagedkv")


class _Forks:
    """Counts the forks between the first process and this one: quicker than asking for its id."""

    def __init__(self) -> None:
        self.count = 0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._add)

    def _add(self) -> None:
        self.count += 1


_forks = _Forks()


class PagedKVCache:
    """A KV cache of fixed memory: a pool of pages, and below it, optionally, a store on disk.

    Thread-safe; a ``Sequence`` of it has one owner at a time. In a process that was forked from
    this one every call raises ``ClosedError``.

    Args:
        spec: Geometry and model; a sequence of specs for a model whose layers differ. They share
            ``model`` and ``page_tokens``, and differ in ``group``.
        num_slots: Pages that the pool holds; one number for each spec, or one for all.
        store: Where cold pages go. The cache takes it over: ``close`` closes it too.
        policy: Which page leaves first, ``LRU()`` by default. Each spec takes a copy of it.
        write_policy: ``"on-evict"``: a page is written when it leaves the pool or at ``flush``;
            ``"write-through"``: as soon as it has a key.
        token_match: Whether ``open_sequence`` finds prefixes that end inside a page. False finds
            full pages, and saved tails as they were saved: to compare, or for an engine that can
            only begin where a page does.
        admission: Which pages that leave the pool are written to the store, ``AdmitAll()`` by
            default; ``flush`` and ``close`` write all that is in the pool. Each spec takes a copy.
        pool_path: File to map the pool on; it must not exist. With several specs, the group's
            name is appended.

    Raises:
        ValueError: A number is out of range, the specs do not fit together, or the policy is used.
        TypeError: Something is of another type, a class or a name in place of an object, say.
        SpecMismatchError: The store holds other specs.
        StoreLockedError: Another cache has taken the store over.
        FileExistsError: ``pool_path`` exists.
    """

    def __init__(
        self,
        spec: KVSpec | Seq[KVSpec],
        num_slots: int | Seq[int],
        store: PageStore | None = None,
        policy: EvictionPolicy | None = None,
        *,
        write_policy: Literal["on-evict", "write-through"] = "on-evict",
        token_match: bool = True,
        admission: AdmissionPolicy | None = None,
        pool_path: str | Path | None = None,
    ) -> None:
        self.specs = _checked_specs(spec)
        counts = _checked_counts(num_slots, len(self.specs))
        _check_store(store, self.specs)
        if write_policy not in ("on-evict", "write-through"):
            raise ValueError(
                f"write_policy is {write_policy!r}: it must be 'on-evict' or 'write-through'"
            )
        admitting = _checked_admission(admission, write_policy)
        ranking = LRU() if policy is None else policy
        check_policy(ranking)
        if len(ranking):
            raise ValueError("policy ranks the pages of another cache already: give a fresh one")
        self.store = store
        self.writes_through = write_policy == "write-through"
        self._token_match = token_match
        self.needs_finite = store is not None and not store.codec.lossless
        self._lock = CacheLock()
        self._counters = Counters()
        self._groups = [
            LayerGroup(
                Room(
                    Mover(
                        number,
                        Residency(
                            spec=group_spec,
                            pool=SlotPool(
                                group_spec,
                                counts[number],
                                _pool_path(pool_path, self.specs, number),
                            ),
                            policy=copy.deepcopy(ranking),
                            lock=self._lock,
                            counters=self._counters,
                        ),
                        store,
                        copy.deepcopy(admitting),
                    )
                )
            )
            for number, group_spec in enumerate(self.specs)
        ]
        self._layers = [
            (number, local)
            for number, group_spec in enumerate(self.specs)
            for local in range(group_spec.held_layers)
        ]
        self._sequences: set[Sequence] = set()
        self._loader = Loader()
        self._pid = os.getpid()
        self._num_forks = _forks.count
        self.is_closed = False
        self._recording: Recording | None = None
        self._policy_name, self._admission_name = ranking.name, admitting.name
        if store is not None:
            owners.take_over(store, self)

    # -- sizes -------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Layers of all specs together."""
        return len(self._layers)

    @property
    def num_slots(self) -> int:
        """Slots of all pools together."""
        return sum(group.places.pool.num_slots for group in self._groups)

    def locate_layer(self, layer: int) -> tuple[int, int]:
        """The layer's spec and its number within it; ``ValueError`` if there is no such layer."""
        layer = as_int("layer", layer)
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer is {layer}: the cache has layers 0..{len(self._layers) - 1}")
        return self._layers[layer]

    # -- pages by key ------------------------------------------------------------------------

    def put(self, keys: Seq[PageKey], pages: Array, group: int | None = None) -> None:
        """Add pages under their keys; the first bytes under a key win.

        More pages than slots are fine: they stream through the pool into the store, or, without
        one, the last ones stay.

        Args:
            keys: A ``PageKeys``, or plain 32-byte keys (opaque: stored without tokens).
            pages: ``(page, layer, kind, token, head, channel)`` in the spec's dtype.
            group: Number of the spec; only needed for plain keys and several specs.

        Raises:
            ValueError: A shape, dtype or key does not fit, or a number is NaN or infinite and
                the store's codec cannot hold it.
            PoolExhaustedError: All slots are pinned.
            StoreError: A page that had to leave could not be written.
        """
        layer_group = self._group_of(keys, group)
        if self.needs_finite or not layer_group.fits(pages, len(keys)):
            check_pages("pages", pages, len(keys), layer_group.spec, finite=self.needs_finite)
        if self._recording is not None:
            self._recording.put(keys, layer_group.moves.number)
        layer_group.keyed.put(keys, pages, write_through=self.writes_through)

    def match(self, keys: Seq[PageKey], group: int | None = None) -> int:
        """Length of the longest leading run of ``keys`` that any tier holds.

        Advisory: the pages may be gone by the next call; ``acquire`` and ``open_sequence`` keep
        them.
        """
        layer_group = self._group_of(keys, group)
        num_held = layer_group.keyed.match(keys)
        if self._recording is not None:
            self._recording.match(keys, layer_group.moves.number, num_held)
        return num_held

    def get(self, keys: Seq[PageKey], out: Array | None = None, group: int | None = None) -> Array:
        """Copy pages out of the cache.

        Args:
            keys: Which.
            out: Where to, ``(page, layer, kind, token, head, channel)``; fresh by default. What
                it holds after an error is undefined.
            group: Number of the spec; only needed for plain keys and several specs.

        Returns:
            ``out``.

        Raises:
            PageNotFoundError: A page is in no tier, or damaged; the first such key is named.
            StoreError: The disk failed.
        """
        layer_group = self._group_of(keys, group)
        out = _checked_out(out, len(keys), layer_group)
        if self._recording is not None:
            self._recording.get(keys, layer_group.moves.number)
        layer_group.keyed.get(keys, out)
        return out

    def load(
        self,
        keys: Seq[PageKey],
        out: Array | None = None,
        group: int | None = None,
        deadline: float | None = None,
    ) -> LoadHandle:
        """``get`` in the background.

        Args:
            keys: Which pages.
            out: As for ``get``; written only when all pages are there, never after the handle's
                ``cancel`` succeeded or its deadline has passed.
            group: Number of the spec; only needed for plain keys and several specs.
            deadline: Seconds from now after which ``result`` raises ``StoreTimeoutError``.
        """
        layer_group = self._group_of(keys, group)
        out = _checked_out(out, len(keys), layer_group)
        started = time.monotonic()

        def read() -> Array:
            self.check_usable()
            if self._recording is not None:
                self._recording.get(keys, layer_group.moves.number)
            pages = np.empty((len(keys), *layer_group.page_shape), dtype=layer_group.dtype)
            ends = None if deadline is None else started + deadline
            left = None if ends is None else max(0.0, ends - time.monotonic())
            layer_group.keyed.get(keys, pages, left)
            return pages

        return self._loader.start(read, out, deadline)

    @contextmanager
    def acquire(self, keys: Seq[PageKey], group: int | None = None) -> Iterator[list[Array]]:
        """Pin the longest leading run of ``keys`` that any tier holds, inside the block.

        Yields:
            A read-only, zero-copy view ``(layer, kind, token, head, channel)`` of each page of
            the run; valid inside the ``with`` block only.

        Raises:
            PoolExhaustedError: The run does not fit into the pool beside what is pinned; nothing
                is pinned. Acquire fewer keys.
        """
        layer_group = self._group_of(keys, group)
        recording = self._recording
        use = None if recording is None else recording.acquire(keys, layer_group.moves.number)
        pages = layer_group.keyed.acquire(keys)
        try:
            yield [layer_group.keyed.readonly_view(page) for page in pages]
        finally:
            if recording is not None and use is not None:
                recording.release(use)
            layer_group.keyed.release_pins(pages)

    def retain(
        self,
        keys: Seq[PageKey],
        priority: int = 1,
        ttl: float | None = None,
        group: int | None = None,
    ) -> int:
        """Let pages leave the pool later than others, until they leave it all the same.

        Args:
            keys: The pages of a prompt from its first one on; of them the leading run that is in
                the pool is retained.
            priority: From 1: pages of a lower priority leave first; pages without retention have
                0, which ends it. A page keeps the highest that was asked for.
            ttl: Seconds after the last use until they count as all others again; None for ever.
            group: Number of the spec; only needed for plain keys and several specs.

        Returns:
            How many pages that are.

        Raises:
            ValueError: A number is out of range.
        """
        retention = Retention(priority, ttl)
        return self._group_of(keys, group).keyed.retain(keys, retention)

    # -- sequences ---------------------------------------------------------------------------

    def open_sequence(
        self, tokens: npt.ArrayLike = (), salt: bytes = b"", extra: Extra = None
    ) -> Sequence:
        """A new sequence that begins with the longest cached prefix of ``tokens``.

        Full pages are shared. Of the pages and saved tails that follow the last of them, the one
        that shares most leading tokens with the rest of ``tokens`` gives these: they are copied
        into a page of the sequence's own. The result's ``num_tokens`` says how many tokens were
        found, which need not be full pages: append the others.

        Args:
            tokens: Ids of the prompt.
            salt: The tenant's; it goes into every key.
            extra: What the KV depends on beside the tokens (LoRA, image hashes): one value for
                all pages, or one for each.

        Raises:
            ValueError: ``tokens`` are no token ids, or ``extra`` does not cover their pages.
        """
        self.check_usable()
        ids = as_tokens(tokens)
        check_salt(salt)
        extras = extra_per_page(extra, len(ids) // self.specs[0].page_tokens)
        keys = [page_keys(spec, ids, salt, extras) for spec in self.specs]
        sequence = Sequence(self, self._groups, salt, extra)
        if self._recording is not None:
            self._recording.open(sequence, keys[0])
        tables: list[list[Page]] = [[] for _ in self._groups]
        try:
            for group, table, group_keys in zip(self._groups, tables, keys, strict=True):
                table.extend(group.hold(group_keys))
            common = min(len(table) for table in tables)
            for group, table in zip(self._groups, tables, strict=True):
                group.release(table[common:])
                del table[common:]
            sequence.start_from(ids, keys, tables)
            self.adopt(sequence)
            sequence.go_on_inside(ids, whole=not self._token_match, refresh=common == len(keys[0]))
            if self._recording is not None:
                self._recording.append(sequence, sequence.num_tokens)
        except BaseException:
            self.forget(sequence)
            if self._recording is not None:
                self._recording.close_sequence(sequence)
            for group, table in zip(self._groups, tables, strict=True):
                group.release(table)
            raise
        return sequence

    def explain(self, tokens: npt.ArrayLike, salt: bytes = b"", extra: Extra = None) -> Explanation:
        """Why ``open_sequence`` finds as many of a prompt's full pages as it does, and no more.

        Changes nothing, and counts as no use. Where the pool does not explain all, the store's
        catalogues are read anew and its pages of the prompt are verified: it may take seconds.
        Pages under another salt or extra are "never written" here; ``pagedkv explain`` tells the
        store's owner of them.

        Args:
            tokens: Ids of the prompt.
            salt: The tenant's.
            extra: As for ``open_sequence``.

        Raises:
            ValueError: ``tokens`` are no token ids, or ``extra`` does not cover their pages.
            StoreError: The store cannot be read.
        """
        self.check_usable()
        ids = as_tokens(tokens)
        prompts = [Prompt.of(spec, ids, salt, extra) for spec in self.specs]
        return explain_live(self._groups, prompts, None if self.store is None else self.store.path)

    def adopt(self, sequence: Sequence) -> None:
        """Count a sequence among the live ones."""
        with self._lock:
            self._sequences.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Count a sequence no longer among the live ones."""
        with self._lock:
            self._sequences.discard(sequence)

    def pages_in_use(self) -> set[tuple[int, PageKey]]:
        """Group and key of the pages that live sequences hold: the store may not give them up."""
        with self._lock:
            return {
                (number, key)
                for number, group in enumerate(self._groups)
                for key, page in group.places.index.items()
                if page.ref_count  # whether it is stored or about to be
            }

    # -- the whole ---------------------------------------------------------------------------

    def flush(self) -> None:
        """Write every page that has a key to the store; durable when it returns.

        Without a store, or with one that is read-only, there is nothing to do.

        Raises:
            StoreError: Some pages could not be written; they are still in the pool. Or the thread
                that writes evicted pages had failed before, and nobody was told: then all pages
                have been written by now.
        """
        self.check_usable()
        if self._recording is not None:
            self._recording.flush()
        for group in self._groups:
            group.flush()
        untold = [group.take_untold_error() for group in self._groups]
        for error in untold:
            if error is not None:
                raise error

    def stats(self) -> CacheStats:
        """The counters so far, and the sizes now."""
        self.check_usable()
        pools = [group.places.pool for group in self._groups]
        with self._lock:
            return CacheStats(
                **self._counters.snapshot(),
                num_slots=sum(pool.num_slots for pool in pools),
                num_free_slots=sum(pool.num_free for pool in pools),
                num_pinned_slots=sum(pool.num_pinned for pool in pools),
                num_pages_held=sum(group.places.num_held for group in self._groups),
                pool_nbytes=sum(pool.nbytes for pool in pools),
                store_nbytes=0 if self.store is None else self.store.nbytes,
            )

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Write from now on which pages are asked for, and what else decides which of them leave.

        ``pagedkv simulate`` replays the file, with this policy and size or with others. It holds no
        tokens and no keys (docs/traces.md). What the cache holds already is its beginning.

        Args:
            path: A new file.

        Returns:
            The recording: close it, or use it in a ``with`` statement. The cache's ``close`` ends
            it too.

        Raises:
            FileExistsError: There is such a file: it is kept.
            ValueError: A recording is under way.
            OSError: The file cannot be made.
        """
        self.check_usable()
        if self._recording is not None and not self._recording.is_closed:
            raise ValueError(
                f"the cache is recorded to {self._recording.path} already: close that recording"
            )
        recording = Recording(
            path,
            {
                "policy": self._policy_name,
                "page_tokens": self.specs[0].page_tokens,
                "page_nbytes": sum(spec.page_nbytes for spec in self.specs),
                "num_slots": [group.places.pool.num_slots for group in self._groups],
                "has_store": self.store is not None and not self.store.read_only,
                "admission": self._admission_name,
                "write_policy": "write-through" if self.writes_through else "on-evict",
            },
        )
        with self._lock:
            for number, group in enumerate(self._groups):
                for key, parent in group.places.candidates():
                    recording.held(key, parent, number)
            earlier: list[Sequence] = []
            for sequence in self._sequences:
                sequence.record(recording, earlier)
                earlier.append(sequence)
            recording.begin()
            self._recording = recording
        return recording

    @property
    def recording(self) -> Recording | None:
        """Where operations are recorded, if they are."""
        return self._recording

    def close(self) -> None:
        """Flush, then close the sequences and the store. A second call does nothing.

        Cached pages for which the store's bound leaves no room are forgotten, and logged.

        Raises:
            StoreError: Some pages could not be written. The cache is still open: mend the cause
                and close it again, or drop it.
        """
        if self.is_closed:
            return
        self.check_usable()
        for group in self._groups:
            try:
                group.flush()
            except StoreFullError as error:
                logger.warning("the store is full, forgetting cached pages: %s", error)
            earlier = group.take_untold_error()
            if earlier is not None:
                logger.warning("evicted pages could not be written at first: %s", earlier)
        self.is_closed = True
        if self._recording is not None:
            with suppress(OSError):  # it was logged
                self._recording.close()
        try:
            self._loader.close()
            with self._lock:
                for group in self._groups:
                    group.room.writer.close()
            for group in self._groups:
                group.room.writer.join()
            for sequence in list(self._sequences):
                sequence.close()
            for group in self._groups:
                group.moves.close()
        finally:
            if self.store is not None:
                self.store.close()
                owners.let_go(self.store)

    @property
    def is_of_parent(self) -> bool:
        """Whether it was made in the process that forked this one."""
        return self._num_forks != _forks.count

    def check_usable(self) -> None:
        """Raise ``ClosedError`` if the cache is closed, or belongs to the parent process."""
        if self.is_closed:
            raise ClosedError("the cache is closed: make another")
        if self._num_forks != _forks.count:
            raise ClosedError(
                f"the cache belongs to process {self._pid} and cannot be used after a fork in "
                f"process {os.getpid()}: make another there"
            )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the bookkeeping contradicts itself; for tests."""
        with self._lock:
            for group in self._groups:
                group.places.check_invariants()
            for number, group in enumerate(self._groups):
                counts: dict[int, int] = {}
                for sequence in self._sequences:
                    for page in sequence.table(number):
                        counts[id(page)] = counts.get(id(page), 0) + 1
                        assert page.ref_count > 0
                assert group.places.num_held == len(counts)
                assert sum(counts.values()) == group.places.num_holders

    def __enter__(self) -> Self:
        self.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<PagedKVCache: closed>"
        return f"<PagedKVCache: {self.num_slots} slots, store {self.store!r}>"

    # -- inside ------------------------------------------------------------------------------

    def _group_of(self, keys: Seq[PageKey], group: int | None) -> LayerGroup:
        self.check_usable()
        if type(keys) is PageKeys:
            if keys.spec not in self.specs:
                self.specs[0].require_equal(keys.spec, "the PageKeys")
            return self._groups[self.specs.index(keys.spec)]
        _check_keys(keys)
        if group is None and len(self.specs) > 1:
            raise ValueError(f"plain keys belong to one of {len(self.specs)} specs: give group=")
        if group is not None and not 0 <= group < len(self.specs):
            raise ValueError(f"group is {group}: the cache has specs 0..{len(self.specs) - 1}")
        return self._groups[group or 0]


def _check_keys(keys: Seq[PageKey]) -> None:
    if len(keys) > 8 and {*map(type, keys)} == {bytes} and {*map(len, keys)} == {32}:
        return  # quicker, for many
    for key in keys:
        if not isinstance(key, bytes) or len(key) != 32:
            raise ValueError(f"{key!r} is no page key: a key is 32 bytes")


def _checked_out(out: Array | None, num_pages: int, group: LayerGroup) -> Array:
    if out is None:
        return np.empty((num_pages, *group.page_shape), dtype=group.dtype)
    if not group.fits(out, num_pages):
        check_pages("out", out, num_pages, group.spec, finite=False)
    if not out.flags.writeable:
        raise ValueError("out is read-only: give a writable array")
    return out


def _checked_specs(spec: KVSpec | Seq[KVSpec]) -> tuple[KVSpec, ...]:
    specs = (spec,) if isinstance(spec, KVSpec) else tuple(spec) if isinstance(spec, Seq) else ()
    if not specs or not all(isinstance(one, KVSpec) for one in specs):
        raise TypeError(f"spec is {spec!r}: give a KVSpec, or several")
    for what in ("model", "page_tokens"):
        if len({getattr(one, what) for one in specs}) > 1:
            raise ValueError(f"the specs differ in {what}: layer groups of one model share it")
    if len({one.group for one in specs}) < len(specs):
        raise ValueError(f"two specs have one group: {[one.group for one in specs]}")
    return specs


def _checked_counts(num_slots: int | Seq[int], num_specs: int) -> list[int]:
    if isinstance(num_slots, Seq):
        counts = [as_int("num_slots", count) for count in num_slots]
    else:
        counts = [as_int("num_slots", num_slots)] * num_specs
    if len(counts) != num_specs:
        raise ValueError(f"num_slots has {len(counts)} numbers for {num_specs} specs")
    return counts


def _checked_admission(admission: AdmissionPolicy | None, write_policy: str) -> AdmissionPolicy:
    if admission is None:
        return AdmitAll()
    check_admission(admission)
    if write_policy == "write-through":
        raise ValueError(
            "with write_policy 'write-through' every page is written before it can leave: leave "
            "admission out, or write on eviction"
        )
    return admission


def _check_store(store: PageStore | None, specs: tuple[KVSpec, ...]) -> None:
    if store is None:
        return
    if not isinstance(store, PageStore):
        raise TypeError(f"store is {store!r}: give a PageStore, from PageStore.open(path, spec)")
    if store.is_closed:
        raise ClosedError(f"the store at {store.path} is closed: open it again")
    if len(store.specs) != len(specs):
        raise SpecMismatchError(
            f"the store at {store.path} has {len(store.specs)} specs, the cache {len(specs)}"
        )
    for own, stored in zip(specs, store.specs, strict=True):
        own.require_equal(stored, f"the store at {store.path}")


def _pool_path(
    path: str | Path | None, specs: tuple[KVSpec, ...], number: int
) -> str | Path | None:
    if path is None or len(specs) == 1:
        return path
    return f"{path}.{specs[number].group}"
