"""What a cache must answer, as plain dictionaries and lists: the model of the state machine."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from kv_samples import Array, bits, through_int8

from pagedkv import KVSpec
from pagedkv.prefix import chain_key, page_keys

PageId = tuple[int, bytes]
"""Layer group and page key."""


def token_hashes(ids: Sequence[int], flavour: int, before: bytes = b"") -> list[bytes]:
    """A name for each token that depends on all tokens up to it, as a token's KV does."""
    hashes = []
    for token in ids:
        before = hashlib.blake2b(b"%d %d %s" % (token, flavour, before), digest_size=16).digest()
        hashes.append(before)
    return hashes


def token_kv(spec: KVSpec, layer: int, name: bytes, *, finite: bool) -> Array:
    """KV of one token in one layer, ``(kind, head, channel)``: any bits, NaN and infinity too."""
    shape = (spec.num_kinds, spec.held_heads, spec.head_dim)
    size = int(np.prod(shape))
    if finite:
        raw = hashlib.blake2b(name + bytes([layer]), digest_size=size).digest()
        return (np.frombuffer(raw, np.int8) / np.float32(16)).astype(spec.np_dtype).reshape(shape)
    nbytes = size * spec.np_dtype.itemsize
    raw = hashlib.blake2b(name + bytes([layer]), digest_size=nbytes).digest()
    return np.frombuffer(raw, spec.np_dtype).reshape(shape)


def page_of(spec: KVSpec, names: Sequence[bytes], first_layer: int, *, finite: bool) -> Array:
    """The page of these tokens, ``(layer, kind, token, head, channel)``."""
    page = np.empty(spec.page_shape, dtype=spec.np_dtype)
    for layer in range(spec.held_layers):
        for token, name in enumerate(names):
            page[layer, :, token] = token_kv(spec, first_layer + layer, name, finite=finite)
    return page


@dataclass(slots=True, kw_only=True)
class KnownPage:
    """What may be found under a key."""

    contents: set[bytes] = field(default_factory=set)
    is_certain: bool = False
    """Whether it must be found."""
    is_durable: bool = False
    """Whether it must be found after a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Of which tokens a page, or saved tail, is."""

    before: tuple[int, ...]
    ids: tuple[int, ...]
    salt: bytes
    extra: bytes

    @classmethod
    def of(cls, ids: Sequence[int], part: slice, salt: bytes, extra: bytes | None) -> "Head":
        return cls(
            before=tuple(ids[: part.start]), ids=tuple(ids[part]), salt=salt, extra=extra or b""
        )

    def num_common(self, ids: Sequence[int], start: int, salt: bytes, extra: bytes | None) -> int:
        """How many leading tokens it shares with ``ids`` from ``start`` on; 0 if it may not."""
        same = self.before == tuple(ids[:start]) and (self.salt, self.extra) == (salt, extra or b"")
        pairs = zip(self.ids, ids[start:], strict=False)
        return _leading(one == other for one, other in pairs) if same else 0


class KnownPages:
    """Pages by key. Where nothing is forgotten, the first bytes under a key are there for ever."""

    def __init__(self, *, lossy: bool) -> None:
        self.lossy = lossy
        self.may_return = False
        """Whether a page that was missed may be found later: a store lists damaged ones anew."""
        self._pages: dict[PageId, KnownPage] = {}

    def learn(self, spec: KVSpec, page_id: PageId, page: Array, *, certain: bool) -> None:
        """Somebody has offered a page; it counts unless the key has one for certain."""
        known = self._pages.setdefault(page_id, KnownPage())
        if known.is_certain:
            return
        known.contents.add(bits(page))
        if self.lossy:
            known.contents.add(bits(through_int8(spec, page)))
        known.is_certain = certain

    def found(self, page_id: PageId, content: Array, *, certain: bool) -> None:
        """The cache has shown a page; it must be one that is known."""
        known = self._pages.get(page_id)
        assert known is not None, "a page came out that nobody has put in"
        assert bits(content) in known.contents, "a page came out with wrong bytes"
        if not self.lossy:
            known.contents = {bits(content)}
        known.is_certain |= certain

    def missed(self, page_id: PageId) -> None:
        """The cache has not found a page."""
        known = self._pages.get(page_id)
        assert known is None or not known.is_certain, "a page is gone that must be there"
        if known is not None and not self.may_return:
            del self._pages[page_id]

    def forget(self, page_id: PageId) -> None:
        """The cache has lost a page, and was allowed to."""
        del self._pages[page_id]

    def num_certain(self, page_ids: Sequence[PageId]) -> int:
        """Pages of the leading run that must be found."""
        return _leading(
            page_id in self._pages and self._pages[page_id].is_certain for page_id in page_ids
        )

    def num_possible(self, page_ids: Sequence[PageId]) -> int:
        """Pages of the leading run that may be found."""
        return _leading(page_id in self._pages for page_id in page_ids)

    def contents_of(self, page_id: PageId) -> set[bytes]:
        """What may be found under a key."""
        known = self._pages.get(page_id)
        return set() if known is None else known.contents

    def certain_ids(self) -> list[PageId]:
        """All that must be found."""
        return [page_id for page_id, page in self._pages.items() if page.is_certain]

    def ids(self) -> list[PageId]:
        """All that may be found."""
        return list(self._pages)

    def is_durable(self, page_id: PageId) -> bool:
        """Whether the page must survive a crash."""
        return self._pages[page_id].is_durable

    def mark_durable(self, page_ids: Iterable[PageId]) -> None:
        """These pages have been stored, if they are in the cache at all."""
        for page_id in page_ids:
            if self._pages[page_id].is_certain:
                self._pages[page_id].is_durable = True

    def doubt_unless(self, is_kept: Callable[[PageId], bool]) -> None:
        """From now on only those pages are certain that are kept somewhere safe."""
        for page_id, page in self._pages.items():
            page.is_certain = page.is_certain and is_kept(page_id)

    def doubt(self) -> None:
        """From now on nothing is certain: the disk was damaged."""
        for page in self._pages.values():
            page.is_certain = page.is_durable = False
        self.may_return = True


