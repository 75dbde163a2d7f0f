"""The simulator: small cases by hand, its quick ways against replays, and bounds."""

import copy
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import KVSpec, PagedKVCache, cli, page_keys, simulation_tables
from pagedkv.admission import ADMISSION_NAMES, AdmitAll, AdmitLikely, AdmitSeenTwice, make_admission
from pagedkv.cli_output import console
from pagedkv.cost_model import CostModel
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.policies.lru import LRU
from pagedkv.simulate import MAX_SLOTS, SimulationResult, known_policies, simulate
from pagedkv.spec import PageKey
from pagedkv.stack_distances import leading_distances
from pagedkv.trace import Trace
from pagedkv.trace_builder import TraceBuilder
from pagedkv.traces import read_trace

MOONCAKE = Path(__file__).parents[2] / "shared/traces/mooncake_conversation_trace.jsonl"


def make_trace(
    runs: Sequence[Sequence[Any]], *, chained: bool = True, tokens: Sequence[int] | None = None
) -> Trace:
    """A trace of pages of 4 tokens and 8 bytes."""
    builder = TraceBuilder(
        Path("made"), "pagedkv", page_tokens=4, page_nbytes=8, is_chained=chained
    )
    for number, run in enumerate(runs):
        builder.add(
            number + 1,
            list(run),
            time=float(number),
            prompt_tokens=4 * len(run) if tokens is None else tokens[number],
            output_tokens=1,
        )
    return builder.build()


def random_runs(seed: int, count: int = 400) -> list[list[tuple[int, ...]]]:
    """Prompts out of a tree of prefixes: some grow, some come again, some never do."""
    rng = np.random.default_rng(seed)
    known: list[tuple[int, ...]] = [()]
    runs = []
    for number in range(count):
        base = known[int(len(known) * (1 - rng.random() ** 2))]
        base = base[: rng.integers(0, len(base) + 1)] if rng.random() < 0.5 else base
        path = (*base, *(number * 100 + at for at in range(rng.integers(0, 6))))[:12]
        known.append(path)
        runs.append([path[: at + 1] for at in range(len(path))])
    return runs


def hits_of(results: Sequence[SimulationResult]) -> list[int]:
    return [result.num_hits for result in results]


def one(trace: Trace, policy: Any, slots: int, **more: Any) -> SimulationResult:
    (result,) = simulate(trace, [policy], [slots], **more)
    return result


def test_hits_are_those_of_the_leading_run() -> None:
    # a pool of 3: [1 2 3] comes in; 1 2 hit, and 9 takes the slot of 3; then 3 is gone
    trace = make_trace([[1, 2, 3], [1, 2, 9], [1, 2, 3], [7, 8], [1]], tokens=[12, 10, 9, 8, 3])
    result = one(trace, "lru", 3)
    assert (result.num_requests, result.num_pages) == (5, 12)
    assert result.num_hits == 0 + 2 + 2 + 0 + 1
    assert result.num_object_hits == result.num_hits
    assert result.pool_hits == result.num_hits
    assert result.hit_rate == 5 / 12
    # whole pages of 4 tokens, but the last request's only page has 3
    assert result.prefill_tokens_saved == 8 + 8 + 3
    assert result.token_hit_rate == 19 / 42
    assert (result.policy, result.slots, result.store_slots) == ("lru", 3, 0)
    assert (result.bytes_written, result.bytes_read, result.bytes_written_per_hit) == (0, 0, None)
    assert (result.admission, result.method) == (None, "replay")
    assert result.accesses_per_second == pytest.approx(12 / result.seconds)


def test_a_request_longer_than_the_tier_keeps_its_leading_pages() -> None:
    trace = make_trace([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [8, 9], [1, 2, 3]])
    # [8 9] takes two slots of three, from the end: 1 stays
    for policy in ("lru", "fifo"):
        assert one(trace, policy, 3).num_hits == 3 + 1
    assert one(trace, "clairvoyant", 3).num_hits == 3 + 3


