"""Page keys: what they depend on, and how they are sliced."""

import hashlib
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import make_spec

from pagedkv import page_keys
from pagedkv.prefix import as_tokens, chain_key, extra_of, extra_per_page

SPEC = make_spec(page_tokens=4)


def test_a_key_is_sha256_over_length_framed_fields() -> None:
    keys = page_keys(SPEC, [1, 2, 3, 4, 5, 6, 7, 8], salt=b"s", extra=[b"", b"lora"])
    parent = SPEC.root_key()
    for key, ids, extra in zip(keys, [(1, 2, 3, 4), (5, 6, 7, 8)], [b"", b"lora"], strict=True):
        fields = [parent, b"s", extra, struct.pack("<4i", *ids)]
        framed = b"".join(struct.pack("<I", len(field)) + field for field in fields)
        assert key == hashlib.sha256(framed).digest()
        parent = key


def test_the_tokens_of_a_partial_page_are_left_out() -> None:
    for count in range(13):
        assert len(page_keys(SPEC, range(count))) == count // 4


def test_a_key_names_the_whole_prefix() -> None:
    one = page_keys(SPEC, [1, 1, 1, 1, 5, 5, 5, 5])
    other = page_keys(SPEC, [2, 1, 1, 1, 5, 5, 5, 5])
    assert one[0] != other[0]
    assert one[1] != other[1]


@given(st.lists(st.integers(0, 2), max_size=16), st.lists(st.integers(0, 2), max_size=16))
def test_equal_keys_mean_equal_prefixes(a: list[int], b: list[int]) -> None:
    for at, (x, y) in enumerate(zip(page_keys(SPEC, a), page_keys(SPEC, b), strict=False)):
        stop = 4 * (at + 1)
        assert (x == y) == (a[:stop] == b[:stop])


def test_salt_extra_and_spec_keep_pages_apart() -> None:
    tokens = range(4)
    keys = [
        page_keys(SPEC, tokens),
        page_keys(SPEC, tokens, salt=b"x"),
        page_keys(SPEC, tokens, extra=[b"x"]),
        page_keys(make_spec(page_tokens=4, model="other"), tokens),
        page_keys(SPEC, range(1, 5)),
    ]
    assert len({key[0] for key in keys}) == len(keys)


def test_fields_cannot_run_into_one_another() -> None:
    ids = np.array([1], np.int32)
    parent = SPEC.root_key()
    pairs = itertools.product([b"", b"a", b"ab", b"b"], repeat=2)
    assert len({chain_key(parent, ids, salt, extra) for salt, extra in pairs}) == 16


def test_a_slice_is_a_page_keys_with_what_it_was_made_of() -> None:
    keys = page_keys(SPEC, range(20), salt=b"s")
    part = keys[1:4]
    assert type(part) is type(keys)
    assert list(part) == list(keys)[1:4]
    assert part.parents == (keys[0], keys[1], keys[2])
    assert part.tokens.tolist() == [list(range(4 * n, 4 * n + 4)) for n in (1, 2, 3)]
    assert (part.spec, part.salt) == (SPEC, b"s")
    assert list(keys[::-2]) == list(keys)[::-2]
    assert keys[-1] == list(keys)[-1]
    assert keys[0] in keys
    assert keys.index(keys[2]) == 2
    assert len(keys[5:]) == 0


def test_the_first_parent_is_the_root_key() -> None:
    assert page_keys(SPEC, range(8)).parents[0] == SPEC.root_key()
    assert page_keys(SPEC, range(3)).parents == ()


def test_keys_do_not_change_with_the_callers_array() -> None:
    tokens = np.arange(8)
    keys = page_keys(SPEC, tokens)
    tokens[:] = 0
    assert keys.tokens.ravel().tolist() == list(range(8))
    with pytest.raises(ValueError, match="read-only"):
        keys.tokens[0, 0] = 1


@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.int64, np.uint64, ">i4"])
def test_integer_types_do_not_matter(dtype: Any) -> None:
    assert list(page_keys(SPEC, np.arange(8, dtype=dtype))) == list(page_keys(SPEC, range(8)))


@pytest.mark.parametrize(
    "tokens",
    [[[1, 2], [3, 4]], 5, [1.0, 2.0], [True, False], ["1"], [-1], [2**31], [2**63], [10**30]],
)
def test_what_is_no_row_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token"):
        page_keys(SPEC, tokens)


def test_extreme_ids_are_kept() -> None:
    assert as_tokens([0, 2**31 - 1]).tolist() == [0, 2**31 - 1]
    assert as_tokens([]).dtype == np.int32


@pytest.mark.parametrize("num_extra", [0, 1, 3])
def test_extra_must_name_each_page(num_extra: int) -> None:
    with pytest.raises(ValueError, match=f"extra has {num_extra} entries.* fill 2 pages"):
        page_keys(SPEC, range(8), extra=[b""] * num_extra)


@pytest.mark.parametrize("num_tokens", [0, 8])
@pytest.mark.parametrize("salt", ["tenant", 1, None, bytearray(b"x")])
def test_a_salt_that_is_no_bytes_is_refused(num_tokens: int, salt: Any) -> None:
    with pytest.raises(TypeError, match="salt"):
        page_keys(SPEC, range(num_tokens), salt=salt)


@pytest.mark.parametrize("extra", [["a", "b"], [b"a", None], [1, 2]])
def test_extra_that_is_no_bytes_is_refused(extra: Any) -> None:
    with pytest.raises(TypeError, match="extra"):
        page_keys(SPEC, range(8), extra=extra)


def test_repr_tells_how_many_pages() -> None:
    keys = page_keys(SPEC, range(8))
    assert "2 pages of 4 tokens" in repr(keys)
    assert keys[0].hex()[:12] in repr(keys)
    assert "0 pages" in repr(page_keys(SPEC, []))


def test_one_extra_stands_for_all_pages_and_a_sequence_for_one_page_each() -> None:
    assert [extra_of(None, n) for n in range(2)] == [b"", b""]
    assert [extra_of(b"lora", n) for n in range(2)] == [b"lora", b"lora"]
    assert [extra_of([b"a", b"b"], n) for n in range(3)] == [b"a", b"b", b""]
    assert extra_per_page(None, 2) is None
    assert extra_per_page(b"lora", 2) == [b"lora", b"lora"]
    assert extra_per_page((b"a", b"b", b"c"), 2) == [b"a", b"b"]


def test_an_extra_that_does_not_cover_all_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="extra names 1 pages, but the tokens fill 2"):
        extra_per_page([b"a"], 2)
    with pytest.raises(TypeError, match=r"extra\[1\] is 'b': it must be bytes"):
        extra_per_page([b"a", "b"], 2)  # type: ignore[list-item]
