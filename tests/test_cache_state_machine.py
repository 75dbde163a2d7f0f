"""The cache does whatever it likes, and is compared with plain dictionaries after every step.

Pools have 1 to 6 slots, so that nearly every step evicts. The variants differ in what lies below
the pool: nothing, a store of raw numbers, an INT8 store, two layer groups, a disk that fails, and
a disk that damages what it holds.
"""

import errno
import os
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from cache_model import (
    Head,
    KnownPages,
    ModelSequence,
    PageId,
    keys_of,
    page_of,
    tail_key,
    token_hashes,
    token_kv,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from kv_samples import Array, bits, make_key, make_spec, wait_for_writers

import pagedkv as pk
from pagedkv import files
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.prefix import page_keys

PAGE_TOKENS = 2
MAX_SEQUENCES = 4

slots = st.integers(1, 6)
salts = st.sampled_from([b"", b"", b"tenant"])
extras = st.sampled_from([None, None, b"lora"])
flavours = st.sampled_from([0, 0, 0, 0, 1])
token_ids = st.sampled_from([0, 0, 0, 1])
prompts = st.integers(0, 7 * PAGE_TOKENS).flatmap(
    lambda size: st.lists(token_ids, min_size=size, max_size=size)
)
picks = st.integers(0, 10**6)
counts = st.sampled_from([1, 2, 3, 1, 5, 9, 0])

FAILED = object()


class Disk:
    """Stands between the cache and the disk; may be told to fail."""

    def __init__(self) -> None:
        self.writes_left: int | None = None
        self.reads_left: int | None = None
        self.has_failed = False
        self.fails_in_background = False
        self._rng = random.Random(0)

    @property
    def is_broken(self) -> bool:
        is_bad = self.writes_left is not None or self.reads_left is not None
        return is_bad or self.fails_in_background

    def mend(self) -> None:
        self.writes_left = self.reads_left = None
        self.fails_in_background = False

    def patches(self) -> ExitStack:
        """Put it in place; without fsync, which shows nothing here and takes the time."""
        real_read = files.pread_into

        def read(fd: int, out: Any, offset: int) -> int:
            if self.reads_left is not None:
                if self.reads_left == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self.reads_left -= 1
            return real_read(fd, out, offset)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(files, "pread_into", read))
        for name in ("write_all", "pwrite_all"):
            failing = self._failing(getattr(files, name))
            stack.enter_context(mock.patch.object(files, name, failing))
        for name in ("sync_file", "sync_dir"):
            stack.enter_context(mock.patch.object(files, name, lambda _: None))
        return stack

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(fd: int, data: Any, *offset: int) -> Any:
            is_writer = threading.current_thread().name.startswith("pagedkv-write")
            if self.fails_in_background and is_writer and self._rng.random() < 0.3:
                self.has_failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.writes_left is not None:
                if self.writes_left == 0:
                    self.has_failed = True
                    real(fd, data[: len(data) // 2], *offset)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.writes_left -= 1
            return real(fd, data, *offset)

        return write


@dataclass(kw_only=True)
class Gathered:
    """What ``gather`` has given, and not taken back yet."""

    stack: ExitStack
    kinds: tuple[Array, ...]
    copies: list[Array]
    family: object
    start: int
    num_valid: int
    """Of its tokens those that nobody may have written anew."""


class CacheMachine(RuleBasedStateMachine):
    """The rules; its subclasses say what lies below the pool."""

    num_groups: ClassVar[int] = 1
    has_store: ClassVar[bool] = True
    codec: ClassVar[str] = "raw"
    max_nbytes: ClassVar[int | None] = None
    can_damage: ClassVar[bool] = False
    can_break: ClassVar[bool] = False

    @initialize(
        num_slots=slots,
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        policy=st.sampled_from(POLICY_NAMES),
        writes_through=st.booleans(),
        store_tokens=st.booleans(),
    )
    def start(
        self, num_slots: int, dtype: str, policy: str, writes_through: bool, store_tokens: bool
    ) -> None:
        self.specs = [
            make_spec(
                num_layers=2 - number, dtype=dtype, page_tokens=PAGE_TOKENS, group=str(number)
            )
            for number in range(self.num_groups)
        ]
        self.first_layers = [0, 2][: self.num_groups]
        self.num_layers = sum(spec.held_layers for spec in self.specs)
        self.policy = policy
        self.write_policy = "write-through" if writes_through else "on-evict"
        self.store_tokens = store_tokens
        self.folder = Path(tempfile.mkdtemp(prefix="pagedkv-machine-"))
        self.disk = Disk()
        self.is_read_only = False
        self.was_damaged = False
        self.pages = KnownPages(lossy=self.is_lossy)
        self.tails = KnownPages(lossy=self.is_lossy)
        self.heads: dict[PageId, Head] = {}
        self.sequences: list[tuple[pk.Sequence, ModelSequence]] = []
        self.acquired: list[tuple[ExitStack, list[Array], list[bytes]]] = []
        self.gathered: list[Gathered] = []
        self.open_cache(num_slots)
        self.patches = self.disk.patches()

    @property
    def is_lossy(self) -> bool:
        return self.codec == "int8"

    @property
    def can_write(self) -> bool:
        """Whether there is a store that takes pages."""
        return self.has_store and not self.is_read_only

    @property
    def keeps_all(self) -> bool:
        """Whether the cache may not forget a page."""
        return (
            self.has_store
            and self.max_nbytes is None
            and not self.is_read_only
            and not self.was_damaged
        )

    def open_cache(self, num_slots: int) -> None:
        self.num_steps = 0  # since then
        self.store = None
        if self.has_store:
            self.store = pk.PageStore.open(
                self.folder / "cache.zarr",
                self.specs,
                mode="r" if self.is_read_only else "a",
                codec=self.codec,
                max_nbytes=self.max_nbytes,
                store_tokens=self.store_tokens,
            )
        self.cache = pk.PagedKVCache(
            self.specs if self.num_groups > 1 else self.specs[0],
            num_slots,
            store=self.store,
            policy=make_policy(self.policy),
            write_policy=self.write_policy,
        )

    # -- pages by key ------------------------------------------------------------------------

    @rule(ids=prompts, salt=salts, extra=extras, flavour=flavours, group=picks, twice=st.booleans())
    def put(
        self,
        ids: list[int],
        salt: bytes,
        extra: bytes | None,
        flavour: int,
        group: int,
        twice: bool,
    ) -> None:
        number = group % self.num_groups
        spec, first_layer = self.specs[number], self.first_layers[number]
        num_pages = len(ids) // PAGE_TOKENS
        keys = page_keys(spec, ids, salt, None if extra is None else [extra] * num_pages)
        names = token_hashes(ids, flavour)
        pages = np.empty((num_pages, *spec.page_shape), dtype=spec.np_dtype)
        for at in range(num_pages):
            part = names[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]
            pages[at] = page_of(spec, part, first_layer, finite=self.is_lossy)
        for at, key in enumerate(keys):
            part = slice(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
            self.heads[number, key] = Head.of(ids, part, salt, extra)
        self.put_pages(number, keys, pages)
        if twice:
            self.put_pages(number, keys, pages)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=12), flavour=flavours, group=picks)
    def put_opaque(self, numbers: list[int], flavour: int, group: int) -> None:
        which = group % self.num_groups
        spec = self.specs[which]
        pages = np.empty((len(numbers), *spec.page_shape), dtype=spec.np_dtype)
        for at, number in enumerate(numbers):
            names = token_hashes([number, which], flavour)
            pages[at] = page_of(spec, names, 0, finite=self.is_lossy)
        self.put_pages(which, [make_key(number) for number in numbers], pages)

    def put_pages(self, number: int, keys: Seq[Any], pages: Array) -> None:
        done = self.attempt(lambda: self.cache.put(keys, pages, **self.group_of(keys, number)))
        for key, page in zip(keys, pages, strict=True):
            sure = done is not FAILED and self.keeps_all
            self.pages.learn(self.specs[number], (number, key), page, certain=sure)

    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        known = self.pages.ids()
        number = data.draw(picks) % self.num_groups
        keys = [key for group, key in known if group == number]
        wanted = [keys[pick % len(keys)] for pick in data.draw(st.lists(picks, max_size=6)) if keys]
        if data.draw(st.booleans()):
            wanted.insert(data.draw(st.integers(0, len(wanted))), make_key(1000))
        self.get_pages(number, wanted)

    def get_pages(self, number: int, keys: list[Any]) -> None:
        page_ids = [(number, key) for key in keys]
        try:
            pages = self.attempt(lambda: self.cache.get(keys, group=number))
        except pk.PageNotFoundError as error:
            missing = [page_id for page_id in page_ids if page_id[1].hex() in str(error)]
            assert missing, "the error names a key that was not asked for"
            at = self.pages.num_possible(page_ids)
            assert self.pages.num_certain(page_ids) <= page_ids.index(missing[0]) <= at
            self.pages.missed(missing[0])
            return
        assert self.pages.num_possible(page_ids) == len(keys), "a page came from nowhere"
        if pages is FAILED:
            return
        for page_id, page in zip(page_ids, pages, strict=True):
            self.pages.found(page_id, page, certain=self.keeps_all)

    @rule(ids=prompts, salt=salts, extra=extras, group=picks)
    def match(self, ids: list[int], salt: bytes, extra: bytes | None, group: int) -> None:
        number = group % self.num_groups
        keys = keys_of(self.specs[number], ids, salt, extra)
        self.check_run(number, keys, self.cache.match(keys, group=number))

    def check_run(self, number: int, keys: Seq[bytes], length: int) -> None:
        page_ids = [(number, key) for key in keys]
        low, high = self.pages.num_certain(page_ids), self.pages.num_possible(page_ids)
        if self.keeps_all:
            assert low <= length <= high
        else:
            assert length <= high

    @precondition(lambda self: len(self.acquired) < 3)
    @rule(data=st.data(), ids=prompts, salt=salts, extra=extras, opaque=st.booleans())
    def acquire(
        self, data: st.DataObject, ids: list[int], salt: bytes, extra: bytes | None, opaque: bool
    ) -> None:
        number = data.draw(picks) % self.num_groups
        keys: list[Any] = keys_of(self.specs[number], ids, salt, extra)
        if opaque:
            keys = [make_key(n) for n in data.draw(st.lists(st.integers(0, 9), max_size=4))]
        before = self.num_pinned()
        stack = ExitStack()
        views = self.attempt(
            lambda: stack.enter_context(self.cache.acquire(keys, group=number)),
            may_exhaust=True,
        )
        if views is FAILED:
            assert self.num_pinned() == before
            return
        self.check_run(number, keys, len(views))
        for key, view in zip(keys, views, strict=False):
            self.pages.found((number, key), view, certain=self.keeps_all)
            assert not view.flags.writeable
        self.acquired.append((stack, views, [bits(view) for view in views]))

    @precondition(lambda self: self.acquired)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        stack, _, _ = self.acquired.pop(pick % len(self.acquired))
        stack.close()

    # -- sequences ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(ids=prompts, salt=salts, extra=extras, flavour=flavours, blank=st.booleans())
    def open_sequence(
        self, ids: list[int], salt: bytes, extra: bytes | None, flavour: int, blank: bool
    ) -> None:
        prompt = [] if blank else ids
        seq = self.attempt(
            lambda: self.cache.open_sequence(prompt, salt, extra), may_exhaust=not self.can_write
        )
        if seq is FAILED:
            return
        model = ModelSequence(salt=salt, extra=extra, flavour=flavour, num_layers=self.num_layers)
        reused = seq.num_tokens
        self.check_reuse(prompt, salt, extra, reused)
        model.plan(len(ids), ids or [0])
        model.num_named = reused
        if not self.adopt_reused(seq, model, reused):
            seq.close()
            return
        self.sequences.append((seq, model))

    @precondition(lambda self: len(self.sequences) < MAX_SEQUENCES)
    @rule(ids=prompts, salt=salts, flavour=flavours, named=st.booleans(), count=counts)
    def prefill(self, ids: list[int], salt: bytes, flavour: int, named: bool, count: int) -> None:
        """What a model does: open, compute what is missing layer by layer, name it, and decode."""
        before = len(self.sequences)
        self.open_sequence(ids, salt, None, flavour, blank=False)
        if len(self.sequences) == before:
            return
        seq, model = self.sequences[-1]
        for layer in range(self.num_layers):
            missing = len(ids) - len(model.layers[layer])
            self.append_to_layer(seq, model, layer, missing, ids or [0])
        if named and model.is_even:
            self.name_tokens(seq, model, model.num_tokens)
        for _ in range(count):
            self.append(before, 1, [0], named=named)

    def check_reuse(self, ids: list[int], salt: bytes, extra: bytes | None, reused: int) -> None:
        lows, highs = [], []
        for number, spec in enumerate(self.specs):
            page_ids = [(number, key) for key in keys_of(spec, ids, salt, extra)]
            lows.append(self.pages.num_certain(page_ids))
            highs.append(self.pages.num_possible(page_ids))
        low, high = min(lows) * PAGE_TOKENS, min(highs) * PAGE_TOKENS
        low += max(
            self.num_tail_tokens(ids, low, salt, extra),
            self.num_head_tokens(ids, low, salt, extra, certain=True) if self.store_tokens else 0,
        )
        high = max(
            start + self.num_head_tokens(ids, start, salt, extra, certain=False)
            for start in range(0, high + 1, PAGE_TOKENS)
        )
        assert reused <= high, "tokens were reused that nobody has computed"
        if self.keeps_all:
            assert low <= reused, "a cached prefix was not found"

    def num_tail_tokens(self, ids: list[int], start: int, salt: bytes, extra: bytes | None) -> int:
        """Tokens of the longest saved tail behind the first tokens that must be found."""
        for count in range(min(PAGE_TOKENS - 1, len(ids) - start), 0, -1):
            tail_ids = [
                (number, tail_key(spec, ids[: start + count], count, salt, extra))
                for number, spec in enumerate(self.specs)
            ]
            if self.tails.num_certain(tail_ids) == len(tail_ids):
                return count
        return 0

    def num_head_tokens(
        self, ids: list[int], start: int, salt: bytes, extra: bytes | None, *, certain: bool
    ) -> int:
        """Tokens that the best page or tail behind the first tokens shares, in each group."""
        counts = [0] * self.num_groups
        for page_id, head in self.heads.items():
            if self.is_known(page_id, certain=certain):
                num_common = head.num_common(ids, start, salt, extra)
                counts[page_id[0]] = max(counts[page_id[0]], num_common)
        return min(*counts, PAGE_TOKENS - 1) if counts else 0

    def is_known(self, page_id: PageId, *, certain: bool) -> bool:
        count = KnownPages.num_certain if certain else KnownPages.num_possible
        return any(count(known, [page_id]) for known in (self.pages, self.tails))

    def adopt_reused(self, seq: pk.Sequence, model: ModelSequence, reused: int) -> bool:
        """Take over what the sequence was given, and check that it is what was once put in."""
        for layer in range(self.num_layers):
            with ExitStack() as stack:
                kinds = self.attempt(lambda at=layer: stack.enter_context(seq.gather(at)))
                if kinds is FAILED:
                    return False
                model.layers[layer] = list(np.stack(kinds, axis=1).copy())
        for number, spec in enumerate(self.specs):
            first_layer = self.first_layers[number]
            keys = model.keys(spec, reused)
            for at, key in enumerate(keys):
                page = model.page(spec, first_layer, at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
                self.pages.found((number, key), page, certain=self.keeps_all)
            num_tail = reused % PAGE_TOKENS
            if num_tail:
                tail = model.page(spec, first_layer, reused - num_tail, reused)
                self.check_head(number, model, reused, tail)
        return True

    def check_head(self, number: int, model: ModelSequence, reused: int, tail: Array) -> None:
        """A page of which a part was taken over must be one that was once put in."""
        start = reused // PAGE_TOKENS * PAGE_TOKENS
        count, spec = reused - start, self.specs[number]
        sources = [
            page_id
            for page_id, head in self.heads.items()
            if page_id[0] == number
            and head.num_common(model.ids, start, model.salt, model.extra) >= count
        ]
        contents = (
            np.frombuffer(content, spec.np_dtype).reshape(spec.page_shape)
            for page_id in sources
            for known in (self.pages, self.tails)
            for content in known.contents_of(page_id)
        )
        assert any(bits(page[:, :, :count]) == bits(tail[:, :, :count]) for page in contents), (
            "a part of a page came out that nobody has put in"
        )

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, count=counts, fresh=st.lists(token_ids, min_size=1), named=st.booleans())
    def append(self, pick: int, count: int, fresh: list[int], named: bool) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        start = model.num_tokens
        if not model.is_even:
            with pytest.raises(ValueError, match="equally many tokens"):
                seq.append(*self.no_tokens())
            return
        model.plan(start + count, fresh)
        named = named and model.num_named == start
        values = [self.new_kv(model, layer, start, count) for layer in range(self.num_layers)]
        ks, vs = [], []
        for number, spec in enumerate(self.specs):
            first = self.first_layers[number]
            stacked = np.stack(values[first : first + spec.held_layers])
            ks.append(stacked[:, :, 0])
            vs.append(stacked[:, :, 1])
        ids = model.ids[start : start + count] if named else None
        several = self.num_groups > 1
        done = self.attempt(
            lambda: seq.append(ks if several else ks[0], vs if several else vs[0], ids),
            may_exhaust=not self.can_write,
        )
        if done is FAILED and seq.num_tokens == start:
            return
        for layer in range(self.num_layers):
            model.layers[layer] += list(values[layer])
        if named:
            self.learn_named(seq, model, start + count, failed=done is FAILED)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, layer=picks, count=counts, fresh=st.lists(token_ids, min_size=1))
    def append_layer(self, pick: int, layer: int, count: int, fresh: list[int]) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        which = layer % self.num_layers
        self.append_to_layer(seq, model, which, count, fresh)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, count=counts, fresh=st.lists(token_ids, min_size=1))
    def append_every_layer(self, pick: int, count: int, fresh: list[int]) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        goal = max(len(layer) for layer in model.layers) + count
        for layer in range(self.num_layers):
            missing = goal - len(model.layers[layer])
            self.append_to_layer(seq, model, layer, missing, fresh)

    def append_to_layer(
        self, seq: pk.Sequence, model: ModelSequence, layer: int, count: int, fresh: list[int]
    ) -> None:
        start = len(model.layers[layer])
        model.plan(start + count, fresh)
        values = self.new_kv(model, layer, start, count)
        k, v = values[:, 0], values[:, 1]
        done = self.attempt(lambda: seq.append_layer(layer, k, v), may_exhaust=not self.can_write)
        if done is not FAILED:
            model.layers[layer] += list(values)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, count=picks)
    def commit(self, pick: int, count: int) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        num_named = count % (model.num_tokens + 1)
        self.name_tokens(seq, model, num_named)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def commit_all(self, pick: int) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        self.name_tokens(seq, model, model.num_tokens)

    def name_tokens(self, seq: pk.Sequence, model: ModelSequence, count: int) -> bool:
        done = self.attempt(lambda: seq.commit(model.ids[:count]))
        self.learn_named(seq, model, count, failed=done is FAILED)
        return done is not FAILED

    def learn_named(
        self, seq: pk.Sequence, model: ModelSequence, count: int, *, failed: bool
    ) -> None:
        old = model.num_named
        for number, spec in enumerate(self.specs):
            keys = model.keys(spec, count)
            first = max(old, model.num_dropped) // PAGE_TOKENS
            for at in range(first, count // PAGE_TOKENS):
                start, stop = at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS
                page = model.page(spec, self.first_layers[number], start, stop)
                sure = self.keeps_all and not failed
                self.heads[number, keys[at]] = Head.of(
                    model.ids, slice(start, stop), model.salt, model.extra
                )
                self.pages.learn(spec, (number, keys[at]), page, certain=sure)
        model.num_named = len(seq.tokens) if failed else max(old, count)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, wrong=picks)
    def commit_other_ids(self, pick: int, wrong: int) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        if not model.num_named:
            return
        ids = list(model.ids[: model.num_named])
        at = wrong % len(ids)
        ids[at] += 7
        with pytest.raises(ValueError, match=f"token {at} was named {model.ids[at]} before"):
            seq.commit(ids)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, names_all=st.booleans())
    def save(self, pick: int, names_all: bool) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        if names_all and not self.name_tokens(seq, model, model.num_tokens):
            return
        if not model.is_even or model.num_dropped or model.num_named < model.num_tokens:
            reasons = r"equally many tokens|tokens were dropped|tokens are named"
            with pytest.raises(ValueError, match=reasons):
                seq.save()
            return
        if self.store is None or self.is_read_only:
            with pytest.raises(pk.StoreError, match="can be written"):
                seq.save()
            return
        done = self.attempt(seq.save)
        self.learn_saved(model, failed=done is FAILED)

    def learn_saved(self, model: ModelSequence, *, failed: bool) -> None:
        length = model.num_tokens
        num_tail = length % PAGE_TOKENS
        for number, spec in enumerate(self.specs):
            page_ids: list[PageId] = [(number, key) for key in model.keys(spec, length)]
            if not failed and not self.was_damaged:
                assert self.store is not None
                assert all(key in self.store for _, key in page_ids), "a saved page is not stored"
                self.pages.mark_durable(page_ids)
            if num_tail:
                tail = model.page(spec, self.first_layers[number], length - num_tail, length)
                key = tail_key(spec, model.ids[:length], num_tail, model.salt, model.extra)
                sure = self.keeps_all and not failed
                self.heads[number, key] = Head.of(
                    model.ids, slice(length - num_tail, length), model.salt, model.extra
                )
                self.tails.learn(spec, (number, key), tail, certain=sure)
                self.tails.mark_durable([(number, key)])

    @precondition(lambda self: 0 < len(self.sequences) < MAX_SEQUENCES)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        if not model.is_even:
            with pytest.raises(ValueError, match="equally many tokens"):
                seq.fork()
            return
        self.sequences.append((seq.fork(), model.copy()))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, count=picks, flavour=flavours, replan=st.booleans())
    def truncate(self, pick: int, count: int, flavour: int, replan: bool) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        if replan:
            with pytest.raises(ValueError, match="cannot be cut"):
                seq.truncate(model.num_tokens + 1)
        length = count % (model.num_tokens + 1)
        if 0 < length < model.num_dropped:
            with pytest.raises(ValueError, match=f"{model.num_dropped} tokens were dropped"):
                seq.truncate(length)
            length = model.num_dropped
        seq.truncate(length)
        model.cut(length)
        if length == 0:
            model.num_dropped = 0
        for view in self.gathered:  # what was cut may be written anew
            if view.family is model.family:
                view.num_valid = min(view.num_valid, max(0, length - view.start))
        model.flavour = flavour

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, count=picks, too_many=st.booleans())
    def drop_before(self, pick: int, count: int, too_many: bool) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        if too_many:
            with pytest.raises(ValueError, match=f"cannot drop {model.num_tokens + 1}"):
                seq.drop_before(model.num_tokens + 1)
        wanted = count % (model.num_tokens + 1)
        before, num_pages = model.num_dropped, seq.num_pages
        seq.drop_before(wanted)
        model.num_dropped = max(before, wanted // PAGE_TOKENS * PAGE_TOKENS)
        num_gone = (model.num_dropped - before) // PAGE_TOKENS
        assert seq.num_pages == num_pages - num_gone * self.num_groups
        if model.num_dropped:
            with pytest.raises(ValueError, match=f"{model.num_dropped} tokens were dropped"):
                seq.gather(0, start=model.num_dropped - 1).__enter__()

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def close_sequence(self, pick: int) -> None:
        seq, _ = self.sequences.pop(pick % len(self.sequences))
        seq.close()
        seq.close()
        with pytest.raises(pk.ClosedError):
            seq.fork()

    @precondition(lambda self: self.sequences and len(self.gathered) < 2)
    @rule(pick=picks, layer=picks, count=picks, skipped=picks)
    def gather_and_keep(self, pick: int, layer: int, count: int, skipped: int) -> None:
        seq, model = self.sequences[pick % len(self.sequences)]
        which = layer % self.num_layers
        stop = model.num_dropped + count % (len(model.layers[which]) - model.num_dropped + 1)
        start = model.num_dropped + skipped % (stop - model.num_dropped + 1)
        stack = ExitStack()
        kinds = self.attempt(lambda: stack.enter_context(seq.gather(which, stop, start)))
        if kinds is FAILED:
            return
        self.check_kinds(kinds, model.layers[which][start:stop])
        self.gathered.append(
            Gathered(
                stack=stack,
                kinds=kinds,
                copies=[kind.copy() for kind in kinds],
                family=model.family,
                start=start,
                num_valid=stop - start,
            )
        )

    @precondition(lambda self: self.gathered)
    @rule(pick=picks)
    def give_gathered_back(self, pick: int) -> None:
        self.gathered.pop(pick % len(self.gathered)).stack.close()

    # -- the whole ---------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        try:
            done = self.attempt(self.cache.flush)
        except pk.StoreError:  # an earlier failure of the writer, told once
            assert self.disk.has_failed, "flush failed for no reason"
            done = self.attempt(self.cache.flush)
        self.disk.has_failed = self.disk.is_broken
        if done is not FAILED and self.keeps_all:
            self.pages.mark_durable(self.pages.ids())

    @precondition(lambda self: self.num_steps >= 12)
    @rule(num_slots=slots, read_only=st.sampled_from([False, False, True]))
    def reopen(self, num_slots: int, read_only: bool) -> None:
        """Close the cache with all that is open in it, and start again on the same store."""
        self.let_go()
        self.disk.mend()
        stored = self.has_store and not self.is_read_only
        try:
            self.cache.close()
        except pk.StoreFullError:
            assert self.max_nbytes is not None
            self.abandon()
        else:
            if stored and self.keeps_all:
                self.pages.mark_durable(self.pages.ids())
            for seq, _ in self.sequences:
                with pytest.raises(pk.ClosedError):
                    seq.append(*self.no_tokens())
        self.start_again(num_slots, read_only=read_only)

    @precondition(lambda self: self.num_steps >= 12)
    @rule(num_slots=slots)
    def crash(self, num_slots: int) -> None:
        """Lose all that is not on disk, and start again on the same store."""
        self.let_go()
        self.disk.mend()
        self.abandon()
        self.start_again(num_slots, read_only=False)

    def abandon(self) -> None:
        for group in self.cache._groups:
            if group.places.spill is not None:
                group.places.spill.close()
        if self.store is not None:
            self.store.close()

    def start_again(self, num_slots: int, *, read_only: bool) -> None:
        self.sequences.clear()
        self.is_read_only = read_only and self.has_store and self.can_reopen_read_only
        self.open_cache(num_slots)
        for known in (self.pages, self.tails):
            for number, key in known.ids():
                is_there = self.store is not None and self.store.find(key, number) is not None
                if not is_there:
                    assert not known.is_durable((number, key)), "a durable page is gone"
                    known.forget((number, key))
                else:
                    known.mark_durable([(number, key)])

    @property
    def can_reopen_read_only(self) -> bool:
        return True

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def sequences_are_exact(self) -> None:
        for seq, model in self.sequences:
            assert seq.num_tokens == model.num_tokens
            assert seq.num_dropped_tokens == model.num_dropped
            assert seq.tokens.tolist() == model.ids[: model.num_named]
            for layer in range(self.num_layers):
                with ExitStack() as stack:
                    view = seq.gather(layer, start=model.num_dropped)
                    kinds = self.attempt(lambda s=stack, v=view: s.enter_context(v))
                    if kinds is not FAILED:
                        self.check_kinds(kinds, model.layers[layer][model.num_dropped :])

    @invariant()
    def what_is_in_use_stays(self) -> None:
        self.num_steps += 1
        for _, views, contents in self.acquired:
            assert [bits(view) for view in views] == contents
        for view in self.gathered:
            for kind, copy in zip(view.kinds, view.copies, strict=True):
                assert bits(kind[: view.num_valid]) == bits(copy[: view.num_valid])

    @invariant()
    def bookkeeping_agrees(self) -> None:
        wait_for_writers(self.cache)  # so that the same steps give the same state
        self.cache.check_invariants()
        if self.store is not None:
            self.store.check_invariants()
        stats = self.cache.stats()
        if not self.acquired and not self.gathered:
            assert stats.num_pinned_slots == 0
        if not self.sequences:
            assert stats.num_pages_held == 0
            for group in self.cache._groups:
                spill = group.places.spill
                assert spill is None or spill.num_used == 0, "a spill record was not given back"

    def check_kinds(self, kinds: tuple[Array, ...], expected: list[Array]) -> None:
        assert all(len(kind) == len(expected) for kind in kinds)
        for number, kind in enumerate(kinds):
            assert bits(kind) == b"".join(bits(token[number]) for token in expected)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        try:
            if sys.exc_info()[0] is None:
                self.check_all_pages()
        finally:
            self.patches.close()
            self.abandon()
            shutil.rmtree(self.folder)

    def check_all_pages(self) -> None:
        """Close the sequences, ask for every page that was ever put, also after a restart."""
        self.disk.mend()
        self.let_go()
        for seq, _ in self.sequences:
            seq.close()
        self.sequences.clear()
        for restart in (False, True):
            if restart:
                self.reopen(2, read_only=True)
            for number, key in self.pages.ids():
                self.get_pages(number, [key])
            self.bookkeeping_agrees()

    # -- helpers -----------------------------------------------------------------------------

    def attempt(self, call: Callable[[], Any], *, may_exhaust: bool = False) -> Any:
        """The call's result, or ``FAILED`` where it failed for a reason that the world has."""
        try:
            return self.try_to(call, may_exhaust=may_exhaust)
        finally:
            if self.disk.is_broken:  # sequences take the room of what cannot be written
                self.pages.doubt_unless(self.is_stored)

    def is_stored(self, page_id: PageId) -> bool:
        number, key = page_id
        return self.store is not None and self.store.find(key, number) is not None

    def try_to(self, call: Callable[[], Any], *, may_exhaust: bool) -> Any:
        try:
            return call()
        except pk.PoolExhaustedError:
            assert may_exhaust or self.some_pool_is_taken(), "there was a slot to be had"
        except pk.CorruptPageError:
            assert self.was_damaged
        except pk.StoreFullError:
            assert self.max_nbytes is not None
        except pk.StoreError as error:
            if not self.disk.is_broken:
                raise
            assert str(self.folder) in str(error), "the error does not name the place"
        return FAILED

    def num_pinned(self) -> int:
        return self.cache.stats().num_pinned_slots

    def some_pool_is_taken(self) -> bool:
        """Whether each slot of a pool is pinned, or holds a page that has nowhere else to go."""
        for group in self.cache._groups:
            pool = group.places.pool
            num_taken = pool.num_pinned
            if not self.can_write:
                num_taken += group.places.num_resident_held
            if num_taken >= pool.num_slots:
                return True
        return False

    def let_go(self) -> None:
        while self.acquired:
            self.release(0)
        while self.gathered:
            self.give_gathered_back(0)

    def group_of(self, keys: Any, number: int) -> dict[str, int]:
        return {} if isinstance(keys, pk.PageKeys) else {"group": number}

    def new_kv(self, model: ModelSequence, layer: int, start: int, count: int) -> Array:
        """KV of new tokens, ``(token, kind, head, channel)``."""
        spec = self.specs[0]
        shape = (count, spec.num_kinds, spec.held_heads, spec.head_dim)
        values = np.empty(shape, dtype=spec.np_dtype)
        for at in range(count):
            name = model.names[start + at]
            values[at] = token_kv(spec, layer, name, finite=self.is_lossy)
        return values

    def no_tokens(self) -> tuple[Any, Any]:
        empty = [
            np.empty((spec.held_layers, 0, spec.held_heads, spec.head_dim), spec.np_dtype)
            for spec in self.specs
        ]
        arrays = empty if self.num_groups > 1 else empty[0]
        return arrays, arrays


class RawStoreMachine(CacheMachine):
    """A store of raw numbers: nothing is ever forgotten."""


class NoStoreMachine(CacheMachine):
    """No store: pages may be forgotten, but never wrong, and sequences never."""

    has_store = False


class Int8StoreMachine(CacheMachine):
    """An INT8 store: keyed pages lose precision on their way, live sequences do not."""

    codec = "int8"


class TwoGroupsMachine(CacheMachine):
    """Two layer groups with pools and block tables of their own."""

    num_groups = 2


class SmallStoreMachine(CacheMachine):
    """A store that is full soon."""

    max_nbytes = 700_000


class FailingDiskMachine(CacheMachine):
    """A disk that is full, at times in the midst of a write, or cannot be read."""

    num_groups = 2

    @rule(writes_left=st.integers(0, 6))
    def fill_disk(self, writes_left: int) -> None:
        self.disk.writes_left = writes_left

    @rule(reads_left=st.integers(0, 6))
    def break_disk(self, reads_left: int) -> None:
        self.disk.reads_left = reads_left

    @precondition(lambda self: self.disk.is_broken)
    @rule()
    def mend_disk(self) -> None:
        self.disk.mend()


class FlakyWriterMachine(CacheMachine):
    """A writer in the background that fails now and then; what others write is written."""

    def open_cache(self, num_slots: int) -> None:
        super().open_cache(num_slots)
        self.disk.fails_in_background = True


class DamagingDiskMachine(CacheMachine):
    """A disk that damages segments: their pages are lost, but never wrong."""

    @precondition(lambda self: any(self.segment_files()))
    @rule(pick=picks, seed=picks)
    def damage_a_segment(self, pick: int, seed: int) -> None:
        segments = self.segment_files()
        path = segments[pick % len(segments)]
        data = bytearray(path.read_bytes())
        size = min(len(data), 200)  # the first pages
        rng = random.Random(seed)
        for _ in range(3):
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        self.was_damaged = True
        self.pages.doubt()
        self.tails.doubt()

    def segment_files(self) -> list[Path]:
        return sorted(self.folder.glob("cache.zarr/lane-*/group-*/kv/c.*"))


def case_of(machine: type[CacheMachine], max_examples: int) -> type:
    """The machine as a test case: the same examples in every run."""
    case = machine.TestCase
    case.settings = settings(
        derandomize=True,
        deadline=None,
        max_examples=max_examples,
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return case


TestRawStore = case_of(RawStoreMachine, 60)
TestNoStore = case_of(NoStoreMachine, 80)
TestInt8Store = case_of(Int8StoreMachine, 40)
TestTwoGroups = case_of(TwoGroupsMachine, 40)
TestSmallStore = case_of(SmallStoreMachine, 30)
TestFailingDisk = case_of(FailingDiskMachine, 40)
TestFlakyWriter = case_of(FlakyWriterMachine, 30)
TestDamagingDisk = case_of(DamagingDiskMachine, 30)