def test_empty_requests_are_requests() -> None:
    trace = make_trace([[], [1], [], [1]])
    result = one(trace, "lru", 1)
    assert (result.num_requests, result.num_hits) == (4, 1)


def test_the_estimated_time_to_the_first_token() -> None:
    trace = make_trace([[1, 2], [8], [1, 2]], tokens=[8, 4, 8])
    cost = CostModel(
        prefill_s_per_token=1, attention_s_per_pair=0.5, store_bytes_per_s=16, store_latency_s=3
    )
    # prefill of all: 8 + .25 x 64 = 24, and 4 + .25 x 16 = 8; with all but the last token held
    # 1 + .25 x (64 - 49) = 4.75
    assert one(trace, "lru", 3, cost=cost).mean_ttft_s == pytest.approx((24 + 8 + 4.75) / 3)
    # page 2 was evicted to the store: 8 bytes at 16 a second, and the latency
    result = one(trace, "lru", 2, cost=cost, store_slots=9)
    assert (result.pool_hits, result.store_hits) == (1, 1)
    assert result.mean_ttft_s == pytest.approx((24 + 8 + 4.75 + 0.5 + 3) / 3)
    assert (result.bytes_written, result.bytes_read) == (16, 8)
    for wrong in (
        {"store_bytes_per_s": 0},
        {"prefill_s_per_token": -1},
        {"store_latency_s": math.nan},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CostModel(**wrong)


def test_a_page_without_a_size_has_that_of_its_tokens() -> None:
    trace = replace(make_trace([[1], [2], [1]]), page_nbytes=None)
    assert one(trace, "lru", 1, store_slots=5).bytes_written == 2 * 4 * 128 * 1024


def test_two_tiers_by_hand() -> None:
    trace = make_trace([[1, 2], [3, 4], [1, 2, 5], [3, 4], [1, 2, 5]])
    result = one(trace, "lru", 2, store_slots=10)
    # 1 2 to the store; read back, 3 4 to the store, 5 (behind the pool's end) too; 3 4 read, 1 2
    # are there already; 1 2 5 read
    assert (result.pool_hits, result.store_hits) == (0, 7)
    assert (result.bytes_written, result.bytes_read) == (5 * 8, 7 * 8)
    assert result.bytes_written_per_hit == pytest.approx(5 * 8 / 7)
    assert result.admission == "all"
    # a store for two keeps the last that came: 1 2; then 3 and, for 4, the 5; then 1 2
    assert one(trace, "lru", 2, store_slots=2).num_hits == 2 + 1 + 2


def test_a_store_gives_up_children_before_parents() -> None:
    runs = [[1, 2, 3], [8], [9], [1, 2, 4], [8], [9], [1], [1, 2]]
    trace = make_trace(runs)
    for store_slots in range(1, 8):
        result = one(trace, "lru", 1, store_slots=store_slots)
        assert result.num_hits == result.num_object_hits


@pytest.mark.parametrize("chained", [True, False])
def test_a_store_is_as_good_as_a_larger_pool_under_lru(chained: bool) -> None:
    runs = random_runs(3)
    trace = make_trace(runs, chained=chained)
    small = one(trace, "lru", 40)
    tiered = one(trace, "lru", 40, store_slots=10**6)
    assert tiered.num_hits > small.num_hits
    assert tiered.num_hits == one(trace, "lru", 10**6).num_hits
    assert tiered.pool_hits + tiered.store_hits == tiered.num_hits
    assert tiered.bytes_written <= 8 * trace.num_distinct
    assert one(trace, "lru", 40, store_slots=0).num_hits == small.num_hits


@pytest.mark.parametrize("seed", range(4))
def test_lru_in_one_pass_equals_replays(seed: int) -> None:
    trace = make_trace(random_runs(seed))
    sizes = [1, 2, 3, 7, 11, 12, 13, 30, 100, 400, 5000]
    at_once = simulate(trace, ["lru"], sizes)
    replayed = simulate(trace, ["lru"], sizes, one_pass=False)
    assert {result.method for result in at_once} == {"stack distances"}
    assert {result.method for result in replayed} == {"replay"}
    timing = {"method", "seconds", "accesses_per_second"}
    for quick, slow in zip(at_once, replayed, strict=True):
        for field in fields(quick):
            if field.name not in timing:
                assert getattr(quick, field.name) == getattr(slow, field.name), field.name


def test_lru_in_one_pass_of_pages_without_prefixes() -> None:
    rng = np.random.default_rng(5)
    trace = make_trace([[int(n)] for n in rng.zipf(1.3, 3000)], chained=False)
    sizes = [1, 2, 5, 20, 100, 1000]
    at_once = simulate(trace, ["lru"], sizes)
    assert at_once[0].method == "stack distances"
    assert hits_of(at_once) == hits_of(simulate(trace, ["lru"], sizes, one_pass=False))


def test_lru_is_replayed_where_distances_do_not_tell() -> None:
    moved = make_trace([[1, 2], [3, 2], [1, 2]])
    groups = make_trace([[1, 2], [3, 2], [1, 2]], chained=False)
    for trace in (moved, groups):
        assert {result.method for result in simulate(trace, ["lru"], [1, 2])} == {"replay"}
    with pytest.raises(ValueError, match="several parents"):
        leading_distances(moved)
    tiers = simulate(make_trace([[1], [2]]), ["lru"], [1, 2], store_slots=1)
    assert {result.method for result in tiers} == {"replay"}


def best_of_all(runs: Sequence[Sequence[Any]], slots: int) -> int:
    """Most leading-run hits of any schedule, by trying all that keep prefixes."""
    states: dict[frozenset[Any], int] = {frozenset(): 0}
    for run in runs:
        after: dict[frozenset[Any], int] = {}
        for held, hits in states.items():
            num_hits = next((n for n, page in enumerate(run) if page not in held), len(run))
            for kept in prefix_sets(held | set(run), slots):
                after[kept] = max(after.get(kept, 0), hits + num_hits)
        states = after
    return max(states.values())


def prefix_sets(pages: frozenset[Any] | set[Any], slots: int) -> Iterator[frozenset[Any]]:
    """All subsets of at most ``slots`` pages in which no page is without its parent."""
    ordered = sorted(pages)
    for bits in range(2 ** len(ordered)):
        kept = frozenset(page for at, page in enumerate(ordered) if bits >> at & 1)
        if len(kept) <= slots and all(len(page) == 1 or page[:-1] in kept for page in kept):
            yield kept


@pytest.mark.parametrize("seed", range(6))
def test_the_clairvoyant_row_is_the_best_that_any_schedule_can_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paths = [(0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5), (6,)]
    runs = []
    for _ in range(7):
        path = paths[rng.integers(len(paths))]
        runs.append([path[: at + 1] for at in range(len(path))])
    trace = make_trace(runs)
    for slots in (1, 2, 3, 4):
        assert one(trace, "clairvoyant", slots).num_hits == best_of_all(runs, slots)


def min_hits(pages: Sequence[int], slots: int) -> int:
    """Belady's MIN in the plainest form."""
    held: set[int] = set()
    hits = 0
    for at, page in enumerate(pages):
        if page in held:
            hits += 1
            continue
        if len(held) == slots:
            later = pages[at + 1 :]
            held.discard(max(held, key=lambda p: later.index(p) if p in later else len(pages)))
        held.add(page)
    return hits


def test_pages_without_prefixes_get_beladys_min() -> None:
    rng = np.random.default_rng(8)
    pages = [int(page) for page in rng.zipf(1.2, 400) % 60]
    trace = make_trace([[page] for page in pages], chained=False)
    for slots in (1, 2, 5, 17, 60):
        assert one(trace, "clairvoyant", slots).num_hits == min_hits(pages, slots)
    # it has to take in what it will not need: declining would hit twice
    assert one(make_trace([[1], [2], [1], [2]], chained=False), "clairvoyant", 1).num_hits == 0
    assert one(make_trace([[1], [2], [1], [2]]), "clairvoyant", 1).num_hits == 1


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("chained", [True, False])
def test_no_policy_hits_more_than_the_clairvoyant_one(policy: str, chained: bool) -> None:
    runs = random_runs(11, 300)
    trace = make_trace(
        runs if chained else [[page] for run in runs for page in run], chained=chained
    )
    for slots in (1, 5, 40, 200):
        result = one(trace, policy, slots)
        assert result.policy == policy
        assert result.num_hits <= one(trace, "clairvoyant", slots).num_hits
        assert result.num_object_hits == result.num_hits
    most = one(trace, policy, 10**6).num_hits
    assert most == trace.num_pages - trace.num_distinct
    assert most == one(trace, "clairvoyant", 10**6).num_hits


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_pages_that_move_and_groups_of_pages_do_no_harm(policy: str) -> None:
    rng = np.random.default_rng(2)
    runs = [rng.choice(50, rng.integers(0, 9), replace=False).tolist() for _ in range(500)]
    for chained in (True, False):
        trace = make_trace(runs, chained=chained)
        for more in ({}, {"store_slots": 12}):
            result = one(trace, policy, 20, **more)
            assert 0 < result.num_hits < result.num_object_hits < trace.num_pages


def test_a_policy_object_stays_as_it_is() -> None:
    trace = make_trace(random_runs(1))
    policy = LRU()
    results = simulate(trace, [policy, "lru"], [20, 60])
    assert len(policy) == 0
    assert hits_of(results[:2]) == hits_of(results[2:])
    assert [result.slots for result in results] == [20, 60, 20, 60]


def test_slots_for_more_pages_than_there_are_cost_nothing() -> None:
    class Reserving(LRU):
        def start(self, num_slots: int) -> None:
            assert num_slots <= 3

    assert one(make_trace([[1, 2, 3], [1]]), Reserving(), MAX_SLOTS).num_hits == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((["lru"], [0]), ValueError, "slots is 0: it must be in 1..2,147,483,647 pages"),
        ((["lru"], [5, -1]), ValueError, "slots is -1"),
        ((["lru"], [2**31]), ValueError, "slots is 2147483648"),
        ((["lru"], [1.5]), TypeError, "slots is 1.5: it must be an integer"),
        ((["lru"], [True]), TypeError, "slots is True"),
        ((["lru"], []), ValueError, "nothing to simulate"),
        (([], [1]), ValueError, "nothing to simulate"),
        ((["lru", "best"], [1]), ValueError, "there is no policy 'best': take one of fifo, lru"),
        ((["lru", LRU], [1]), TypeError, "policy is the class LRU: give an object"),
        ((["lru", None], [1]), TypeError, "policy is None: give an object"),
    ],
)
def test_arguments_are_checked(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        simulate(make_trace([[1]]), *arguments)
    with pytest.raises(ValueError, match="store_slots is -1: it must be in 0"):
        simulate(make_trace([[1]]), ["lru"], [1], store_slots=-1)
    likely: Any = "likely"
    with pytest.raises(TypeError, match="admission is 'likely': give an object"):
        simulate(make_trace([[1]]), ["lru"], [1], store_slots=1, admission=likely)


def test_progress_reaches_its_end() -> None:
    told: list[tuple[int, int]] = []
    trace = make_trace(random_runs(1))
    simulate(
        trace,
        known_policies(),
        [5, 10],
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == sorted(told)
    assert told[-1] == (2 * len(known_policies()) * trace.num_pages,) * 2


# -- admission ---------------------------------------------------------------------------------


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "little"))


