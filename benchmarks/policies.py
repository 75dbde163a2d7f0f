"""Eviction policies on a trace: ours, the known ones, the clairvoyant bound, and libCacheSim.

    python benchmarks/policies.py [--trace FILE] [--part NAME] [--rounds 5] [--json]

Without ``--trace`` a made workload is replayed. ``docs/benchmarks.md`` says what each part shows.
"""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _workloads import Requests, named
from measure.compare import Bench, Target, Unit, run

from pagedkv.admission import ADMISSION_NAMES, make_admission
from pagedkv.policies import POLICY_NAMES
from pagedkv.simulate import CLAIRVOYANT, SimulationResult, simulate
from pagedkv.trace import Trace
from pagedkv.trace_builder import TraceBuilder
from pagedkv.traces import read_trace

SIZES = (1000, 5859, 10_000, 30_000)
OURS = "pagedkv"
KNOWN = tuple(name for name in POLICY_NAMES if name not in {OURS, "lru-2"})
"""What ours is to be better than; LRU-2 is looked at apart."""
OF_BEST = {1000: 0.97, 5859: 1.15, 10_000: 0.97, 30_000: 0.97}
"""The least share of what the best of the known ones hits."""
OF_LRU = 0.97
WORKLOAD_SIZES = (30, 300, 1000, 3000)
LEAST_HIT_RATE = 0.01
SPEEDS = {"fifo": 1e6, "lru": 1e6, OURS: 2.5e5}
"""Page accesses a second that are aimed at."""
STORE_SIZES = (10_000, 30_000)

PAGES = Unit(name="% of pages", amount=1, is_rate=True)
GAP = Unit(name="% of the gap", amount=1, is_rate=True)
OBJECTS = Unit(name="hits", amount=1, is_rate=True)
SPEED = Unit(name="accesses/s", amount=1, is_rate=True)
WRITTEN = Unit(name="MiB a hit", amount=1, is_rate=False)


def hit_rates(bench: Bench) -> None:
    """Ours beside every other policy, at each size."""
    trace = _trace(bench)
    found = _at_sizes(bench, trace, [*POLICY_NAMES, CLAIRVOYANT])
    for size in _sizes(bench):
        for name in (*POLICY_NAMES, CLAIRVOYANT):
            if name != OURS:
                _compare(bench, f"hit rate, {size:,} pages", found, size, name)


def ours(bench: Bench) -> None:
    """Ours beside the best of the others, and how much of the gap to the bound it closes."""
    trace = _trace(bench)
    found = _at_sizes(bench, trace, [*POLICY_NAMES, CLAIRVOYANT])
    for size, full_size in zip(_sizes(bench), SIZES, strict=True):
        case = f"hit rate, {size:,} pages, and the best"
        best = max(KNOWN, key=lambda name: found[name, size].num_hits)
        aims = {best: OF_BEST[full_size], "lru-2": 1.05 if full_size == 5859 else OF_BEST[1000]}
        for name, aim in aims.items():
            _compare(bench, case, found, size, name, Target(ratio=aim))
        lru, bound = found["lru", size].num_hits, found[CLAIRVOYANT, size].num_hits
        closed = (found[OURS, size].num_hits - lru) / max(1, bound - lru)
        aim = Target(ratio=1) if full_size in {1000, 5859} else None
        case = f"gap from lru to {CLAIRVOYANT} closed, {size:,} pages"
        bench.add(case, GAP, 100 * closed, 25.0, "a quarter", target=aim)


def halves(bench: Bench) -> None:
    """The first and the second half of the trace, each from cold."""
    trace = _trace(bench)
    middle = trace.num_requests // 2
    parts = {"first": trace.part(0, middle), "second": trace.part(middle, trace.num_requests)}
    for which, part in parts.items():
        found = _at_sizes(bench, part, [*POLICY_NAMES, CLAIRVOYANT])
        for size in _sizes(bench):
            case = f"hit rate, {which} half, {size:,} pages"
            best = max((*KNOWN, "lru-2"), key=lambda name: found[name, size].num_hits)
            _compare(bench, case, found, size, "lru", Target(ratio=OF_LRU))
            if best != "lru":
                _compare(bench, case, found, size, best)
            _compare(bench, case, found, size, CLAIRVOYANT)