@dataclass(slots=True, kw_only=True)
class ModelSequence:
    """A sequence as plain lists.

    Args:
        salt: The tenant's salt.
        extra: What goes into all its keys.
        flavour: Which numbers it computes for its tokens.
        num_layers: Layers of all groups together.
    """

    salt: bytes
    extra: bytes | None
    flavour: int
    num_layers: int
    ids: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    layers: list[list[Array]] = field(default_factory=list)
    """For each layer its tokens' KV, each ``(kind, head, channel)``."""
    num_named: int = 0
    num_dropped: int = 0
    """Leading tokens whose pages were given up; ``layers`` still has them."""
    family: object = field(default_factory=object)
    """The same in all forks."""

    def __post_init__(self) -> None:
        if not self.layers:
            self.layers = [[] for _ in range(self.num_layers)]

    @property
    def num_tokens(self) -> int:
        return min(len(layer) for layer in self.layers)

    @property
    def is_even(self) -> bool:
        return len({len(layer) for layer in self.layers}) == 1

    def plan(self, num_tokens: int, fresh: Sequence[int]) -> None:
        """Decide the ids up to ``num_tokens``."""
        new = [fresh[at % len(fresh)] for at in range(len(self.ids), num_tokens)]
        self.names += token_hashes(new, self.flavour, self.names[-1] if self.names else b"")
        self.ids += new

    def cut(self, num_tokens: int) -> None:
        """Forget all behind the first tokens."""
        del self.ids[num_tokens:], self.names[num_tokens:]
        for layer in self.layers:
            del layer[num_tokens:]
        self.num_named = min(self.num_named, num_tokens)

    def copy(self) -> "ModelSequence":
        return ModelSequence(
            salt=self.salt,
            extra=self.extra,
            flavour=self.flavour,
            num_layers=self.num_layers,
            ids=list(self.ids),
            names=list(self.names),
            layers=[list(layer) for layer in self.layers],
            num_named=self.num_named,
            num_dropped=self.num_dropped,
            family=self.family,
        )

    def keys(self, spec: KVSpec, num_tokens: int) -> list[bytes]:
        """Keys of the full pages of the first tokens."""
        return keys_of(spec, self.ids[:num_tokens], self.salt, self.extra)

    def page(self, spec: KVSpec, first_layer: int, start: int, stop: int) -> Array:
        """The page that tokens ``start`` to ``stop`` make; zeros behind them."""
        page = np.zeros(spec.page_shape, dtype=spec.np_dtype)
        for layer in range(spec.held_layers):
            for token, kv in enumerate(self.layers[first_layer + layer][start:stop]):
                page[layer, :, token] = kv
        return page


def keys_of(spec: KVSpec, ids: Sequence[int], salt: bytes, extra: bytes | None) -> list[bytes]:
    """Keys of the full pages of ``ids``."""
    num_pages = len(ids) // spec.page_tokens
    return list(page_keys(spec, ids, salt, None if extra is None else [extra] * num_pages))


def tail_key(
    spec: KVSpec, ids: Sequence[int], num_tail: int, salt: bytes, extra: bytes | None
) -> bytes:
    """Key of a saved tail: the last ``num_tail`` of ``ids``, behind full pages."""
    start = len(ids) - num_tail
    keys = keys_of(spec, ids[:start], salt, extra)
    parent = keys[-1] if keys else spec.root_key()
    return chain_key(parent, np.asarray(ids[start:], np.int32), salt, extra or b"")


def _leading(flags: Iterable[bool]) -> int:
    count = 0
    for flag in flags:
        if not flag:
            break
        count += 1
    return count