@pytest.mark.parametrize("name", ADMISSION_NAMES)
def test_admission_spares_bytes_and_says_the_same_twice(name: str) -> None:
    trace = make_trace(random_runs(4, 2000))
    everything = one(trace, "lru", 30, store_slots=300)
    admission = make_admission(name)
    result = one(trace, "lru", 30, store_slots=300, admission=admission)
    assert result.admission == name
    assert result.bytes_written <= everything.bytes_written
    fresh = copy.deepcopy(admission)
    fresh.start(10)
    fresh.note([key(1), key(2)])
    assert fresh.admits(key(1)) == fresh.admits(key(1))


def test_seen_twice() -> None:
    admission = AdmitSeenTwice()
    admission.start(8)
    admission.note([key(1), key(2)])
    assert not admission.admits(key(1))
    admission.note([key(1)])
    assert admission.admits(key(1))
    assert not admission.admits(key(2))
    assert not admission.admits(key(3))
    admission.note([key(number) for number in range(100, 108)])
    assert not admission.admits(key(1)), "it remembers no more than pool and store hold"


def test_likely_learns_what_does_not_come_back() -> None:
    admission = AdmitLikely()
    admission.start(200)
    # prompts of a shared page, a page of their own, and a last one; the first two come back once
    written = {"own": 0, "last": 0}
    for number in range(1, 2000):
        own, last = key(10_000 + number), key(20_000 + number)
        admission.note([key(1), own, last])
        if number > 1000:
            written["own"] += admission.admits(own)
            written["last"] += admission.admits(last)
        else:
            admission.admits(own)
            admission.admits(last)
        if number > 5:
            admission.note([key(1), key(10_000 + number - 5), key(30_000 + number)])
    assert written == {"own": 999, "last": 0}
    with pytest.raises(ValueError, match=r"share is 1.5: it must be in 0..1"):
        AdmitLikely(1.5)