def workloads(bench: Bench) -> None:
    """Made streams, whatever trace is given: ours beside LRU at the size where it does worst."""
    for name, requests in named(bench.count(8, 1) / 8):
        trace = _trace_of(name, requests)
        results = simulate(trace, [OURS, "lru"], WORKLOAD_SIZES)
        found = {(one.policy, one.slots): one for one in results}
        # where LRU hits next to nothing, a ratio says nothing
        sizes = [size for size in WORKLOAD_SIZES if found["lru", size].hit_rate >= LEAST_HIT_RATE]
        if not sizes:
            bench.add(
                f"{name}: LRU hits less than 1 %", PAGES, 0.0, None, "nothing to lose: not run"
            )
            continue
        worst = min(sizes, key=lambda at: found[OURS, at].num_hits / found["lru", at].num_hits)
        _compare(bench, f"{name}, {worst:,} pages", found, worst, "lru", Target(ratio=OF_LRU))


def speed(bench: Bench) -> None:
    """Page accesses a second of each policy, in one thread, in the best round.

    Other processes slow it down, by the caches that they share; none makes it faster.
    """
    trace, size = _trace(bench), _sizes(bench)[1]
    for name in POLICY_NAMES:
        figures = []
        for _ in range(bench.rounds):
            (result,) = simulate(trace, [name], [size], one_pass=False)
            figures.append(result.accesses_per_second)
        aim = SPEEDS.get(name)
        bench.add(
            f"replay, {size:,} pages: {name}",
            SPEED,
            max(figures),
            aim,
            "what is aimed at" if aim else "nothing is aimed at: not run",
            target=Target(ratio=1) if aim else None,
        )


def admission(bench: Bench) -> None:
    """What admission policies write for a hit in the store, and what they lose."""
    trace, slots = _trace(bench), _sizes(bench)[1]
    for full_size in STORE_SIZES:
        store_slots = bench.count(full_size, 200)
        found = {
            which: simulate(
                trace,
                [OURS],
                [slots],
                store_slots=store_slots,
                admission=make_admission(which),
            )[0]
            for which in ADMISSION_NAMES
        }
        for which in ADMISSION_NAMES[1:]:
            one, all_in = found[which], found["all"]
            case = f"pool of {slots:,}, store of {store_slots:,}, admission {which}"
            written = [(r.bytes_written_per_hit or 0.0) / 2**20 for r in (one, all_in)]
            bench.add(f"{case}: written", WRITTEN, written[0], written[1], "admission all")
            rates = [100 * r.hit_rate for r in (one, all_in)]
            bench.add(f"{case}: hit rate", PAGES, rates[0], rates[1], "admission all")


def objects(bench: Bench) -> None:
    """Every page on its own, as in an object cache: the hits of libCacheSim, one for one."""
    trace = _on_their_own(_trace(bench))
    try:
        import libcachesim
    except ImportError:
        bench.add("object hits", OBJECTS, 0, None, "libcachesim is not installed: not run")
        return
    peers = {
        "fifo": libcachesim.FIFO,
        "lru": libcachesim.LRU,
        "lfu": libcachesim.LFU,
        "clock": libcachesim.Clock,
        "sieve": libcachesim.Sieve,
        "s3-fifo": libcachesim.S3FIFO,
        "2q": libcachesim.TwoQ,
        "arc": libcachesim.ARC,
        CLAIRVOYANT: libcachesim.Belady,
    }
    later = _next_requests(trace)
    for size in _sizes(bench):
        for name, peer in peers.items():
            (mine,) = simulate(trace, [name], [size])
            theirs = _peer_hits(peer(cache_size=size), trace, later)
            verdict = "equal" if mine.num_object_hits == theirs else "different"
            bench.add(
                f"object hits, {size:,} pages: {name}",
                OBJECTS,
                mine.num_object_hits,
                theirs,
                f"libCacheSim: {verdict}",
                target=Target(ratio=1),
            )


