"""What is done with a cache is recorded; doing it again gives the hits that the cache counted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_samples import bits, make_spec
from typer.testing import CliRunner

import pagedkv as pk
from pagedkv.admission import ADMISSION_NAMES, AdmitAll, make_admission
from pagedkv.cli import app
from pagedkv.errors import TraceError
from pagedkv.policies import POLICY_NAMES, make_policy
from pagedkv.recorded import is_recorded, read_recorded
from pagedkv.recorded_replay import replay_recorded
from pagedkv.recording import Recording
from pagedkv.simulate_recorded import simulate_recorded
from pagedkv.trace_lines import VERSION

SPEC = make_spec(page_tokens=4)
NUM_SLOTS = 40


class Caller:
    """Somebody who does whatever can be done with a cache, at random."""

    def __init__(self, cache: pk.PagedKVCache, seed: int) -> None:
        self.cache = cache
        self.rng = np.random.default_rng(seed)
        self.prompts = [self._tokens(int(self.rng.integers(1, 60))) for _ in range(5)]
        self.open: list[tuple[pk.Sequence, list[int]]] = []

    def do_something(self) -> None:
        chances = {
            self._prompt: 0.35,
            self._go_on: 0.25,
            self._fork: 0.1,
            self._truncate: 0.1,
            self._close: 0.1,
            self._use_keys: 0.1,
        }
        actions: list[Callable[[], None]] = [*chances]
        action = actions[int(self.rng.choice(len(actions), p=[*chances.values()]))]
        try:
            action()
        except pk.PoolExhaustedError:
            self.open.pop(0)[0].close()
        except pk.PageNotFoundError:
            pass  # it was evicted meanwhile, to make room for what was put

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, 3, count).tolist()
        return tokens

    def _kv(self, tokens: list[int], start: int) -> tuple[Any, Any]:
        """Numbers that depend on all tokens up to each, as those of a model do."""
        shape = (SPEC.num_layers, len(tokens), SPEC.num_kv_heads, SPEC.head_dim)
        sums = np.cumsum(tokens).reshape(1, -1, 1, 1)
        k = np.broadcast_to(sums, shape).astype(SPEC.np_dtype)
        return k[:, start:], k[:, start:]

    def _pick(self) -> tuple[pk.Sequence, list[int]] | None:
        return self.open[int(self.rng.integers(len(self.open)))] if self.open else None

    def _prompt(self) -> None:
        prompt = self.prompts[int(self.rng.integers(5))]
        tokens = prompt[: int(self.rng.integers(len(prompt) + 1))]
        tokens = tokens + self._tokens(int(self.rng.integers(0, 8)))
        sequence = self.cache.open_sequence(tokens)
        self.open.append((sequence, tokens))
        held = sequence.num_tokens
        sequence.append(*self._kv(tokens, held), tokens[held:])

    def _go_on(self) -> None:
        picked = self._pick()
        if picked is None or len(picked[0].tokens) < len(picked[1]):
            return
        sequence, tokens = picked
        longer = tokens + self._tokens(int(self.rng.integers(1, 6)))
        k, v = self._kv(longer, len(tokens))
        for layer in range(SPEC.num_layers):
            sequence.append_layer(layer, k[layer], v[layer])
        tokens[:] = longer
        sequence.commit(longer)

    def _fork(self) -> None:
        picked = self._pick()
        if picked:
            self.open.append((picked[0].fork(), list(picked[1])))

    def _truncate(self) -> None:
        picked = self._pick()
        if picked:
            count = int(self.rng.integers(0, picked[0].num_tokens + 1))
            picked[0].truncate(count)
            del picked[1][count:]

    def _close(self) -> None:
        if self.open:
            self.open.pop(int(self.rng.integers(len(self.open))))[0].close()

    def _use_keys(self) -> None:
        prompt = self.prompts[int(self.rng.integers(5))]
        keys = pk.page_keys(SPEC, prompt)
        held = self.cache.match(keys)
        with self.cache.acquire(keys):
            pass
        if held < len(keys):
            k, _ = self._kv(prompt, 0)
            tokens = k[:, : len(keys) * 4].reshape(
                SPEC.num_layers, len(keys), 1, *SPEC.page_shape[2:]
            )
            pages = np.repeat(np.moveaxis(tokens, 1, 0), 2, axis=2)
            self.cache.put(keys[held:], np.ascontiguousarray(pages[held:]))
        if held and self.rng.random() < 0.5:
            self.cache.get(keys[:held])


def record(path: Path, cache: pk.PagedKVCache, seed: int, num_steps: int = 300) -> pk.CacheStats:
    caller = Caller(cache, seed)
    with cache.record(path):
        for _ in range(num_steps):
            caller.do_something()
    stats = cache.stats()
    assert stats.num_pages_evicted > 20
    return stats


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_the_replay_hits_as_often_as_the_cache_did(tmp_path: Path, policy: str, seed: int) -> None:
    with pk.PagedKVCache(SPEC, NUM_SLOTS, policy=make_policy(policy)) as cache:
        stats = record(tmp_path / "trace.jsonl", cache, seed)
    counts = replay_recorded(read_recorded(tmp_path / "trace.jsonl"), make_policy(policy))
    assert stats.num_pool_hits > 100
    assert counts.num_pool_hits == stats.num_pool_hits
    assert counts.num_misses == stats.num_misses


@pytest.mark.parametrize("seed", range(2))
def test_with_a_store_the_hits_of_both_tiers_are_the_same(tmp_path: Path, seed: int) -> None:
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC)
    with pk.PagedKVCache(SPEC, NUM_SLOTS, store) as cache:
        stats = record(tmp_path / "trace.jsonl", cache, seed)
    counts = replay_recorded(read_recorded(tmp_path / "trace.jsonl"), pk.LRU())
    hits = counts.num_pool_hits + counts.num_store_hits
    assert counts.num_store_hits > 0
    assert hits == stats.num_pool_hits + stats.num_store_hits
    assert counts.num_misses == stats.num_misses


@pytest.mark.parametrize("name", ADMISSION_NAMES)
def test_the_admission_policy_is_that_of_the_cache(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.jsonl"
    store = pk.PageStore.open(tmp_path / "cache.zarr", SPEC)
    with pk.PagedKVCache(SPEC, NUM_SLOTS, store, admission=make_admission(name)) as cache:
        stats = record(path, cache, 3)
    (same,) = simulate_recorded(read_recorded(path), ["lru"])
    (every,) = simulate_recorded(read_recorded(path), ["lru"], admission=AdmitAll())
    hits = stats.num_pool_hits + stats.num_store_hits
    assert same.num_hits == pytest.approx(hits, rel=0.02)  # the writer may ask earlier or later
    assert (same.admission, every.admission) == (name, "all")
    assert (stats.num_pages_refused == 0) == (every.num_hits == hits)


def test_another_size_or_policy_gives_other_hits(tmp_path: Path) -> None:
    with pk.PagedKVCache(SPEC, NUM_SLOTS) as cache:
        stats = record(tmp_path / "trace.jsonl", cache, 3)
    recorded = read_recorded(tmp_path / "trace.jsonl")
    more = replay_recorded(recorded, pk.LRU(), [10 * NUM_SLOTS])
    assert more.num_pool_hits > stats.num_pool_hits
    assert more.num_misses < stats.num_misses
    with pytest.raises(ValueError, match="2 numbers of slots for 1 groups"):
        replay_recorded(recorded, pk.LRU(), [4, 4])


def test_several_groups_are_recorded(tmp_path: Path) -> None:
    specs = [make_spec(page_tokens=4, group=str(number)) for number in range(2)]
    tokens = [*range(40)]
    k = [np.zeros((s.num_layers, 40, s.num_kv_heads, s.head_dim), s.np_dtype) for s in specs]
    with pk.PagedKVCache(specs, [12, 15]) as cache:
        with cache.record(tmp_path / "trace.jsonl"):
            for start in (0, 7, 0, 3, 7, 7):
                part = tokens[start : start + 33]
                with cache.open_sequence(part) as sequence:
                    held = sequence.num_tokens
                    new = [one[:, held:33] for one in k]
                    sequence.append(new, new, part[held:])
        stats = cache.stats()
    counts = replay_recorded(read_recorded(tmp_path / "trace.jsonl"), pk.LRU())
    assert counts.num_pool_hits == stats.num_pool_hits > 0
    assert counts.num_misses == stats.num_misses


def test_plain_keys_are_recorded(tmp_path: Path) -> None:
    keys = [pk.PageKey(bytes([n]) * 32) for n in range(6)]
    page = np.zeros((1, *SPEC.page_shape), SPEC.np_dtype)
    with pk.PagedKVCache(SPEC, 3) as cache:
        with cache.record(tmp_path / "trace.jsonl"):
            for n in (0, 1, 2, 0, 3, 0, 1, 4, 0, 5, 3, 2, 0):
                if cache.match([keys[n]]):
                    cache.get([keys[n]])
                else:
                    cache.put([keys[n]], page)
        stats = cache.stats()
    recorded = read_recorded(tmp_path / "trace.jsonl")
    counts = replay_recorded(recorded, pk.LRU())
    assert counts.num_pool_hits == stats.num_pool_hits == 3
    assert counts.requested == (1,) * 13
    assert sum(counts.hits) == 3
    assert replay_recorded(recorded, pk.LRU(), [6]).num_pool_hits == 7  # all but the first of each


def test_a_recording_that_begins_late_begins_with_what_the_cache_holds(tmp_path: Path) -> None:
    tokens = [*range(24)]
    kv = np.zeros((SPEC.num_layers, 24, SPEC.num_kv_heads, SPEC.head_dim), SPEC.np_dtype)
    with pk.PagedKVCache(SPEC, 8) as cache:
        with cache.open_sequence() as sequence:
            sequence.append(kv, kv, tokens)
        with cache.open_sequence(tokens) as held:
            before = cache.stats()
            with cache.record(tmp_path / "trace.jsonl"):
                cache.get(pk.page_keys(SPEC, tokens))
                held.fork().close()
            after = cache.stats()
    counts = replay_recorded(read_recorded(tmp_path / "trace.jsonl"), pk.LRU())
    assert counts.num_pool_hits == after.num_pool_hits - before.num_pool_hits == 6
    assert counts.num_misses == 0


def test_neither_tokens_nor_keys_nor_salts_are_written(tmp_path: Path) -> None:
    tokens = [123456 + n for n in range(8)]
    kv = np.zeros((SPEC.num_layers, 8, SPEC.num_kv_heads, SPEC.head_dim), SPEC.np_dtype)
    with pk.PagedKVCache(SPEC, 8) as cache:
        with (
            cache.record(tmp_path / "trace.jsonl"),
            cache.open_sequence(tokens, salt=b"tenant") as sequence,
        ):
            sequence.append(kv, kv, tokens)
    text = (tmp_path / "trace.jsonl").read_text()
    assert "12345" not in text
    assert "tenant" not in text
    assert pk.page_keys(SPEC, tokens, b"tenant")[0].hex()[:12] not in text


def test_a_file_that_is_there_is_kept_and_a_second_recording_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pk.PagedKVCache(SPEC, 8) as cache:
        with pytest.raises(FileExistsError):
            cache.record(path)
        assert path.read_text() == "mine"
        with (
            cache.record(tmp_path / "one.jsonl"),
            pytest.raises(ValueError, match="one.jsonl already"),
        ):
            cache.record(tmp_path / "two.jsonl")
        assert not (tmp_path / "two.jsonl").exists()
        last = cache.record(tmp_path / "three.jsonl")
    assert last.is_closed


def fill_the_disk(recording: Recording, buffering: int) -> None:
    recording._file.close()
    recording._file = Path("/dev/full").open("w", buffering)  # noqa: SIM115 - it closes it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_full_disk_ends_the_recording_but_harms_no_caller(tmp_path: Path, buffering: int) -> None:
    """With a buffer, or where each line is written at once."""
    tokens = [*range(8)]
    with pk.PagedKVCache(SPEC, 4, pk.PageStore.open(tmp_path / "cache.zarr", SPEC)) as cache:
        recording = cache.record(tmp_path / "trace.jsonl")
        fill_the_disk(recording, buffering)
        with cache.open_sequence(tokens) as sequence:
            kv = np.zeros((SPEC.num_layers, 8, SPEC.num_kv_heads, SPEC.head_dim), SPEC.np_dtype)
            sequence.append(kv, kv, tokens)
        with cache.acquire(pk.page_keys(SPEC, tokens)) as pages:
            assert len(pages) == 2
        assert cache.stats().num_pinned_slots == cache.stats().num_pages_held == 0
        with pytest.raises(OSError, match="No space left"):
            recording.close()
        assert recording.is_closed
        recording.close()  # it was told
        with cache.record(tmp_path / "again.jsonl"):
            cache.match(pk.page_keys(SPEC, tokens))
        recording = cache.record(tmp_path / "last.jsonl")
        fill_the_disk(recording, buffering)
        cache.match(pk.page_keys(SPEC, tokens))
    with pk.PageStore.open(tmp_path / "cache.zarr", SPEC) as store:  # the cache has let it go
        assert store.find(pk.page_keys(SPEC, tokens)[1]) is not None


def test_a_sequence_that_cannot_be_opened_is_closed_in_the_replay_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [*range(8)]
    with pk.PagedKVCache(SPEC, 4) as cache:
        cache.put(pk.page_keys(SPEC, tokens), np.zeros((2, *SPEC.page_shape), SPEC.np_dtype))
        with cache.record(tmp_path / "trace.jsonl"):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(pk.Sequence, "go_on_inside", _interrupt)
                cache.open_sequence(tokens)
            cache.check_invariants()
    operations = read_recorded(tmp_path / "trace.jsonl").operations
    assert [operation["op"] for operation in operations[-2:]] == ["open", "close"]


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_is_recorded_changes_nothing(tmp_path: Path) -> None:
    results = []
    for is_recorded_too in (False, True):
        with pk.PagedKVCache(SPEC, NUM_SLOTS) as cache:
            caller = Caller(cache, 4)
            if is_recorded_too:
                cache.record(tmp_path / "trace.jsonl")
            for _ in range(100):
                caller.do_something()
            stats = cache.stats()
            pool = bits(cache._groups[0].places.pool.array)
            results.append((stats.num_pool_hits, stats.num_misses, pool))
    assert results[0] == results[1]


GOOD = {
    "format": "pagedkv-trace",
    "version": 1,
    "policy": "lru",
    "page_tokens": 4,
    "page_nbytes": 64,
    "num_slots": [3],
    "has_store": False,
    "write_policy": "on-evict",
}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"op": "jump"}', "line 2: op is 'jump'"),
        ('{"op": "get", "pages": [1]}', "line 2: group of 'get' is None"),
        ('{"op": "get", "group": 1, "pages": [1]}', "line 2: group is 1"),
        ('{"op": "get", "group": 0, "pages": [-1]}', "line 2: pages of 'get'"),
        ('{"op": "get", "group": 0, "pages": [true]}', "line 2: pages of 'get'"),
        ('{"op": "put", "group": 0, "pages": [1], "parent": "x"}', "line 2: parent is 'x'"),
        ('{"op": "append", "sequence": 3, "tokens": 4}', "line 2: sequence 3 is not open"),
        ('{"op": "open", "sequence": 1, "pages"', "line 2: no JSON"),
        ("[1]", "line 2: a JSON list; each line must be one JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    assert is_recorded(path)
    with pytest.raises(TraceError, match=message):
        read_recorded(path)


def written(path: Path, operations: list[dict[str, Any]], **header: Any) -> Path:
    """A recording with these operations."""
    path.write_text("".join(json.dumps(one) + "\n" for one in (GOOD | header, *operations)))
    return path


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([{"op": "put", "group": 0, "pages": [1], "parent": 1}], "page 1 comes before itself"),
        (
            [
                {"op": "put", "group": 0, "pages": [1], "parent": 2},
                {"op": "put", "group": 0, "pages": [2], "parent": 1},
            ],
            "page 1 comes before itself",
        ),
        (
            [
                {"op": "open", "sequence": 1, "pages": [4]},
                {"op": "commit", "sequence": 1, "start": 2, "pages": [5]},
            ],
            "has 1 pages .* starts at page 2",
        ),
        (
            [
                {"op": "open", "sequence": 1, "pages": []},
                {"op": "append", "sequence": 1, "tokens": 10**12},
            ],
            "line 3: tokens of 'append' is 1000000000000",
        ),
    ],
)
def test_operations_that_contradict_each_other_are_refused(
    tmp_path: Path, operations: list[dict[str, Any]], message: str
) -> None:
    path = written(tmp_path / "trace.jsonl", operations)
    with pytest.raises(TraceError, match=message):
        replay_recorded(read_recorded(path), pk.LRU())


def test_what_cannot_be_done_at_another_size_is_left_out(tmp_path: Path) -> None:
    """One group's pool is too small for the prompt, so that it cannot be forked or saved."""
    path = written(
        tmp_path / "trace.jsonl",
        [
            {"op": "open", "sequence": 1, "pages": []},
            {"op": "append", "sequence": 1, "tokens": 20},
            {"op": "fork", "sequence": 1, "child": 2},
            {"op": "save", "sequence": 1},
            {"op": "drop", "sequence": 2, "tokens": 8},
            {"op": "close", "sequence": 2},
            {"op": "close", "sequence": 1},
            {"op": "open", "sequence": 3, "pages": [1]},
        ],
        num_slots=[9, 9],
    )
    assert replay_recorded(read_recorded(path), pk.LRU(), (9, 2)).num_misses == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "other"},
        {"version": "1"},
        {"num_slots": []},
        {"num_slots": [0]},
        {"page_tokens": "4"},
        {"page_nbytes": None},
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD | wrong) + "\n")
    with pytest.raises(TraceError, match=f"line 1: .*{next(iter(wrong))}"):
        read_recorded(path)