def test_likely_writes_nothing_of_a_scan() -> None:
    trace = make_trace([[number] for number in range(20_000)])
    assert one(trace, "lru", 100, store_slots=400, admission=AdmitAll()).bytes_written > 19_000 * 8
    assert one(trace, "lru", 100, store_slots=400, admission=AdmitLikely()).bytes_written < 1000 * 8


def test_unknown_admission_policies_are_named() -> None:
    with pytest.raises(ValueError, match="no admission policy 'x': take one of all, seen-twice"):
        make_admission("x")


# -- the command -------------------------------------------------------------------------------


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["pagedkv", "simulate", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        cli.main()
    code = exit_info.value.code
    return code if isinstance(code, int) else int(bool(code))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    numbers: dict[tuple[int, ...], int] = {}
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for time, run in enumerate(random_runs(6, 200)):
            ids = [numbers.setdefault(page, len(numbers)) for page in run]
            request = {
                "timestamp": time,
                "input_length": 512 * len(ids),
                "output_length": 1,
                "hash_ids": ids,
            }
            file.write(json.dumps(request) + "\n")
    return path


@pytest.fixture
def mooncake_like() -> SimulationResult:
    """As wide as figures become."""
    return SimulationResult(
        policy="pagedkv-two",
        slots=12_345_678,
        store_slots=MAX_SLOTS,
        admission="seen-twice",
        method="replay",
        num_requests=10**6,
        num_pages=10**9,
        num_hits=10**9,
        hit_rate=1.0,
        num_object_hits=10**9,
        token_hit_rate=1.0,
        pool_hits=0,
        store_hits=10**9,
        bytes_written=1024**4 - 10**8,
        bytes_read=1024**4 - 10**8,
        bytes_written_per_hit=1024.0**4 - 10**8,
        prefill_tokens_saved=1_152_921_504,
        mean_ttft_s=1.2344,
        seconds=1.0,
        accesses_per_second=1e9,
    )


def test_json_is_a_list_of_results(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (trace_file, "--slots", "10,50", "--slots", "10", "--slots", 90, "--json")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    output, errors = capsys.readouterr()
    assert not errors
    results = json.loads(output)
    names = [(name, slots) for name in known_policies() for slots in (10, 50, 90)]
    assert [(result["policy"], result["slots"]) for result in results] == names
    assert results[-1]["policy"] == "clairvoyant"
    trace = read_trace(trace_file)
    for result in results:
        assert list(result) == [field.name for field in fields(SimulationResult)]
        mine = asdict(one(trace, result["policy"], result["slots"]))
        for name in ("num_hits", "hit_rate", "token_hit_rate", "mean_ttft_s"):
            assert result[name] == mine[name]


def test_a_table_is_printed(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("--policy", "lru", "--policy", "clairvoyant", "--store-slots", 30)
    assert run(trace_file, *arguments, "--admission", "likely", monkeypatch=monkeypatch) == 0
    output, errors = capsys.readouterr()
    assert not errors
    for text in ("200 requests", "hit rate", "written a hit", "clairvoyant", "takes in: likely"):
        assert text in output
    trace = read_trace(trace_file)
    for share in (0.01, 0.05, 0.1, 0.3):
        slots = max(1, round(share * trace.num_distinct))
        rate = one(trace, "clairvoyant", slots + 30).hit_rate
        assert f"{rate:.2%}" in output


def test_tables_fit_into_80_columns(
    mooncake_like: SimulationResult,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    simulation_tables.print_tables(console(), [mooncake_like])
    output = capsys.readouterr().out
    assert "…" not in output
    assert max(map(len, output.splitlines())) <= 80, output
    for text in ("pagedkv-two", "12,345,678", "1,152,921,504", "1,234 ms", "1023.9 GiB"):
        assert text in output


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.000466, "0.466 ms"), (0.0123456, "12.3 ms"), (1.2344, "1,234 ms")]
)
def test_times_of_any_size_can_be_told_apart(seconds: float, text: str) -> None:
    assert simulation_tables.milliseconds(seconds) == text


def test_options_of_the_cost_model_count(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = []
    common = (trace_file, "--policy", "lru", "--slots", 20, "--store-slots", 50, "--json")
    for more in (
        (),
        ("--prefill-us", 80),
        ("--attention-ns", 9),
        ("--disk", "1GB"),
        ("--page-nbytes", "1GiB"),
        ("--page-tokens", 256),
    ):
        assert run(*common, *more, monkeypatch=monkeypatch) == 0
        (result,) = json.loads(capsys.readouterr().out)
        values.append(result["mean_ttft_s"])
    assert len(set(values)) == len(values)


def test_csv_and_gzip_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("key\n" + "\n".join("abcabcabd" * 20))
    arguments = (path, "--policy", "all", "--slots", 3, "--json")
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    results = {one["policy"]: one for one in json.loads(capsys.readouterr().out)}
    assert results["clairvoyant"]["num_hits"] >= results["lru"]["num_hits"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "--slots is 0: it must be in 1..2,147,483,647 pages"),
        (["--slots", "-3"], "--slots is -3"),
        (["--slots", "4294967296"], "--slots is 4294967296"),
        (["--slots", "10,many"], "--slots has 'many': give numbers of pages"),
        (["--slots", ""], "--slots has ''"),
        (["--policy", "best"], "there is no policy 'best': take one of fifo, lru"),
        (["--admission", "best"], "there is no admission policy 'best'"),
        (["--admission", "likely"], "give --store-slots too"),
        (["--store-slots", "-1"], "--store-slots is -1"),
        (["--page-tokens", "0"], "page_tokens is 0"),
        (["--page-nbytes", "lots"], "'lots' is no byte size"),
        (["--prefill-us", "-1"], "prefill_s_per_token is"),
        (["--plot", "plot.txt"], "a plot ends in .png, .svg, .pdf"),
        (["--plot", "/no/where/plot.png"], "/no/where is no folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_1(
    trace_file: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(trace_file, *arguments, monkeypatch=monkeypatch) == 1
    output, errors = capsys.readouterr()
    (line,) = errors.splitlines()
    assert line.startswith("pagedkv: ")
    assert message in line
    assert not output


def test_a_wrong_trace_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n')
    for wrong, message in (
        (path, "line 1: has no"),
        (tmp_path / "no", "No such file"),
        (tmp_path, "directory"),
    ):
        assert run(wrong, monkeypatch=monkeypatch) == 1
        output, errors = capsys.readouterr()
        assert errors.startswith(f"pagedkv: {wrong}")
        assert message in errors
        assert len(errors.splitlines()) == 1
        assert not output


def test_a_strange_trace_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": %s}\n'
    path.write_text(line % "[1, 2]" + line % "[3, 2]")
    assert run(path, "--slots", 2, "--json", monkeypatch=monkeypatch) == 0
    output, errors = capsys.readouterr()
    assert "warning: " in errors
    assert json.loads(output)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn_and_kept(
    trace_file: Path,
    suffix: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    plot = trace_file.parent / f"plot{suffix}"
    arguments = (trace_file, "--policy", "lru", "--policy", "clairvoyant", "--plot", plot)
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert f"Plot: {plot}" in capsys.readouterr().out
    data = plot.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    if suffix == ".svg":
        assert data.count(b"<path") > 10
    plot.write_bytes(b"mine")
    assert run(*arguments, monkeypatch=monkeypatch) == 1
    assert "File exists; --force writes over it" in capsys.readouterr().err
    assert plot.read_bytes() == b"mine"
    assert run(*arguments, "--force", monkeypatch=monkeypatch) == 0
    assert plot.read_bytes()[:4] == data[:4]
    assert sorted(path.name for path in plot.parent.iterdir()) == [plot.name, "trace.jsonl"]


def test_a_plot_without_matplotlib_says_how_to_get_it(
    trace_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot = trace_file.parent / "plot.png"
    assert run(trace_file, "--plot", plot, monkeypatch=monkeypatch) == 1
    assert "pip install 'pagedkv[report]'" in capsys.readouterr().err


# -- the trace of EVIDENCE ----------------------------------------------------------------------


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the trace lies outside the repository")
def test_the_published_figures_of_the_mooncake_trace() -> None:
    trace = read_trace(MOONCAKE)
    sizes = [1000, 5859, 10_000, 30_000]
    expected = {
        "lru": (0.0445, 0.1361, 0.2116, 0.3257),
        "clairvoyant": (0.1907, 0.3532, 0.3664, 0.3664),
    }
    for name, rates in expected.items():
        found = [result.hit_rate for result in simulate(trace, [name], sizes)]
        assert found == pytest.approx(rates, abs=5e-5)
    assert one(trace, "fifo", 5859).hit_rate == pytest.approx(0.1361, abs=5e-5)
    assert one(trace, "lru", 5859).num_hits == simulate(trace, ["lru"], sizes)[1].num_hits


# -- against a live cache -----------------------------------------------------------------------


@pytest.fixture
def spec() -> KVSpec:
    return KVSpec(
        num_layers=1, num_kv_heads=1, head_dim=1, page_tokens=1, dtype="float32", model="sha256:x"
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("slots", [12, 40, 150])
def test_sequences_of_a_live_cache_hit_what_the_simulator_says(
    policy: str, slots: int, spec: KVSpec
) -> None:
    runs = random_runs(21, 300)
    hits = 0
    with PagedKVCache(spec, num_slots=slots, policy=make_policy(policy)) as cache:
        for run in runs:
            tokens = np.array(run[-1] if run else (), np.int32)
            with cache.open_sequence(tokens) as sequence:
                known = sequence.num_tokens
                hits += known
                fresh = np.zeros((1, len(tokens) - known, 1, 1), np.float32)
                sequence.append(fresh, fresh, tokens[known:])
    assert hits == one(make_trace(runs), policy, slots).num_hits > 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("slots", [40, 150])  # `put` passes more than half a pool on in parts
def test_pages_by_key_of_a_live_cache_hit_what_the_simulator_says(
    policy: str, slots: int, spec: KVSpec
) -> None:
    runs = random_runs(22, 300)
    hits = 0
    with PagedKVCache(spec, num_slots=slots, policy=make_policy(policy)) as cache:
        for run in runs:
            keys = page_keys(spec, run[-1] if run else ())
            with cache.acquire(keys) as pages:
                hits += len(pages)
                fresh = np.zeros((len(keys) - len(pages), *spec.page_shape), np.float32)
                cache.put(keys[len(pages) :], fresh)
    expected = one(make_trace(runs), policy, slots).num_hits
    # What was put, and what had been found, are two uses: that matters to who looks at requests.
    tolerance = 0.02 * expected if policy == "pagedkv" else 0
    assert hits == pytest.approx(expected, abs=tolerance)
    assert hits > 0