def _peer_hits(peer: Any, trace: Trace, later: list[int]) -> int:
    import libcachesim

    request = libcachesim.Request(obj_size=1)
    hits = 0
    for time, page in enumerate(trace.pages.tolist()):
        request.obj_id = page
        request.clock_time = time
        request.next_access_vtime = later[time]
        hits += peer.get(request)
    return hits


def _next_requests(trace: Trace) -> list[int]:
    """When each access's page is requested next; 2^63 - 1 for never."""
    seen: dict[int, int] = {}
    pages = trace.pages.tolist()
    later = [0] * len(pages)
    for access in range(len(pages) - 1, -1, -1):
        later[access] = seen.get(pages[access], 2**63 - 1)
        seen[pages[access]] = access
    return later


def _on_their_own(trace: Trace) -> Trace:
    """The same pages, one a request, without prefixes."""
    return replace(
        trace,
        is_chained=False,
        starts=np.arange(trace.num_pages + 1),
        times=np.zeros(trace.num_pages),
        prompt_tokens=np.full(trace.num_pages, trace.page_tokens),
        output_tokens=np.zeros(trace.num_pages, np.int64),
        parents=np.full(trace.num_distinct, -1),
    )


Found = dict[tuple[str, int], SimulationResult]


def _at_sizes(bench: Bench, trace: Trace, names: list[str]) -> Found:
    """What each policy does at each size."""
    task = bench.progress.add_task("replaying", total=None)
    results = simulate(
        trace,
        names,
        _sizes(bench),
        progress=lambda done, total: bench.progress.update(task, completed=done, total=total),
    )
    bench.progress.remove_task(task)
    return {(result.policy, result.slots): result for result in results}


def _compare(
    bench: Bench, case: str, found: Found, size: int, name: str, target: Target | None = None
) -> None:
    mine, other = found[OURS, size].hit_rate, found[name, size].hit_rate
    bench.add(case, PAGES, 100 * mine, 100 * other, name, target=target)


def _sizes(bench: Bench) -> tuple[int, ...]:
    return tuple(bench.count(size, size // 50) for size in SIZES)


def _trace(bench: Bench) -> Trace:
    path = bench.files["trace"]
    if path is None:
        return _made_trace(bench.count(12_000, 300))
    return _read(path)


@cache
def _read(path: Path) -> Trace:
    return read_trace(path)


@cache
def _made_trace(num_requests: int) -> Trace:
    """Conversations that grow by a few pages a turn, and many that end after the first."""
    draw = random.Random(0)
    builder = TraceBuilder(Path("made"), "mooncake", page_tokens=512)
    running: list[tuple[int, int]] = []  # a conversation's number, and its pages
    for number in range(num_requests):
        if running and draw.random() < 0.55:
            conversation, length = running.pop(int(len(running) * draw.random() ** 0.5))
            length += draw.randrange(1, 6)
        else:
            conversation, length = number, draw.randrange(2, 30)
        if draw.random() < 0.6:
            running.append((conversation, length))
        # the first page is everyone's; the last one ends where the prompt ends
        names = ["system", *((conversation, at) for at in range(length)), ("end", number)]
        builder.add(
            number + 1,
            names,
            time=float(number),
            prompt_tokens=512 * (length + 1) + 100,
            output_tokens=100,
        )
    return builder.build()


def _trace_of(name: str, requests: Requests) -> Trace:
    builder = TraceBuilder(Path(name), "mooncake", page_tokens=512)
    for number, ids in enumerate(requests):
        tokens = 512 * len(ids)
        builder.add(number + 1, ids, time=float(number), prompt_tokens=tokens, output_tokens=0)
    return builder.build()


PARTS = {
    "hit-rates": hit_rates,
    "ours": ours,
    "halves": halves,
    "workloads": workloads,
    "speed": speed,
    "admission": admission,
    "objects": objects,
}

if __name__ == "__main__":
    run(
        "Eviction policies on a trace",
        PARTS,
        files={"trace": "a trace that `pagedkv simulate` reads (a made workload)"},
        footer="Leading-run hits, from cold; ratio: how many times better ours is. Speeds are"
        " those of the best round.",
    )
