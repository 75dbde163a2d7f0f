"""``simulate_recorded``: what another policy, or another size, would have done for a live cache."""

import copy
import time
from collections.abc import Sequence

import numpy as np

from pagedkv.admission import AdmissionPolicy, AdmitAll, check_admission, make_admission
from pagedkv.cost_model import CostModel
from pagedkv.policies import make_policy
from pagedkv.policy import EvictionPolicy, check_policy
from pagedkv.recorded import Recorded
from pagedkv.recorded_replay import ReplayCounts, replay_recorded
from pagedkv.simulate import SimulationResult, check_slots
from pagedkv.trace_lines import Progress


def simulate_recorded(
    recorded: Recorded,
    policies: Sequence[str | EvictionPolicy],
    slots: Sequence[int] = (),
    *,
    admission: AdmissionPolicy | None = None,
    cost: CostModel | None = None,
    progress: Progress | None = None,
) -> list[SimulationResult]:
    """Replay a recorded trace under each policy at each size.

    A hit counts as in ``CacheStats``. Where the cache had a store, this one has one without bound.

    Args:
        recorded: What was done with the cache.
        policies: Names, or fresh objects, of which copies are used; ``"clairvoyant"`` is none of
            them, since what comes next depends on what was hit.
        slots: Slots of each layer group, one size after another; as recorded if there is none.
        admission: What the store takes in, a copy is used; as recorded if None.
        cost: What prefill and reading cost.
        progress: Is told how many operations of how many have been replayed.

    Returns:
        A result for each policy and size, policy after policy. ``slots`` of a cache whose layer
        groups differ in size is that of the first.

    Raises:
        ValueError: There is no policy, or admission policy, of a name, or a size is no number of
            slots.
        TypeError: A size is no integer, or a policy no object that has all of one.
    """
    for size in slots:
        check_slots("slots", size)
    makers = [make_policy(one) if isinstance(one, str) else one for one in policies]
    for one in makers:
        check_policy(one)
    if admission is None and recorded.uses_admission:
        admission = make_admission(recorded.admission)
    if admission is not None:
        check_admission(admission)
    admission_name = None
    if recorded.has_store:
        admission_name = AdmitAll.name if admission is None else admission.name
    num_groups = len(recorded.num_slots)
    sizes = [(size,) * num_groups for size in slots] or [recorded.num_slots]
    total = len(makers) * len(sizes) * max(1, len(recorded.operations))
    results: list[SimulationResult] = []
    for policy in makers:
        for num_slots in sizes:
            done = len(results) * len(recorded.operations)

            def advance(number: int, _: int, done: int = done) -> None:
                if progress is not None:
                    progress(done + number, total)

            began = time.perf_counter()
            counts = replay_recorded(
                recorded,
                copy.deepcopy(policy),
                num_slots,
                admission=copy.deepcopy(admission),
                progress=advance,
            )
            seconds = time.perf_counter() - began
            results.append(
                _result(
                    recorded,
                    policy.name,
                    num_slots[0],
                    admission_name,
                    counts,
                    cost or CostModel(),
                    seconds,
                )
            )
    return results


def _result(
    recorded: Recorded,
    name: str,
    slots: int,
    admission: str | None,
    counts: ReplayCounts,
    cost: CostModel,
    seconds: float,
) -> SimulationResult:
    requested = np.array(counts.requested, np.int64)
    hits = np.minimum(np.array(counts.hits, np.int64), requested)
    read = np.array(counts.store_hits, np.int64)
    prompts, cached = requested * recorded.page_tokens, hits * recorded.page_tokens
    num_pages, num_hits = int(requested.sum()), counts.num_pool_hits + counts.num_store_hits
    bytes_written = counts.num_pages_stored * recorded.page_nbytes
    ttft = cost.prefill_s(prompts, cached) + cost.read_s(read * recorded.page_nbytes)
    return SimulationResult(
        policy=name,
        slots=slots,
        store_slots=0,
        admission=admission,
        method="recording",
        num_requests=len(requested),
        num_pages=num_pages,
        num_hits=num_hits,
        hit_rate=num_hits / max(1, num_pages),
        num_object_hits=num_hits,
        token_hit_rate=num_hits / max(1, num_pages),
        pool_hits=counts.num_pool_hits,
        store_hits=counts.num_store_hits,
        bytes_written=bytes_written,
        bytes_read=counts.num_pages_loaded * recorded.page_nbytes,
        bytes_written_per_hit=(
            bytes_written / counts.num_store_hits if counts.num_store_hits else None
        ),
        prefill_tokens_saved=int(cached.sum()),
        mean_ttft_s=float(ttft.mean()) if len(ttft) else 0.0,
        seconds=seconds,
        accesses_per_second=num_pages / max(seconds, 1e-9),
    )
