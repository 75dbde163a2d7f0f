"""Page keys: the content address of every page of a token sequence."""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final, overload

import numpy as np
import numpy.typing as npt

from pagedkv.spec import KVSpec, PageKey

Extra = bytes | Sequence[bytes] | None
"""What a page's KV depends on beside its tokens: for every page the same, or one for each."""
Tokens = npt.NDArray[np.int32]
"""Token ids, one dimension."""

_FRAME = struct.Struct("<I")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageKeys(Sequence[PageKey]):
    """The keys of consecutive full pages of one token sequence, with what they were made of.

    A sequence of 32-byte keys; a slice is a ``PageKeys`` again.

    Args:
        spec: The spec whose root key the chain starts from.
        keys: Key of each page.
        parents: Key of the page before each page; the spec's root key before the first.
        tokens: Token ids of each page, ``(page, token)`` int32, read-only.
        salt: The tenant's salt that went into every key.
        extra: What else went into the key of each page; nothing by default.
    """

    spec: KVSpec
    keys: tuple[PageKey, ...]
    parents: tuple[PageKey, ...]
    tokens: Tokens
    salt: bytes = b""
    extra: tuple[bytes, ...] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self.keys)

    @overload
    def __getitem__(self, index: int) -> PageKey: ...
    @overload
    def __getitem__(self, index: slice) -> "PageKeys": ...
    def __getitem__(self, index: int | slice) -> "PageKey | PageKeys":
        if isinstance(index, slice):
            return PageKeys(
                spec=self.spec,
                keys=self.keys[index],
                parents=self.parents[index],
                tokens=self.tokens[index],
                salt=self.salt,
                extra=None if self.extra is None else self.extra[index],
            )
        return self.keys[index]

    def __repr__(self) -> str:
        first = f" from {self.keys[0].hex()[:12]}" if self.keys else ""
        return f"<PageKeys: {len(self.keys)} pages of {self.spec.page_tokens} tokens{first}>"


def page_keys(
    spec: KVSpec,
    tokens: npt.ArrayLike,
    salt: bytes = b"",
    extra: Sequence[bytes] | None = None,
) -> PageKeys:
    """The keys of all full pages of ``tokens``; the tokens of a last, partial page are left out.

    A key is SHA-256 over length-framed fields: the parent's key, ``salt``, the page's ``extra`` and
    its token ids as little-endian int32. It so names the whole prefix up to the page's end.

    Args:
        spec: Geometry and model; its root key is the parent of the first page.
        tokens: Token ids, one dimension, each in 0..2**31-1.
        salt: Keeps tenants apart: equal tokens under another salt never match.
        extra: For each full page, what else its KV depends on (LoRA, image hashes).

    Raises:
        ValueError: Tokens are not one row of ids, or ``extra`` has another length than pages.
        TypeError: ``salt`` or an ``extra`` is not bytes.
    """
    check_salt(salt)
    ids = as_tokens(tokens)
    num_pages = len(ids) // spec.page_tokens
    if extra is not None:
        check_extra(extra)
        if len(extra) != num_pages:
            raise ValueError(
                f"extra has {len(extra)} entries, but the tokens fill {num_pages} pages"
            )
    pages = ids[: num_pages * spec.page_tokens].reshape(num_pages, spec.page_tokens)
    root = spec.root_key()
    keys = _chain(root, pages, salt, extra)
    pages.flags.writeable = False
    return PageKeys(
        spec=spec,
        keys=tuple(keys),
        parents=(root, *keys[:-1]) if keys else (),
        tokens=pages,
        salt=salt,
        extra=None if extra is None else tuple(extra),
    )


def _chain(
    root: PageKey, pages: Tokens, salt: bytes, extra: Sequence[bytes] | None
) -> list[PageKey]:
    """``chain_key`` of page after page, with all that can be done for many of them at once."""
    ids = pages.astype("<i4", copy=False).tobytes()
    step = 4 * pages.shape[1]
    size, after_salt = _FRAME.pack(step), _framed(salt)
    between = after_salt + _framed(b"") + size
    before, sha256 = _FRAME.pack(len(root)), hashlib.sha256
    parent, keys = root, []
    for number, at in enumerate(range(0, len(ids), step)):
        if extra is not None:
            between = after_salt + _framed(extra[number]) + size
        parent = PageKey(sha256(before + parent + between + ids[at : at + step]).digest())
        keys.append(parent)
    return keys


def chain_key(parent: PageKey, tokens: Tokens, salt: bytes = b"", extra: bytes = b"") -> PageKey:
    """The key of one page (or saved tail) with these token ids after ``parent``."""
    ids = tokens.astype("<i4", copy=False).tobytes()
    framed = b"".join(_framed(field) for field in (parent, salt, extra, ids))
    return PageKey(hashlib.sha256(framed).digest())


def _framed(field: bytes) -> bytes:
    return _FRAME.pack(len(field)) + field


def as_tokens(tokens: npt.ArrayLike) -> Tokens:
    """``tokens`` as a fresh int32 array ``(token,)``; ``ValueError`` if they are no token ids."""
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise ValueError(f"tokens have shape {ids.shape}: give one row of token ids")
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"tokens are {ids.dtype}: give integers")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > 2**31 - 1):
        raise ValueError(
            f"token ids reach from {ids.min()} to {ids.max()}: they must be in 0..2**31-1"
        )
    return ids.astype(np.int32, copy=True)


def check_salt(salt: object) -> None:
    """Raise ``TypeError`` unless ``salt`` is bytes."""
    if not isinstance(salt, bytes):
        raise TypeError(f"salt is {salt!r}: it must be bytes")


def extra_of(extra: Extra, page: int) -> bytes:
    """The extra of page number ``page``: none if it has no value of its own."""
    if extra is None or isinstance(extra, bytes):
        return extra or b""
    return extra[page] if page < len(extra) else b""


def extra_per_page(extra: Extra, num_pages: int) -> list[bytes] | None:
    """A value for each of ``num_pages`` full pages, as ``page_keys`` takes them.

    Raises:
        ValueError: ``extra`` has fewer values.
        TypeError: It is neither bytes nor a sequence of bytes.
    """
    if extra is None:
        return None
    if isinstance(extra, bytes):
        return [extra] * num_pages
    check_extra(extra)
    if len(extra) < num_pages:
        raise ValueError(f"extra names {len(extra)} pages, but the tokens fill {num_pages}")
    return list(extra[:num_pages])


def check_extra(extra: object) -> None:
    """Raise ``TypeError`` unless ``extra`` is a sequence of bytes, one for each page."""
    if isinstance(extra, str | bytes) or not isinstance(extra, Sequence):
        raise TypeError(f"extra is {extra!r}: it must be a sequence of bytes, one for each page")
    for number, value in enumerate(extra):
        if not isinstance(value, bytes):
            raise TypeError(f"extra[{number}] is {value!r}: it must be bytes")
