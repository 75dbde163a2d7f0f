"""``simulate``: what a cache of some size, under some policy, would have done for a trace."""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from pagedkv.admission import AdmissionPolicy, AdmitAll, check_admission
from pagedkv.cost_model import TOKEN_NBYTES, CostModel
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.policy import EvictionPolicy, check_policy
from pagedkv.replay import Replay, replay_pool, replay_tiers
from pagedkv.spec import PageKey
from pagedkv.trace import Numbers, Request, Trace
from pagedkv.trace_lines import Progress

CLAIRVOYANT = "clairvoyant"
"""The name of the bound."""

MAX_SLOTS = 2**31 - 1

_KEPT_ACCESSES = 4_000_000
"""Keys of traces up to this long are put into lists once, not for each replay anew."""

_WARM_UP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One trace under one policy at one size.

    Args:
        policy: The policy's name.
        slots: Pages that the pool holds.
        store_slots: Pages that the store below it holds; 0 without one, or if it has no bound.
        admission: The name of the store's admission policy; None without a store.
        method: ``"replay"`` through the policy object, ``"stack distances"`` (LRU, all sizes in one
            pass), ``"clairvoyant"``, or ``"recording"`` (what a live cache did, by a real cache).
        num_requests: Requests of the trace.
        num_pages: Pages that they asked for; a page counts as often as it is asked for.
        num_hits: Those within leading runs that were held when the request came.
        hit_rate: ``num_hits / num_pages``.
        num_object_hits: Pages that were held, behind a miss too; differs from ``num_hits`` only
            where pages do not form prefixes.
        token_hit_rate: Tokens of the leading runs over all tokens of prompts; a prompt's last page
            counts with the tokens that it has.
        pool_hits: Hits in the pool.
        store_hits: Hits that had to be read from the store.
        bytes_written: Bytes written to the store.
        bytes_read: Bytes read from it.
        bytes_written_per_hit: ``bytes_written / store_hits``; None without a store hit.
        prefill_tokens_saved: Tokens of prompts that need not be computed.
        mean_ttft_s: Mean time to the first token under the cost model.
        seconds: Processor time that the simulation took, keys and compiling left out; of
            "stack distances" that of the one pass for all sizes; of a recording time by the clock.
        accesses_per_second: ``num_pages / seconds``.
    """

    policy: str
    slots: int
    store_slots: int
    admission: str | None
    method: str
    num_requests: int
    num_pages: int
    num_hits: int
    hit_rate: float
    num_object_hits: int
    token_hit_rate: float
    pool_hits: int
    store_hits: int
    bytes_written: int
    bytes_read: int
    bytes_written_per_hit: float | None
    prefill_tokens_saved: int
    mean_ttft_s: float
    seconds: float
    accesses_per_second: float


def simulate(
    trace: Trace,
    policies: Sequence[str | EvictionPolicy],
    slots: Sequence[int],
    *,
    store_slots: int | None = None,
    admission: AdmissionPolicy | None = None,
    cost: CostModel | None = None,
    one_pass: bool = True,
    progress: Progress | None = None,
) -> list[SimulationResult]:
    """Replay a trace, from cold, under each policy at each size.

    Args:
        trace: What was requested.
        policies: Names, ``"clairvoyant"`` among them, or fresh objects, of which copies are used.
            With a store the clairvoyant one has one tier as large as both.
        slots: Pages that the pool holds, one size after another.
        store_slots: Pages that the store below the pool holds; None or 0 for none.
        admission: What the store takes, everything by default; a copy is used.
        cost: What prefill and reading cost.
        one_pass: Compute LRU without a store at all sizes at once, where several are asked for.
            False replays each through the policy object; the hits are the same.
        progress: Is told how many page accesses of how many have been replayed.

    Returns:
        A result for each policy and size, policy after policy.

    Raises:
        ValueError: A size is no number of pages, or there is no policy of a name.
        TypeError: A size is no integer, or a policy no object that has all of one.
    """
    if not policies or not slots:
        raise ValueError("nothing to simulate: give at least one policy and one number of slots")
    for value in slots:
        check_slots("slots", value)
    check_slots("store_slots", store_slots or 0, least=0)
    for policy in policies:
        if not isinstance(policy, str):
            check_policy(policy)
        elif policy != CLAIRVOYANT:
            _make_policy(policy)
    admission = AdmitAll() if admission is None else admission
    check_admission(admission)
    runs = _Runs(
        trace,
        store_slots or 0,
        admission,
        cost or CostModel(),
        progress,
        num_replays=len(policies) * len(slots),
    )
    results: list[SimulationResult] = []
    for policy in policies:
        if policy == CLAIRVOYANT:
            results += runs.clairvoyant(slots)
        elif policy == "lru" and one_pass and len(slots) > 1 and runs.may_use_distances:
            results += runs.lru(slots)
        else:
            results += [runs.replay(policy, size) for size in slots]
    return results


def known_policies() -> tuple[str, ...]:
    """The names that ``simulate`` takes."""
    return (*POLICY_NAMES, CLAIRVOYANT)


class _Runs:
    """The replays of one trace."""

    def __init__(
        self,
        trace: Trace,
        store_slots: int,
        admission: AdmissionPolicy,
        cost: CostModel,
        progress: Progress | None,
        *,
        num_replays: int,
    ) -> None:
        self._trace = trace
        self._store_slots = store_slots
        self._admission = admission
        self._cost = cost
        self._progress = progress
        self._num_done = 0
        self._num_total = num_replays * trace.num_pages
        self._page_nbytes = trace.page_nbytes or TOKEN_NBYTES * trace.page_tokens
        self._keys: list[PageKey] = []
        self._batches: list[list[Request]] | None = None
        self._parent_of: dict[PageKey, PageKey | None] = {}
        self._warm: set[str] = set()

    @property
    def may_use_distances(self) -> bool:
        """Whether LRU's hits follow from stack distances."""
        trace = self._trace
        is_simple = trace.is_prefix_closed or trace.num_requests == trace.num_pages
        return is_simple and not self._store_slots

    def replay(self, policy: str | EvictionPolicy, slots: int) -> SimulationResult:
        """One policy at one size."""
        self._prepare()
        trace = self._trace
        fresh = _make_policy(policy) if isinstance(policy, str) else copy.deepcopy(policy)
        self._warm_up(fresh)
        batches = self._requests()
        num_before = self._num_done
        started = time.thread_time()
        # Where nothing ever leaves, a larger tier makes no difference; a policy may take memory
        # for each slot.
        pool = min(slots, trace.num_distinct)
        if self._store_slots:
            counted = replay_tiers(
                batches,
                fresh,
                pool,
                store_slots=self._store_slots,
                admission=copy.deepcopy(self._admission),
                parent_of=self._parent_of,
                advance=self._advance,
            )
        else:
            counted = replay_pool(
                batches,
                fresh,
                pool,
                is_prefix_closed=trace.is_prefix_closed,
                advance=self._advance,
            )
        seconds = time.thread_time() - started
        assert self._num_done - num_before == trace.num_pages
        return self._result(fresh.name, slots, "replay", counted, seconds)

    def lru(self, slots: Sequence[int]) -> list[SimulationResult]:
        """LRU at several sizes, in one pass."""
        from pagedkv.stack_distances import leading_distances

        leading_distances(self._trace.part(0, 1))  # compiled by now
        started = time.thread_time()
        distances = leading_distances(self._trace)
        seconds = time.thread_time() - started
        results = []
        for size in slots:
            is_hit = np.concatenate(([0], np.cumsum(distances <= size)))
            hits = np.diff(is_hit[self._trace.starts])
            counted = Replay(hits=hits.tolist(), num_held_hits=int(hits.sum()))
            results.append(self._result("lru", size, "stack distances", counted, seconds))
            self._advance(self._trace.num_pages)
        return results

    def clairvoyant(self, slots: Sequence[int]) -> list[SimulationResult]:
        """The bound at several sizes."""
        from pagedkv.clairvoyant import Clairvoyant

        Clairvoyant(self._trace.part(0, 1)).replay(1)  # compiled by now
        started = time.thread_time()
        ranking = Clairvoyant(self._trace)
        prepared = time.thread_time() - started
        results = []
        for size in slots:
            started = time.thread_time()
            hits, num_held_hits = ranking.replay(size + self._store_slots)
            seconds = prepared + time.thread_time() - started
            counted = Replay(hits=hits.tolist(), num_held_hits=num_held_hits)
            results.append(self._result(CLAIRVOYANT, size, CLAIRVOYANT, counted, seconds))
            self._advance(self._trace.num_pages)
        return results

    def _prepare(self) -> None:
        """Make the keys, and for short traces the lists of them, once."""
        if self._keys:
            return
        trace = self._trace
        self._keys = trace.keys()
        if trace.num_pages <= _KEPT_ACCESSES:
            self._batches = list(trace.requests(self._keys))
        if self._store_slots:
            parents = trace.parents.tolist()
            self._parent_of = {
                key: None if parent < 0 else self._keys[parent]
                for key, parent in zip(self._keys, parents, strict=True)
            }

    def _warm_up(self, policy: EvictionPolicy) -> None:
        """Have whatever compiles at first use compiled, so that it is not measured."""
        if policy.name not in self._warm:
            self._warm.add(policy.name)
            batches = [batch[:_WARM_UP] for batch in islice(self._requests(), 1)]
            replay_pool(
                batches,
                copy.deepcopy(policy),
                min(_WARM_UP, self._trace.num_distinct),
                is_prefix_closed=self._trace.is_prefix_closed,
                advance=lambda _: None,
            )

    def _requests(self) -> "Iterator[list[Request]]":
        return iter(self._batches or self._trace.requests(self._keys))

    def _advance(self, num_pages: int) -> None:
        self._num_done += num_pages
        if self._progress is not None:
            self._progress(self._num_done, self._num_total)

    def _result(
        self, name: str, slots: int, method: str, counted: Replay, seconds: float
    ) -> SimulationResult:
        trace = self._trace
        hits = np.array(counted.hits, np.int64)
        read = np.array(counted.store_hits or [0] * len(hits), np.int64)
        cached = np.minimum(hits * trace.page_tokens, trace.prompt_tokens)
        num_hits, num_read = int(hits.sum()), int(read.sum())
        bytes_written = counted.num_pages_written * self._page_nbytes
        ttft = self._ttft_s(cached, read)
        return SimulationResult(
            policy=name,
            slots=slots,
            store_slots=self._store_slots,
            admission=self._admission.name if self._store_slots else None,
            method=method,
            num_requests=trace.num_requests,
            num_pages=trace.num_pages,
            num_hits=num_hits,
            hit_rate=num_hits / trace.num_pages,
            num_object_hits=counted.num_held_hits,
            token_hit_rate=int(cached.sum()) / max(1, int(trace.prompt_tokens.sum())),
            pool_hits=num_hits - num_read,
            store_hits=num_read,
            bytes_written=bytes_written,
            bytes_read=num_read * self._page_nbytes,
            bytes_written_per_hit=bytes_written / num_read if num_read else None,
            prefill_tokens_saved=int(cached.sum()),
            mean_ttft_s=float(ttft.mean()),
            seconds=seconds,
            accesses_per_second=trace.num_pages / max(seconds, 1e-9),
        )

    def _ttft_s(self, cached: Numbers, read: Numbers) -> npt.NDArray[np.float64]:
        prefill = self._cost.prefill_s(self._trace.prompt_tokens, cached)
        return prefill + self._cost.read_s(read * self._page_nbytes)


def _make_policy(name: str) -> EvictionPolicy:
    if name not in POLICY_NAMES:
        raise ValueError(f"there is no policy {name!r}: take one of {', '.join(known_policies())}")
    return make_policy(name)


def check_slots(name: str, value: object, *, least: int = 1) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``value`` is a size that can be simulated."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: it must be an integer")
    if not least <= value <= MAX_SLOTS:
        raise ValueError(f"{name} is {value}: it must be in {least}..{MAX_SLOTS:,} pages")
