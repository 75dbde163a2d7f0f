"""What the pool remembers of pages that no store took."""

import numpy as np
import pytest
from kv_samples import make_key, make_pages, make_spec

from pagedkv import FIFO, PagedKVCache, dropped
from pagedkv.dropped import DroppedPages

SPEC = make_spec()


def test_the_last_drop_of_a_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5, 6, 7))
    monkeypatch.setattr(dropped.time, "time_ns", lambda: next(times))
    pages = DroppedPages("lru")
    for number in (1, 2, 1):
        pages.add(make_key(number))
    assert [pages.dropped_ns(make_key(number)) for number in (1, 2, 3)] == [7, 6, None]


def test_it_is_bounded() -> None:
    pages = DroppedPages("lru")
    for number in range(dropped.MAX_DROPPED + 1):
        pages.add(make_key(number))
    assert pages.dropped_ns(make_key(0)) is None
    assert pages.dropped_ns(make_key(1)) is not None


@pytest.mark.parametrize("count", [1, 3])  # one page takes the quick way
def test_a_cache_without_store_remembers_what_it_drops(count: int) -> None:
    with PagedKVCache(SPEC, 3, policy=FIFO()) as cache:
        cache.put([make_key(n) for n in range(3)], make_pages(SPEC, range(3)))
        cache.put([make_key(n) for n in range(3, 3 + count)], make_pages(SPEC, np.arange(count)))
        remembered = cache._groups[0].places.dropped
        assert remembered.policy == "fifo"
        assert cache.stats().num_pages_dropped == count
        known = [remembered.dropped_ns(make_key(n)) is not None for n in range(3)]
        assert known == [n < count for n in range(3)]
