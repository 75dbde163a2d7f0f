"""``Sequence``: the KV of one token sequence, as a block table over shared pages."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import takewhile
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from pagedkv import continuation, layer_scan, page_attention, slices
from pagedkv.arrays import as_int, check_kinds
from pagedkv.attention import attend
from pagedkv.attention_rule import AttentionRule, rule_of
from pagedkv.continuation import Part, Wish
from pagedkv.errors import ClosedError, StoreError
from pagedkv.format import PageEntry
from pagedkv.group import LayerGroup
from pagedkv.matrix_attention import MatrixAttention
from pagedkv.page import Page
from pagedkv.page_attention import PageAttention
from pagedkv.prefix import Extra, Tokens, as_tokens, chain_key, extra_of
from pagedkv.recording import Recording
from pagedkv.retention import Retention
from pagedkv.spec import PageKey

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache

Array = npt.NDArray[Any]
_FEW_QUERIES = 16
"""So many are attended in the pool by kernels; more, by matrix products over gathered pages."""
_nothing = nullcontext()


class Sequence:
    """The KV of one token sequence: a block table for each layer group.

    Made by ``PagedKVCache.open_sequence`` and ``fork``. A sequence has one owner at a time; its
    pages may be shared with others. Layers are numbered through the groups, in the order of the
    cache's specs. Close it, or use it in a ``with`` statement: until then its pages exist in some
    tier, and those without a key come back exactly. ``drop_before`` gives up the first ones before.
    """

    def __init__(
        self, cache: "PagedKVCache", groups: Seq[LayerGroup], salt: bytes, extra: Extra
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._salt = salt
        self._extra = extra
        self._tables: list[list[Page]] = [[] for _ in groups]  # from page _num_dropped on
        self._num_dropped = 0
        self._keys: list[list[PageKey]] = [[] for _ in groups]
        self._tokens: Tokens = np.empty(0, dtype=np.int32)
        self._filled = [0] * cache.num_layers
        self._spare: list[list[Array]] = [[] for _ in groups]  # buffers of gather
        self._staging = [layer_scan.Staging() for _ in groups]
        self._whereabouts = [layer_scan.Whereabouts() for _ in groups]
        self._retention: Retention | None = None
        self._is_closed = False
        self._page_tokens = groups[0].spec.page_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer holds; right after ``open_sequence`` those that were reused.

        Those that ``drop_before`` gave up are counted too: they keep their positions.
        """
        return min(self._filled)

    def layer_tokens(self, layer: int) -> int:
        """Tokens that one layer, numbered through the groups, holds."""
        self._cache.locate_layer(layer)
        return self._filled[layer]

    @property
    def num_dropped_tokens(self) -> int:
        """Leading tokens that ``drop_before`` gave up: a multiple of ``page_tokens``."""
        return self._num_dropped * self._page_tokens

    @property
    def tokens(self) -> Tokens:
        """Ids of the leading tokens that are known, int32: those given to ``commit``."""
        return self._tokens.copy()

    @property
    def num_pages(self) -> int:
        """Pages that are held, the tail included, summed over the layer groups."""
        return sum(len(table) for table in self._tables)

    def append(self, k: Any, v: Any = None, tokens: npt.ArrayLike | None = None) -> None:
        """Append tokens to all layers.

        Args:
            k: Keys, ``(layer, token, head, channel)`` in the spec's dtype; for a cache with
                several specs a sequence of such arrays, one for each.
            v: Values, likewise; left out where ``num_kinds`` is 1.
            tokens: Their ids; full pages are then committed.

        Raises:
            ValueError: A shape, dtype or number of tokens does not fit, or layers are uneven.
            PoolExhaustedError: There is no room for the tokens.
        """
        self._check_usable()
        self._check_even("append")
        several = len(self._groups) > 1
        keys = list(k) if several else [k]
        values = [None] * len(keys) if v is None else list(v) if several else [v]
        if len(keys) != len(self._groups) or len(values) != len(self._groups):
            raise ValueError(f"give {len(self._groups)} arrays of keys (and values), one a spec")
        parts = [
            check_kinds(
                pair, (group.spec.held_layers,), group.spec, finite=self._cache.needs_finite
            )
            for group, pair in zip(self._groups, zip(keys, values, strict=True), strict=True)
        ]
        count = parts[0][0].shape[1]
        if any(kinds[0].shape[1] != count for kinds in parts):
            raise ValueError("the specs' arrays hold different numbers of tokens")
        start = self.num_tokens
        known = None if tokens is None else self._extended(as_tokens(tokens), start, count)
        if count:
            with self._recorded(start + count):
                self._reserve_all(start, start + count)
            for number, kinds in enumerate(parts):
                for local in range(self._groups[number].spec.held_layers):
                    self._write(number, local, start, [values[local] for values in kinds])
            self._filled = [start + count] * len(self._filled)
        if known is not None:
            self.commit(known)

    def append_layer(self, layer: int, k: Array, v: Array | None = None) -> None:
        """Append tokens to one layer, as a model produces them; any number of them.

        More tokens than the pool holds are fine where the store can be written: what finds no
        slot goes to disk, a layer at a time.

        Args:
            layer: Layer, numbered through the groups.
            k: Keys, ``(token, head, channel)`` in the spec's dtype.
            v: Values, likewise; left out where ``num_kinds`` is 1.

        Raises:
            ValueError: A shape or dtype does not fit, or there is no such layer.
            PoolExhaustedError: There is no room for the tokens.
        """
        self._check_usable()
        number, local = self._cache.locate_layer(layer)
        spec = self._groups[number].spec
        kinds = check_kinds((k, v), (), spec, finite=self._cache.needs_finite)
        count = len(kinds[0])
        start = self._filled[layer]
        if count:
            with self._recorded(start + count, number):
                self._reserve(number, start, start + count)
            self._write(number, local, start, kinds)
            self._filled[layer] = start + count

    @contextmanager
    def gather(
        self, layer: int, num_tokens: int | None = None, start: int = 0
    ) -> Iterator[tuple[Array, ...]]:
        """Keys and values of one layer, each ``(token, head, channel)``, to be read only.

        Where all pages lie one behind the other in the pool they are views of it; else a
        staging buffer of one layer, into which pages on disk are read without taking slots.
        They are valid inside the ``with`` block.

        Args:
            layer: Layer, numbered through the groups.
            num_tokens: Only that many leading tokens; all that the layer holds by default.
            start: Of these, the tokens from this one on, ``num_tokens - start`` of them.

        Raises:
            ValueError: There is no such layer, it does not hold that many tokens, or some from
                ``start`` on were dropped.
            CorruptPageError: A page that is only on disk came back damaged.
        """
        self._check_usable()
        number, local = self._cache.locate_layer(layer)
        spec = self._groups[number].spec
        held = self._filled[layer]
        count = held if num_tokens is None else as_int("num_tokens", num_tokens)
        if not 0 <= count <= held:
            raise ValueError(f"layer {layer} holds {held} tokens, {count} were asked for")
        start = as_int("start", start)
        if not 0 <= start <= count:
            raise ValueError(f"start is {start}: it must be one of 0..{count}")
        if start < self.num_dropped_tokens:
            raise ValueError(
                f"start is {start}, but the first {self.num_dropped_tokens} tokens were dropped: "
                "start at num_dropped_tokens, or behind it"
            )
        if count == start:
            shape = (0, spec.held_heads, spec.head_dim)
            yield tuple(np.empty(shape, dtype=spec.np_dtype) for _ in range(spec.num_kinds))
            return
        first, skipped = divmod(start, self._page_tokens)
        pages = self._pages(number, first, count)
        wanted = slice(skipped, skipped + count - start)
        moves = self._groups[number].moves
        with slices.gather(moves, pages, local, self._spare[number]) as kinds:
            yield tuple(kinds[kind, wanted] for kind in range(spec.num_kinds))

    def attend(
        self,
        layer: int,
        q: Array,
        scale: float | None = None,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Array:
        """Causal attention of the layer's last tokens to all that it holds.

        Pages in the pool are attended where they are. Those that are only on disk are read into
        staging buffers of 16 MiB together, while others are attended, or attended where the store
        is mapped into memory; they take no slots.

        Args:
            layer: Layer, numbered through the groups; its keys and values are appended already.
            q: Queries of its last tokens, ``(token, q_head, channel)``; ``q_head`` is a multiple
                of the spec's heads.
            scale: Factor on the scores; ``1 / sqrt(channels)`` by default.
            window: So many tokens does a query see, itself included; all before it by default.
            soft_cap: Scores are capped to ``soft_cap * tanh(score / soft_cap)``; not by default.

        Returns:
            ``(token, q_head, channel)`` in the type of ``q``.

        Raises:
            ValueError: The shape of ``q`` does not fit, the spec has one kind only, a number is
                out of range, or a query would see tokens that were dropped.
            CorruptPageError: A page that is only on disk came back damaged.
            StoreError: The disk failed.
        """
        self._check_usable()
        rule = rule_of(scale, window, soft_cap)
        number, local = self._cache.locate_layer(layer)
        spec = self._groups[number].spec
        shape = np.shape(q)
        if spec.num_kinds != 2:
            raise ValueError("attend needs keys and values: this spec has num_kinds 1")
        fits = len(shape) == 3 and shape[1] > 0 and shape[2] == spec.head_dim
        if not fits or shape[1] % spec.held_heads:
            raise ValueError(
                f"q has shape {shape}: it must be (token, a multiple of {spec.held_heads} heads, "
                f"{spec.head_dim} channels)"
            )
        if not 0 < shape[0] <= self._filled[layer]:
            raise ValueError(
                f"q has {shape[0]} tokens, but layer {layer} holds {self._filled[layer]}: "
                "append their keys and values first"
            )
        seen = rule.first_seen(self._filled[layer] - shape[0])
        if seen < self.num_dropped_tokens:
            raise ValueError(
                f"the query at token {self._filled[layer] - shape[0]} sees all from token {seen} "
                f"on, but the first {self.num_dropped_tokens} tokens were dropped: give a window "
                "that leaves them out"
            )
        if not page_attention.is_supported():
            with self.gather(layer, start=seen) as (k, v):
                return attend(q, k, v, scale, window=window, soft_cap=soft_cap)
        if shape[0] > _FEW_QUERIES:
            return self._attend_many(layer, q, rule)
        moves = self._groups[number].moves
        attention = PageAttention(spec, q, self._filled[layer], rule, moves.record_layout)
        pages = self._pages(number, attention.first_page, self._filled[layer])
        known = self._whereabouts[number]
        layer_scan.attend(moves, pages, local, attention, self._staging[number], known)
        return attention.result()

    def commit(self, tokens: npt.ArrayLike) -> None:
        """Name the sequence's first tokens, so that its full pages can be found and shared.

        Args:
            tokens: Ids from the first token on; they may name fewer than the sequence holds.

        Raises:
            ValueError: More ids than tokens, or ids that contradict those named before.
        """
        self._check_usable()
        ids = as_tokens(tokens)
        if len(ids) > self.num_tokens:
            raise ValueError(
                f"{len(ids)} token ids were given, but the sequence holds {self.num_tokens} tokens"
            )
        common = min(len(ids), len(self._tokens))
        differ = np.flatnonzero(ids[:common] != self._tokens[:common])
        if len(differ):
            at = int(differ[0])
            raise ValueError(
                f"token {at} was named {self._tokens[at]} before and is {ids[at]} now: truncate "
                "the sequence, or open another"
            )
        num_full = len(ids) // self._page_tokens
        self._check_extra(num_full)
        if len(ids) > len(self._tokens):
            self._tokens = ids
        named = [self._name_pages(number, num_full) for number in range(len(self._groups))]
        if self._cache.recording is not None:
            self._cache.recording.commit(self, self._keys[0])
        for group, pages in zip(self._groups, named, strict=True):
            is_wanted = self._cache.writes_through
            group.store(pages if is_wanted else [page for page in pages if page.slot is None])
            group.shed_spill(pages)

    def save(self) -> None:
        """Store all pages durably, the tail too, so that the sequence resumes token-exact.

        Raises:
            ValueError: Some of its tokens have not been named by ``commit``, or were dropped.
            StoreError: There is no writable store, or it failed.
        """
        self._check_usable()
        self._check_even("save")
        if self._num_dropped:
            raise ValueError(
                f"the first {self.num_dropped_tokens} tokens were dropped, but a sequence resumes "
                "from its first token on: save before drop_before"
            )
        if len(self._tokens) != self.num_tokens:
            raise ValueError(
                f"{len(self._tokens)} of {self.num_tokens} tokens are named: commit them all "
                "before save"
            )
        store = self._cache.store
        if store is None or store.read_only:
            raise StoreError("save needs a store that can be written: open the cache with one")
        num_full, rest = divmod(self.num_tokens, self._page_tokens)
        self._check_extra(num_full + bool(rest))
        if self._cache.recording is not None:
            self._cache.recording.save(self)
        for number, group in enumerate(self._groups):
            num_pages = num_full + bool(rest)
            entries = [self._entry(number, at) for at in range(num_pages)]
            group.save_pages(self._tables[number][:num_pages], entries)

    def retain(self, priority: int = 1, ttl: float | None = None) -> None:
        """Let the pages leave the pool later than others, once the sequence is closed.

        While it is open they cannot be lost anyway. What pages with a key are retained for is the
        most that any sequence asked for; it ends when they leave the pool all the same. A fork
        takes it over.

        Args:
            priority: From 1: pages of a lower priority leave first; pages without retention have
                0, which ends it.
            ttl: Seconds after the last use until they count as all others again; None for ever.

        Raises:
            ValueError: A number is out of range.
        """
        self._check_usable()
        self._retention = Retention(priority, ttl)

    def fork(self) -> "Sequence":
        """A new sequence with the same tokens; pages are shared until one of the two writes.

        What was dropped is dropped in both.
        """
        self._check_usable()
        self._check_even("fork")
        child = Sequence(self._cache, self._groups, self._salt, self._extra)
        try:
            for number, group in enumerate(self._groups):
                group.share(self._tables[number])
                child._tables[number] = list(self._tables[number])
                child._keys[number] = list(self._keys[number])
            child._num_dropped = self._num_dropped
            child._retention = self._retention
            child._tokens = self._tokens
            child._filled = list(self._filled)
            self._cache.adopt(child)
            if self._cache.recording is not None:
                self._cache.recording.fork(self, child)
        except BaseException:
            child.close()
            raise
        return child

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens behind the first ``num_tokens``, in every layer; 0 is a new beginning.

        Raises:
            ValueError: The sequence does not hold that many, or the token behind them was dropped.
        """
        self._check_usable()
        num_tokens = as_int("num_tokens", num_tokens)
        if 0 < num_tokens < self.num_dropped_tokens:
            raise ValueError(
                f"the first {self.num_dropped_tokens} tokens were dropped: the sequence cannot be "
                f"cut to {num_tokens}"
            )
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"the sequence holds {self.num_tokens} tokens and cannot be cut to {num_tokens}"
            )
        for staging in self._staging:
            staging.forget_ahead()
        if self._cache.recording is not None:
            self._cache.recording.truncate(self, num_tokens)
        if num_tokens == 0:
            self._num_dropped = 0
        num_pages = _pages_of(num_tokens, self._page_tokens) - self._num_dropped
        for number, group in enumerate(self._groups):
            group.release(self._tables[number][num_pages:])
            del self._tables[number][num_pages:]
            del self._keys[number][num_tokens // self._page_tokens :]
        self._tokens = self._tokens[:num_tokens]
        self._filled = [num_tokens] * len(self._filled)

    def drop_before(self, num_tokens: int) -> None:
        """Give up the pages that lie wholly before token ``num_tokens``, for good.

        For models that look back no further than a window: what is held stays as small as that,
        however long the sequence becomes. With ``seq.drop_before(seq.num_tokens - window + 1)``
        after each step, the next token's query finds all that it sees; leave as many tokens more
        as may be truncated later.

        The other tokens keep their positions. Of the pages, those with a key stay cached, as if
        the sequence had been closed; the room of the others is free.

        Args:
            num_tokens: Tokens that nobody needs any more; if some of a page's are needed, all of
                it stays. Where not even one page more lies before, nothing happens: also for
                fewer tokens than in an earlier call, and below 0.

        Raises:
            ValueError: The sequence does not hold that many tokens.
        """
        self._check_usable()
        num_tokens = as_int("num_tokens", num_tokens)
        if num_tokens > self.num_tokens:
            raise ValueError(
                f"the sequence holds {self.num_tokens} tokens and cannot drop {num_tokens}"
            )
        num_dropped = num_tokens // self._page_tokens
        count = num_dropped - self._num_dropped
        if count <= 0:
            return
        for staging in self._staging:
            staging.forget_ahead()
        if self._cache.recording is not None:
            self._cache.recording.drop(self, num_tokens)
        pages = [table[:count] for table in self._tables]
        # Together, so that whoever interrupts this leaves no table with other page numbers.
        self._tables, self._num_dropped = [table[count:] for table in self._tables], num_dropped
        with ExitStack() as stack:  # each group's, though another's fail
            for group, dropped in zip(self._groups, pages, strict=True):
                stack.callback(group.release, dropped)

    def close(self) -> None:
        """Give up the pages; those with a key stay cached. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._cache.is_of_parent:
            return  # nothing is left to give up; the lock of a parent may be held for ever
        for staging in self._staging:
            staging.clear()
        if self._cache.is_closed:
            return
        if self._cache.recording is not None:
            self._cache.recording.close_sequence(self)
        self._cache.forget(self)
        self._whereabouts = [layer_scan.Whereabouts() for _ in self._groups]
        for number, group in enumerate(self._groups):
            group.release(self._tables[number], self._retention)
        self._tables = [[] for _ in self._groups]
        self._spare = [[] for _ in self._groups]

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self.num_tokens} tokens, {self.num_pages} pages"
        return f"<Sequence: {state}>"

    # -- used by the cache -------------------------------------------------------------------

    def start_from(self, tokens: Tokens, keys: Seq[Seq[PageKey]], tables: list[list[Page]]) -> None:
        """Begin with reused full pages, which the sequence takes over."""
        num_pages = len(tables[0])
        self._tables = tables
        self._keys = [list(group_keys[:num_pages]) for group_keys in keys]
        self._tokens = tokens[: num_pages * self._page_tokens]
        self._filled = [len(self._tokens)] * len(self._filled)

    def go_on_inside(self, tokens: Tokens, *, whole: bool, refresh: bool) -> None:
        """Take the beginning of the cached page that goes on with ``tokens`` longest, as the tail.

        Args:
            tokens: Ids of the prompt.
            whole: Only saved tails of which all tokens are wanted.
            refresh: Look what other processes have stored, if not all is found.
        """
        start, at = self.num_tokens, len(self._keys[0])
        parts = [
            Part(
                group=group,
                parent=self._parent(number, at),
                last=self._tables[number][-1] if self._tables[number] else None,
            )
            for number, group in enumerate(self._groups)
        ]
        rest, extra = tokens[start : start + self._page_tokens], extra_of(self._extra, at)
        wish = Wish(tokens=rest, salt=self._salt, extra=extra, whole=whole)
        count, pages = continuation.copy_longest(parts, wish, refresh=refresh)
        for table, page in zip(self._tables, pages, strict=False):
            table.append(page)
        self._tokens = tokens[: start + count]
        self._filled = [start + count] * len(self._filled)

    def record(self, recording: Recording, others: "Seq[Sequence]") -> None:
        """Write what it holds as if it had just come: as a fork, if it shares pages with others.

        Args:
            recording: Where to.
            others: Those that were written before.
        """
        shared = [_common(self._tables[0], other._tables[0]) for other in others]
        if any(shared) and not self._num_dropped:
            most = max(shared)
            recording.fork(others[shared.index(most)], self)
            recording.truncate(self, min(most * self._page_tokens, self.num_tokens))
        else:
            recording.open(self, self._keys[0])
        recording.append(self, self.num_tokens)
        recording.commit(self, self._keys[0])
        recording.drop(self, self.num_dropped_tokens)

    def table(self, number: int) -> Seq[Page]:
        """The block table of one layer group, from the first page on that was not dropped."""
        return tuple(self._tables[number])

    # -- inside ------------------------------------------------------------------------------

    def _attend_many(self, layer: int, q: Array, rule: AttentionRule) -> Array:
        """Attention of many queries, to some pages after the other."""
        number, local = self._cache.locate_layer(layer)
        moves, spec = self._groups[number].moves, self._groups[number].spec
        num_tokens = self._filled[layer]
        attention = MatrixAttention(q, spec.held_heads, num_tokens, rule)
        first = attention.first_token // self._page_tokens
        pages = self._pages(number, first, num_tokens)
        step = max(1, layer_scan.STAGED_NBYTES // spec.layer_nbytes)
        for begin in range(0, len(pages), step):
            part, start = pages[begin : begin + step], (first + begin) * self._page_tokens
            with slices.gather(moves, part, local, self._spare[number]) as (k, v):
                attention.attend(start, k[: num_tokens - start], v[: num_tokens - start])
        return attention.result()

    def _pages(self, number: int, first: int, num_tokens: int) -> list[Page]:
        """Pages of one group's first tokens, from page ``first`` on, which was not dropped."""
        last = _pages_of(num_tokens, self._page_tokens)
        return self._tables[number][first - self._num_dropped : last - self._num_dropped]

    def _recorded(self, num_tokens: int, group: int | None = None) -> AbstractContextManager[None]:
        """Record, if need be, that pages for so many tokens are wanted, and whether they came."""
        recording = self._cache.recording
        return _nothing if recording is None else recording.appending(self, num_tokens, group)

    def _reserve(self, number: int, start: int, stop: int) -> None:
        """Make the pages of tokens ``start..stop`` of one group exist, and writable."""
        group, table = self._groups[number], self._tables[number]
        first = start // self._page_tokens - self._num_dropped
        for at in range(first, len(table)):
            page = table[at]
            if page.is_shared:
                table[at] = group.private_copy(page, table[at - 1] if at else None)
                group.release([page])
            elif at == first and start % self._page_tokens and page.slot is None:
                group.bring_back(page)
        missing = _pages_of(stop, self._page_tokens) - self._num_dropped - len(table)
        if missing > 0:
            table += group.new_pages(missing, table[-1] if table else None)

    def _reserve_all(self, start: int, stop: int) -> None:
        """``_reserve`` for every group, or for none."""
        before = [len(table) for table in self._tables]
        try:
            for number in range(len(self._groups)):
                self._reserve(number, start, stop)
        except BaseException:
            for group, table, length in zip(self._groups, self._tables, before, strict=True):
                group.release(table[length:])
                del table[length:]
            raise

    def _write(self, number: int, local: int, start: int, kinds: Seq[Array]) -> None:
        first, offset = divmod(start, self._page_tokens)
        pages = self._pages(number, first, start + len(kinds[0]))
        self._staging[number].before_write(local, first)
        slices.write_tokens(self._groups[number].moves, pages, local, offset, kinds)

    def _name_pages(self, number: int, num_full: int) -> list[Page]:
        """Give keys to the full pages of one group that have none yet, and return those pages.

        Those that were dropped get keys too, of which those of the later ones are made.
        """
        group, keys, table = self._groups[number], self._keys[number], self._tables[number]
        named = []
        for at in range(len(keys), num_full):
            tokens = self._tokens[at * self._page_tokens : (at + 1) * self._page_tokens]
            key = self._next_key(number, tokens)
            if at >= self._num_dropped:
                place, parent = at - self._num_dropped, self._parent(number, at)
                extra = extra_of(self._extra, at)
                table[place] = group.give_key(table[place], key, parent, tokens, self._salt, extra)
                named.append(table[place])
            keys.append(key)
        return named

    def _next_key(self, number: int, tokens: Tokens) -> PageKey:
        """The key of ``tokens`` behind the pages that have keys."""
        at = len(self._keys[number])
        extra = extra_of(self._extra, at)
        return chain_key(self._parent(number, at), tokens, self._salt, extra)

    def _parent(self, number: int, at: int) -> PageKey:
        """The key before page ``at`` of one group: the root key before the first."""
        return self._keys[number][at - 1] if at else self._groups[number].spec.root_key()

    def _entry(self, number: int, at: int) -> PageEntry:
        """What the store is told of one page of a group whose tokens are named."""
        keys = self._keys[number]
        tokens = self._tokens[at * self._page_tokens : (at + 1) * self._page_tokens]
        return PageEntry(
            key=keys[at] if at < len(keys) else self._next_key(number, tokens),
            num_tokens=len(tokens),
            parent=self._parent(number, at),
            tokens=tokens,
            salt=self._salt,
        )

    def _extended(self, ids: Tokens, start: int, count: int) -> Tokens:
        if len(ids) != count:
            raise ValueError(f"{len(ids)} token ids were given for {count} tokens")
        if len(self._tokens) != start:
            raise ValueError(
                f"only {len(self._tokens)} of the {start} tokens before these are named: commit "
                "them first"
            )
        self._check_extra((start + count) // self._page_tokens)
        return np.concatenate([self._tokens, ids])

    def _check_extra(self, num_pages: int) -> None:
        if self._extra is None or isinstance(self._extra, bytes):
            return
        if len(self._extra) < num_pages:
            raise ValueError(
                f"extra names {len(self._extra)} pages, but {num_pages} are to get keys: open the "
                "sequence with one bytes value for all of them"
            )

    def _check_even(self, what: str) -> None:
        if min(self._filled) != max(self._filled):
            low = self._filled.index(min(self._filled))
            raise ValueError(
                f"{what} needs all layers to hold equally many tokens, but layer {low} holds "
                f"{self._filled[low]} and another {max(self._filled)}: append the missing layers, "
                "or truncate"
            )

    def _check_usable(self) -> None:
        self._cache.check_usable()
        if self._is_closed:
            raise ClosedError("the sequence is closed: open another with cache.open_sequence")


def _common(one: Seq[Page], other: Seq[Page]) -> int:
    """How many leading pages are the same."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))


def _pages_of(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)
