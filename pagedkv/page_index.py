"""``PageIndex``: the pages that a pool knows, by key and by the page before them."""

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from operator import attrgetter

from pagedkv.page import Page
from pagedkv.spec import PageKey
from pagedkv.token_order import nearest

_MOST_FOUND = 8
_Children = Page | list[Page] | None
"""One child, or several in the order of ``_place``."""

_place = attrgetter("scope", "tokens")
_scope = attrgetter("scope")


class PageIndex(dict[PageKey, Page]):
    """Pages by key. Those whose tokens are known are also found by what they follow.

    Change it by ``index[key] = page`` and ``del index[key]`` only, and name a page before it is
    added. The children of a page hang on it, in the order of salt, extra and tokens; those of a
    page that is not there, or of the root key, in a dictionary.
    """

    def __init__(self) -> None:
        super().__init__()
        self._orphans: dict[PageKey, Page | list[Page]] = {}

    def __setitem__(self, key: PageKey, page: Page) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, page)
        page.children = self._orphans.pop(key, None)
        if page.tokens is not None:
            self._join(page)

    def __delitem__(self, key: PageKey) -> None:
        page = self[key]
        super().__delitem__(key)
        if page.tokens is not None:
            self._leave(page)
        if page.children is not None:
            self._orphans[key] = page.children
            page.children = None

    def nearest(
        self, parent: PageKey, ids: bytes, salt: bytes, extra: bytes
    ) -> list[tuple[int, Page]]:
        """Pages that follow ``parent`` and begin like ``ids``, those with most common ids first.

        Args:
            parent: Key of the page before them.
            ids: Token ids as int32, in bytes.
            salt: Only pages of this salt are found,
            extra: and of this extra.

        Returns:
            At most eight pages, each with the number of common ids. It costs time logarithmic in
            the number of the parent's children.
        """
        pages = _listed(self._children_of(parent))
        start = bisect_left(pages, (salt, extra), key=_scope)
        stop = bisect_right(pages, (salt, extra), lo=start, key=_scope)
        found = nearest(range(start, stop), ids, lambda at: _ids(pages[at]))
        return [(num_common, pages[at]) for num_common, at in islice(found, _MOST_FOUND)]

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` unless every page with tokens is its parent's, in order."""
        parents = [(page.key, _listed(page.children)) for page in self.values()]
        parents += [(key, _listed(children)) for key, children in self._orphans.items()]
        assert not self._orphans.keys() & self.keys()
        assert all(self._orphans.values())
        known = [page for page in self.values() if page.tokens is not None]
        assert sum(len(children) for _, children in parents) == len(known)
        for key, children in parents:
            assert all(page.parent == key for page in children)
            assert all(self.get(_key(page)) is page for page in children)
            assert children == sorted(children, key=_place)

    def _children_of(self, key: PageKey) -> _Children:
        parent = self.get(key)
        return self._orphans.get(key) if parent is None else parent.children

    def _join(self, page: Page) -> None:
        siblings = self._children_of(_parent(page))
        if siblings is None:
            self._set_children(_parent(page), page)
        elif isinstance(siblings, list):
            insort(siblings, page, key=_place)
        else:
            self._set_children(_parent(page), sorted([siblings, page], key=_place))

    def _leave(self, page: Page) -> None:
        siblings = _listed(self._children_of(_parent(page)))
        at = bisect_left(siblings, _place(page), key=_place)
        while siblings[at] is not page:  # another page with these tokens: a caller made the key up
            at += 1
        del siblings[at]
        if len(siblings) < 2:
            self._set_children(_parent(page), siblings[0] if siblings else None)

    def _set_children(self, key: PageKey, children: _Children) -> None:
        parent = self.get(key)
        if parent is not None:
            parent.children = children
        elif children is None:
            del self._orphans[key]
        else:
            self._orphans[key] = children


def _listed(children: _Children) -> list[Page]:
    if children is None:
        return []
    return children if isinstance(children, list) else [children]


def _parent(page: Page) -> PageKey:
    assert page.parent is not None
    return page.parent


def _ids(page: Page) -> bytes:
    assert page.tokens is not None
    return page.tokens


def _key(page: Page) -> PageKey:
    assert page.key is not None
    return page.key