def test_a_later_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD | {"version": VERSION + 1}) + "\n")
    with pytest.raises(TraceError, match="reads up to 1: install a newer one"):
        read_recorded(path)


def test_the_command_line_replays_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pk.PagedKVCache(SPEC, NUM_SLOTS, policy=pk.FIFO()) as cache:
        stats = record(path, cache, 5)
    result = CliRunner().invoke(app, ["simulate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert (row["policy"], row["slots"], row["method"]) == ("fifo", NUM_SLOTS, "recording")
    assert row["num_hits"] == row["pool_hits"] == stats.num_pool_hits
    assert row["hit_rate"] == row["num_hits"] / row["num_pages"]
    options = ["--policy", "lru", "--policy", "lfu", "--slots", "30,60"]
    result = CliRunner().invoke(app, ["simulate", str(path), *options, "--json"])
    rows = json.loads(result.stdout)
    assert [(row["policy"], row["slots"]) for row in rows] == [
        (policy, slots) for policy in ("lru", "lfu") for slots in (30, 60)
    ]
    assert rows[0]["num_hits"] < rows[1]["num_hits"]
    assert "recorded under fifo" in CliRunner().invoke(app, ["simulate", str(path)]).stdout


def test_a_policy_without_a_name_is_no_mystery(tmp_path: Path) -> None:
    class Mine(pk.LRU):
        name = "mine"

    class Few(AdmitAll):
        name = "few"

    path = tmp_path / "trace.jsonl"
    with pk.PagedKVCache(SPEC, NUM_SLOTS, policy=Mine(), admission=Few()) as cache:
        record(path, cache, 5)
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert "recorded under 'mine', a policy that has no name here" in str(result.exception)
    assert CliRunner().invoke(app, ["simulate", str(path), "--policy", "lru"]).exit_code == 0
    path.write_text(path.read_text().replace('"has_store": false', '"has_store": true'))
    result = CliRunner().invoke(app, ["simulate", str(path), "--policy", "lru"])
    assert "recorded with admission 'few', which has no name here" in str(result.exception)
    options = ["--policy", "lru", "--admission", "likely"]
    assert CliRunner().invoke(app, ["simulate", str(path), *options]).exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--store-slots", "5"], "--store-slots"),
        (["--admission", "likely"], "the recorded cache had none"),
        (["--policy", "clairvoyant"], "clairvoyant"),
        (["--slots", "0"], "slots"),
        (["--policy", "mru"], "take one of"),
    ],
)
def test_options_that_make_no_sense_for_it_are_refused(
    tmp_path: Path, options: list[str], message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    with pk.PagedKVCache(SPEC, NUM_SLOTS) as cache:
        record(path, cache, 5)
    result = CliRunner().invoke(app, ["simulate", str(path), *options])
    assert result.exit_code != 0
    assert message in (result.output or str(result.exception))
