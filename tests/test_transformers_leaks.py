"""A thousand calls of ``generate`` of all kinds, in any order, leave nothing behind."""

import gc
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from tiny_models import open_cache, random_ids
from transformers import PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder", "no_fsync"),
]

NUM_CALLS = 1000
NUM_WARM = 400
"""Calls after which the process is as large as it gets."""
MOST_GROWTH = 16 * 2**20

KINDS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3},
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"prompt_lookup_num_tokens": 3},
    {"prefill_chunk_size": 16},
]


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def random_batch(choose: random.Random, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts out of ten texts, some of them short, with pads before those."""
    counts = [choose.randint(1, 70) for _ in range(num_rows)]
    ids = torch.zeros(num_rows, max(counts), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, count in enumerate(counts):
        ids[row, -count:] = random_ids(70, seed=choose.randrange(10))[0, :count]
        mask[row, -count:] = 1
    return ids, mask


def generate_somehow(model: PreTrainedModel, kv: pk.PagedKVCache, choose: random.Random) -> str:
    """One call; what became of it."""
    options = choose.choice(KINDS)
    num_rows = 1 if "prompt_lookup_num_tokens" in options else choose.randint(1, 3)
    ids, mask = random_batch(choose, num_rows)
    model.set_attn_implementation(choose.choice(["sdpa", "pagedkv"]))
    torch.manual_seed(choose.randrange(100))
    fails_at = choose.choice([None, None, None, 1, 2, 9])
    num_passes = 0

    def fail(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == fails_at:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    cache = PagedCache.from_prompt(model, ids, kv, attention_mask=mask)
    with cache:
        try:
            output = model.generate(
                ids,
                attention_mask=mask,
                cache=cache,
                max_new_tokens=choose.randint(1, 6),
                **{"do_sample": False, **options},
            )
        except KeyboardInterrupt:
            return "failed"
        finally:
            hook.remove()
        if choose.random() < 0.2:
            return "not committed"
        cache.commit(output)
        if choose.random() < 0.3:
            cache.save()
    return "committed"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_thousand_calls_leave_nothing_behind(tmp_path: Path) -> None:
    model, choose = tiny.llama(num_hidden_layers=2), random.Random(0)
    outcomes: dict[str, int] = {}
    with open_cache(model, tmp_path / "cache.zarr", num_slots=6, max_nbytes="1MiB") as kv:
        before = 0
        for number in range(NUM_CALLS):
            outcome = generate_somehow(model, kv, choose)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            stats = kv.stats()
            assert stats.num_pages_held == 0, f"call {number}"
            assert stats.num_pinned_slots == 0, f"call {number}"
            assert stats.store_nbytes <= 2**20, f"call {number}"
            if number % 50 == 0:
                kv.check_invariants()
            if number == NUM_WARM:
                gc.collect()
                before = resident_nbytes()
        kv.check_invariants()
        assert kv.store is not None
        kv.store.check_invariants()
        gc.collect()
        growth = resident_nbytes() - before
        assert kv.stats().num_pool_hits + kv.stats().num_store_hits > NUM_CALLS
    assert min(outcomes.values()) > NUM_CALLS // 20, outcomes
    assert growth < MOST_GROWTH, f"{growth / 2**20:.1f} MiB more than after {NUM_WARM} calls"
