"""Pages by key, and by what they follow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import make_spec

from pagedkv import PageKey
from pagedkv.page import Page
from pagedkv.page_index import PageIndex
from pagedkv.prefix import chain_key
from pagedkv.token_order import num_common

ROOT = make_spec().root_key()


def make_child(
    ids: list[int], salt: bytes = b"", extra: bytes = b"", parent: PageKey = ROOT
) -> Page:
    tokens = np.array(ids, np.int32)
    page = Page()
    page.name(chain_key(parent, tokens, salt, extra), parent, tokens, salt, extra)
    return page


def add(index: PageIndex, page: Page) -> Page:
    assert page.key is not None
    index[page.key] = page
    return page


def found(
    index: PageIndex, ids: list[int], salt: bytes = b"", extra: bytes = b"", parent: PageKey = ROOT
) -> list[tuple[int, Page]]:
    return index.nearest(parent, np.array(ids, np.int32).tobytes(), salt, extra)


def test_siblings_are_found_by_their_tokens() -> None:
    index = PageIndex()
    far, near = add(index, make_child([1, 2, 3, 4])), add(index, make_child([1, 2, 9, 9]))
    add(index, make_child([5, 5, 5, 5]))
    assert found(index, [1, 2, 9, 8]) == [(3, near), (2, far)]
    assert found(index, [7]) == []
    index.check_invariants()


def test_other_parents_salts_and_extras_are_other_families() -> None:
    index = PageIndex()
    ids = [1, 2, 3, 4]
    plain = add(index, make_child(ids))
    salted = add(index, make_child(ids, b"a"))
    dressed = add(index, make_child(ids, b"", b"a"))
    assert plain.key is not None
    below = add(index, make_child(ids, parent=plain.key))
    assert found(index, ids) == [(4, plain)]
    assert found(index, ids, b"a") == [(4, salted)]
    assert found(index, ids, b"", b"a") == [(4, dressed)]
    assert found(index, ids, parent=plain.key) == [(4, below)]
    assert found(index, ids, b"a", b"a") == []


def test_a_page_without_tokens_is_found_by_its_key_only() -> None:
    index = PageIndex()
    key = PageKey(bytes(32))
    index[key] = Page(key)
    index.check_invariants()
    del index[key]
    index.check_invariants()
    assert not index


def test_a_page_that_takes_anothers_place_takes_its_family_too() -> None:
    index = PageIndex()
    add(index, make_child([1, 2, 3, 4]))
    other = add(index, make_child([1, 2, 3, 4]))
    assert found(index, [1]) == [(1, other)]
    index.check_invariants()


def test_made_up_keys_do_not_confuse_it() -> None:
    index = PageIndex()
    pages = [make_child([1, 2, 3, 4]) for _ in range(3)]
    for number, page in enumerate(pages):
        page.key = PageKey(bytes([number]) * 32)
        add(index, page)
    assert pages[1].key is not None
    del index[pages[1].key]
    index.check_invariants()
    assert {id(page) for _, page in found(index, [1])} == {id(pages[0]), id(pages[2])}


@given(
    st.lists(
        st.tuples(st.booleans(), st.tuples(*[st.integers(0, 2)] * 3), st.sampled_from([b"", b"s"])),
        max_size=40,
    )
)
def test_it_answers_like_a_list_of_all_pages(
    steps: list[tuple[bool, tuple[int, ...], bytes]],
) -> None:
    index, known = PageIndex(), {}
    for is_added, ids, salt in steps:
        page = make_child(list(ids), salt)
        assert page.key is not None
        if is_added and page.key not in known:
            known[page.key] = add(index, page)
        elif not is_added and page.key in known:
            del index[page.key]
            del known[page.key]
        index.check_invariants()
        for salt_asked in (b"", b"s"):
            wanted = np.array(ids, np.int32).tobytes()
            counts = [
                num_common(p.tokens or b"", wanted) for p in known.values() if p.salt == salt_asked
            ]
            best = index.nearest(ROOT, wanted, salt_asked, b"")
            assert (best[0][0] if best else 0) == max(counts, default=0)
