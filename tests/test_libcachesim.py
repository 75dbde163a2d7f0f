"""Of pages that stand alone, the policies hit what those of libCacheSim hit, one by one."""

import json
import random
from itertools import islice

import libcachesim
import pytest
from kv_samples import make_key
from store_samples import REPOSITORY

from pagedkv.policies import make_policy
from pagedkv.spec import PageKey

TRACE = REPOSITORY.parent / "shared/traces/mooncake_conversation_trace.jsonl"
PEERS = {
    "fifo": libcachesim.FIFO,
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "clock": libcachesim.Clock,
    "sieve": libcachesim.Sieve,
    "s3-fifo": libcachesim.S3FIFO,
    "2q": libcachesim.TwoQ,
}
ABOUT = {"arc": libcachesim.ARC}  # its target moves before room is made, ours after that


def hits(name: str, stream: list[int], slots: int) -> int:
    keys: dict[int, PageKey] = {number: make_key(number) for number in set(stream)}
    policy = make_policy(name)
    policy.start(slots)
    resident: set[PageKey] = set()
    num_hits = 0
    for number in stream:
        key = keys[number]
        if key in resident:
            num_hits += 1
            policy.hold([key])
        elif len(resident) == slots:
            gone = list(islice(policy.victims(), 1))
            policy.evict(gone)
            resident.difference_update(gone)
        resident.add(key)
        policy.use([key], [None])
    assert len(policy) == len(resident) <= slots
    return num_hits


def peer_hits(peer: type[libcachesim.CacheBase], stream: list[int], slots: int) -> int:
    cache = peer(cache_size=slots, hashpower=16)
    return sum(cache.get(libcachesim.Request(obj_id=number, obj_size=1)) for number in stream)


@pytest.fixture(scope="module")
def zipf() -> list[int]:
    numbers = random.Random(6)
    weights = [1 / (rank + 1) ** 0.9 for rank in range(2000)]
    return numbers.choices(range(2000), weights, k=20_000)


@pytest.fixture(scope="module")
def drift() -> list[int]:
    """What is popular moves on, with loops and pages that come once in between."""
    numbers = random.Random(7)
    stream = []
    for step in range(200):
        stream += [3 * step + int(numbers.expovariate(0.02)) for _ in range(60)]
        stream += range(10_000, 10_030)
        stream += range(20_000 + 10 * step, 20_010 + 10 * step)
    return stream


@pytest.fixture(scope="module")
def mooncake() -> list[int]:
    if not TRACE.exists():
        pytest.skip(f"there is no {TRACE.name} beside the repository")
    with TRACE.open() as lines:
        numbers = (number for line in lines for number in json.loads(line)["hash_ids"])
        return list(islice(numbers, 60_000))


@pytest.mark.parametrize("slots", [20, 100, 777])
@pytest.mark.parametrize("stream", ["zipf", "drift"])
@pytest.mark.parametrize("name", PEERS)
def test_hits_equal_those_of_libcachesim(
    name: str, stream: str, slots: int, request: pytest.FixtureRequest
) -> None:
    numbers = request.getfixturevalue(stream)
    assert hits(name, numbers, slots) == peer_hits(PEERS[name], numbers, slots) > 0


@pytest.mark.parametrize("slots", [20, 100, 777])
@pytest.mark.parametrize("stream", ["zipf", "drift"])
def test_hits_of_arc_are_about_those_of_libcachesim(
    stream: str, slots: int, request: pytest.FixtureRequest
) -> None:
    numbers = request.getfixturevalue(stream)
    (name,) = ABOUT
    assert hits(name, numbers, slots) == pytest.approx(
        peer_hits(ABOUT[name], numbers, slots), rel=0.01
    )


@pytest.mark.parametrize("slots", [500, 5859])
@pytest.mark.parametrize("name", PEERS)
def test_hits_of_a_real_trace_equal_those_of_libcachesim(
    name: str, slots: int, mooncake: list[int]
) -> None:
    assert hits(name, mooncake, slots) == peer_hits(PEERS[name], mooncake, slots) > 0
