"""RecentKeys: what was seen lately, in bounded memory."""

import pytest
from kv_samples import make_key

from pagedkv.recent import RecentKeys

KEYS = [make_key(number) for number in range(40)]


def test_what_was_seen_is_remembered_until_it_is_forgotten() -> None:
    recent = RecentKeys(10)
    recent.add(KEYS[:3])
    assert KEYS[0] in recent
    assert KEYS[3] not in recent
    assert recent.among(KEYS[1:6]) == set(KEYS[1:3])
    recent.discard({KEYS[1]})
    assert recent.among(KEYS) == {KEYS[0], KEYS[2]}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("at_once", [1, 3, 40])
def test_no_more_than_the_limit_is_remembered_and_the_oldest_go_first(
    limit: int, at_once: int
) -> None:
    recent = RecentKeys(limit)
    for start in range(0, 40, at_once):
        recent.add(KEYS[start : start + at_once])
        assert len(recent) <= limit
        seen = KEYS[: min(40, start + at_once)]
        kept = [key in recent for key in seen]
        assert kept == sorted(kept), "an older key was remembered and a younger one forgotten"


def test_keys_that_come_again_take_no_more_room() -> None:
    recent = RecentKeys(8)
    for _ in range(20):
        recent.add(KEYS[:3])
    assert recent.among(KEYS) == set(KEYS[:3])
