"""Eight threads use one cache with a small pool; what each sees must be what was put in."""

import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_model import ModelSequence, page_of, token_hashes, token_kv
from kv_samples import (
    Array,
    bits,
    make_key,
    make_kv,
    make_pages,
    make_spec,
    through_int8,
    wait_for_writers,
)

import pagedkv as pk
from pagedkv import files
from pagedkv.group import LayerGroup

NUM_THREADS = 8
PATIENCE_S = 120
"""A thread that has not ended by then hangs."""


@pytest.fixture(autouse=True)
def hasty_threads() -> Iterator[None]:
    """Let the threads interleave much more finely than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def jittery_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes take a while, now and then, so that others run meanwhile; no fsync."""
    rng = random.Random(0)

    def delayed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if rng.random() < 0.3:
                time.sleep(rng.random() * 1e-3)
            return real(*args)

        return call

    for name in ("pread_into", "pwrite_all", "write_all"):
        monkeypatch.setattr(files, name, delayed(getattr(files, name)))
    for name in ("sync_file", "sync_dir"):
        monkeypatch.setattr(files, name, lambda _: None)


def run_threads(work: Seq[Callable[[], None]]) -> None:
    """Run all at once; fail with the first error, or with all stacks if one of them hangs."""
    errors: list[str] = []
    barrier = threading.Barrier(len(work))

    def guarded(one: Callable[[], None]) -> None:
        try:
            barrier.wait()
            one()
        except BaseException:  # noqa: BLE001  whatever it is, the test must show it
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    hanging = [thread.ident for thread in threads if thread.is_alive()]
    if hanging:
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[i])) for i in hanging if i in frames]
        pytest.fail("threads hang:\n" + "\n".join([*errors, *stacks]))
    if errors:
        pytest.fail(f"{len(errors)} threads failed, the first:\n{errors[0]}")


class World:
    """What all threads know: the cache, some prompts, and which pages have been put for sure."""

    def __init__(self, cache: pk.PagedKVCache, *, forgets: bool, lossy: bool) -> None:
        self.cache = cache
        self.spec = cache.specs[0]
        self.forgets = forgets
        self.lossy = lossy
        rng = random.Random(7)
        trunk = [rng.randrange(50) for _ in range(12)]
        self.prompts = [
            trunk[: rng.randrange(13)] + [rng.randrange(50) for _ in range(rng.randrange(6))]
            for _ in range(10)
        ]
        self.known: set[bytes] = set()
        self.pins = threading.Semaphore(2)  # so that not all slots are pinned
        self.num_refused = 0

    def keys(self, ids: Seq[int]) -> pk.PageKeys:
        return pk.page_keys(self.spec, ids)

    def page(self, ids: Seq[int], number: int) -> Array:
        """The page that everyone computes for these tokens."""
        size = self.spec.page_tokens
        names = token_hashes(ids, 0)[number * size : (number + 1) * size]
        return page_of(self.spec, names, 0, finite=True)

    def is_right(self, page: Array, ids: Seq[int], number: int) -> bool:
        exact = self.page(ids, number)
        return bits(page) == bits(exact) or (
            self.lossy and bits(page) == bits(through_int8(self.spec, exact))
        )


class Worker:
    """One thread's doings."""

    def __init__(self, world: World, seed: int, num_steps: int) -> None:
        self.world = world
        self.cache = world.cache
        self.rng = random.Random(seed)
        self.num_steps = num_steps
        self.sequences: list[tuple[pk.Sequence, ModelSequence]] = []

    def __call__(self) -> None:
        steps = [
            self.put,
            self.get,
            self.match,
            self.acquire,
            self.open_sequence,
            self.append,
            self.append,
            self.append_layers,
            self.commit,
            self.fork,
            self.truncate,
            self.close_one,
            self.check_one,
            self.check_one,
            self.flush_or_save,
        ]
        for _ in range(self.num_steps):
            self.rng.choice(steps)()
        while self.sequences:
            self.check_one()
            self.close_one()

    def put(self) -> None:
        ids = self.rng.choice(self.world.prompts)
        keys = self.world.keys(ids)[: self.rng.randrange(6)]
        spec = self.world.spec
        pages = np.empty((len(keys), *spec.page_shape), dtype=spec.np_dtype)
        for number in range(len(keys)):
            pages[number] = self.world.page(ids, number)
        try:
            self.cache.put(keys, pages)
        except pk.PoolExhaustedError:
            self.world.num_refused += 1
        else:
            self.world.known.update(keys)

    def get(self) -> None:
        ids = self.rng.choice(self.world.prompts)
        keys = self.world.keys(ids)
        known = [number for number, key in enumerate(keys) if key in self.world.known]
        wanted = self.rng.sample(known, min(len(known), 3))
        try:
            pages = self.cache.get([keys[number] for number in wanted])
        except pk.PageNotFoundError:
            assert self.world.forgets, "a page that was put is gone"
            return
        for number, page in zip(wanted, pages, strict=True):
            assert self.world.is_right(page, ids, number)

    def match(self) -> None:
        keys = self.world.keys(self.rng.choice(self.world.prompts))
        low = self.num_known(keys)
        length = self.cache.match(keys)
        assert self.world.forgets or length >= low

    def num_known(self, keys: Seq[bytes]) -> int:
        count = 0
        while count < len(keys) and keys[count] in self.world.known:
            count += 1
        return count

    def acquire(self) -> None:
        ids = self.rng.choice(self.world.prompts)
        keys = self.world.keys(ids)[:2]
        low = self.num_known(keys)
        with self.world.pins, ExitStack() as stack:
            try:
                views = stack.enter_context(self.cache.acquire(keys))
            except pk.PoolExhaustedError:
                self.world.num_refused += 1
                return
            assert self.world.forgets or len(views) >= low
            for _ in range(2):
                for number, view in enumerate(views):
                    assert self.world.is_right(view, ids, number)
                self.rng.choice([self.match, self.get, self.check_one])()

    def open_sequence(self) -> None:
        if len(self.sequences) == 3:
            self.close_one()
        ids = self.rng.choice(self.world.prompts)
        low = self.num_known(self.world.keys(ids))
        seq = self.cache.open_sequence(ids)
        reused = seq.num_tokens
        assert self.world.forgets or reused >= low * self.world.spec.page_tokens
        model = ModelSequence(salt=b"", extra=None, flavour=0, num_layers=self.cache.num_layers)
        model.plan(len(ids), ids)
        for layer in range(self.cache.num_layers):
            with seq.gather(layer) as kinds:
                model.layers[layer] = list(np.stack(kinds, axis=1).copy())
        model.num_named = reused
        size = self.world.spec.page_tokens
        for number in range(reused // size):
            page = model.page(self.world.spec, 0, number * size, (number + 1) * size)
            assert self.world.is_right(page, ids, number)
        self.sequences.append((seq, model))

    def append(self) -> None:
        if not self.sequences:
            return
        seq, model = self.rng.choice(self.sequences)
        if not model.is_even:
            return
        start = model.num_tokens
        count = self.rng.randrange(12)
        model.plan(start + count, [self.rng.randrange(50)])
        values = np.stack([self.new_kv(model, at, start, count) for at in range(2)])
        named = model.num_named == start and self.rng.random() < 0.5 and self.is_exact(model, start)
        ids = model.ids[start : start + count] if named else None
        seq.append(values[:, :, 0], values[:, :, 1], ids)
        for layer in range(2):
            model.layers[layer] += list(values[layer])
        if named:
            self.learn(model, start + count)

    def append_layers(self) -> None:
        if not self.sequences:
            return
        seq, model = self.rng.choice(self.sequences)
        goal = max(len(layer) for layer in model.layers) + self.rng.randrange(10)
        model.plan(goal, [self.rng.randrange(50)])
        for layer in range(self.rng.choice([1, 2])):
            start = len(model.layers[layer])
            values = self.new_kv(model, layer, start, goal - start)
            seq.append_layer(layer, values[:, 0], values[:, 1])
            model.layers[layer] += list(values)

    def new_kv(self, model: ModelSequence, layer: int, start: int, count: int) -> Array:
        spec = self.world.spec
        values = np.empty((count, 2, spec.held_heads, spec.head_dim), dtype=spec.np_dtype)
        for at in range(count):
            values[at] = token_kv(spec, layer, model.names[start + at], finite=True)
        return values

    def commit(self) -> None:
        if not self.sequences:
            return
        seq, model = self.rng.choice(self.sequences)
        count = self.rng.choice([model.num_tokens, self.rng.randrange(model.num_tokens + 1)])
        if not self.is_exact(model, count):
            return
        seq.commit(model.ids[:count])
        self.learn(model, count)

    def is_exact(self, model: ModelSequence, count: int) -> bool:
        """Whether the pages of the first tokens that have no name yet hold what all compute.

        Those that go on from an INT8 page, or tail, do not.
        """
        start = model.num_named - model.num_named % self.world.spec.page_tokens
        return all(
            bits(model.layers[layer][at])
            == bits(token_kv(self.world.spec, layer, model.names[at], finite=True))
            for layer in range(2)
            for at in range(start, count)
        )

    def learn(self, model: ModelSequence, count: int) -> None:
        model.num_named = max(model.num_named, count)
        self.world.known.update(self.world.keys(model.ids[:count]))

    def fork(self) -> None:
        if not self.sequences or len(self.sequences) == 3:
            return
        seq, model = self.rng.choice(self.sequences)
        if model.is_even:
            self.sequences.append((seq.fork(), model.copy()))

    def truncate(self) -> None:
        if not self.sequences:
            return
        seq, model = self.rng.choice(self.sequences)
        count = self.rng.randrange(model.num_tokens + 1)
        seq.truncate(count)
        model.cut(count)

    def close_one(self) -> None:
        if self.sequences:
            seq, _ = self.sequences.pop(self.rng.randrange(len(self.sequences)))
            seq.close()

    def check_one(self) -> None:
        if not self.sequences:
            return
        seq, model = self.rng.choice(self.sequences)
        for layer in range(2):
            with seq.gather(layer) as kinds:
                for number, kind in enumerate(kinds):
                    expected = b"".join(bits(token[number]) for token in model.layers[layer])
                    assert bits(kind) == expected, "a live sequence has changed"

    def flush_or_save(self) -> None:
        if not self.sequences or self.rng.random() < 0.3:
            self.cache.flush()
            return
        seq, model = self.rng.choice(self.sequences)
        if model.is_even and model.num_named == model.num_tokens and self.cache.store is not None:
            seq.save()


@pytest.mark.parametrize("policy", [pk.LRU, pk.FIFO])
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("write_policy", ["on-evict", "write-through"])
@pytest.mark.usefixtures("jittery_disk")
def test_eight_threads_find_what_was_put(
    tmp_path: Path, policy: Any, codec: str, write_policy: Any
) -> None:
    spec = make_spec(page_tokens=2)
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec, codec=codec)
    with pk.PagedKVCache(spec, 6, store=store, policy=policy(), write_policy=write_policy) as cache:
        world = World(cache, forgets=False, lossy=codec == "int8")
        run_threads([Worker(world, seed, 60) for seed in range(NUM_THREADS)])
        check_nothing_is_left(cache)
        assert cache.stats().num_pages_evicted > 40
        for ids in world.prompts:
            keys = world.keys(ids)
            count = cache.match(keys)
            for number, page in enumerate(cache.get(keys[:count])):
                assert world.is_right(page, ids, number)
        keys_put = sorted(world.known)
    with pk.PageStore.open(tmp_path / "cache.zarr", mode="r") as store:
        assert all(key in store for key in keys_put)


def test_eight_threads_without_a_store_see_no_wrong_page() -> None:
    spec = make_spec(page_tokens=2)
    with pk.PagedKVCache(spec, 400) as cache:  # the threads' sequences fit, with little beside
        world = World(cache, forgets=True, lossy=False)
        run_threads([Worker(world, seed, 150) for seed in range(NUM_THREADS)])
        check_nothing_is_left(cache)


def check_nothing_is_left(cache: pk.PagedKVCache) -> None:
    wait_for_writers(cache)
    cache.check_invariants()
    stats = cache.stats()
    assert stats.num_pinned_slots == 0
    assert stats.num_pages_held == 0
    for group in cache._groups:
        places = group.places
        assert places.num_moving == 0
        assert places.spill is None or places.spill.num_used == 0


@pytest.mark.usefixtures("jittery_disk")
def test_put_and_get_alone_never_exhaust_a_pool_of_two_slots(tmp_path: Path) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    keys = [make_key(number) for number in range(24)]
    pages = make_pages(spec, range(24))

    with pk.PagedKVCache(spec, 2, store=store) as cache:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(30):
                first = rng.randrange(20)
                part = slice(first, first + rng.randrange(1, 5))
                cache.put(keys[part], pages[part])
                assert bits(cache.get(keys[part])) == bits(pages[part])

        run_threads([lambda seed=seed: work(seed) for seed in range(NUM_THREADS)])
        check_nothing_is_left(cache)


@pytest.mark.usefixtures("jittery_disk")
def test_threads_that_put_the_same_keys_all_find_them_afterwards(tmp_path: Path) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 4, store=store) as cache:

        def work() -> None:
            for start in range(0, 160, 16):
                numbers = range(start, start + 16)
                keys, pages = [make_key(n) for n in numbers], make_pages(spec, numbers)
                cache.put(keys, pages)
                assert cache.match(keys) == 16
                assert bits(cache.get(keys)) == bits(pages)

        run_threads([work] * NUM_THREADS)
        check_nothing_is_left(cache)
        assert cache.stats().num_pages_stored >= 156  # each was written once, though 8 put it
        assert store.num_pages <= 160


@pytest.mark.usefixtures("jittery_disk")
def test_forks_of_one_sequence_write_apart_in_threads_of_their_own(tmp_path: Path) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 3, store=store) as cache:
        parent = cache.open_sequence()
        k, v = make_kv(spec, 10, seed=1)
        parent.append(k, v, list(range(10)))
        for round_number in range(6):
            children = [parent.fork() for _ in range(NUM_THREADS)]

            def work(number: int, child: pk.Sequence, round_number: int) -> None:
                new_k, new_v = make_kv(spec, 7, seed=100 * round_number + number)
                cut = 5 + number % 5
                child.truncate(cut)
                for at in range(7):
                    child.append(new_k[:, at : at + 1], new_v[:, at : at + 1])
                for layer in range(2):
                    with child.gather(layer) as (got_k, got_v):
                        assert bits(got_k) == bits(np.concatenate([k[layer, :cut], new_k[layer]]))
                        assert bits(got_v) == bits(np.concatenate([v[layer, :cut], new_v[layer]]))
                child.close()

            run_threads(
                [
                    lambda n=number, c=child, r=round_number: work(n, c, r)
                    for number, child in enumerate(children)
                ]
            )
            for layer in range(2):
                with parent.gather(layer) as (got_k, got_v):
                    assert bits(got_k) == bits(k[layer])
                    assert bits(got_v) == bits(v[layer])
            cache.check_invariants()
        parent.close()
        check_nothing_is_left(cache)


@pytest.mark.usefixtures("jittery_disk")
def test_a_parent_that_commits_does_not_disturb_children_that_read(tmp_path: Path) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 2, store=store) as cache:
        for round_number in range(8):
            k, v = make_kv(spec, 24, seed=round_number)
            parent = cache.open_sequence()
            parent.append(k, v)  # private and mostly spilled: commit will store it
            children = [parent.fork() for _ in range(3)]
            others_k, others_v = make_kv(spec, 24, seed=1000 + round_number)

            def read(child: pk.Sequence, k: Array = k) -> None:
                for _ in range(6):
                    for layer in range(2):
                        with child.gather(layer) as (got, _):
                            assert bits(got) == bits(k[layer])

            def commit(parent: pk.Sequence = parent, round_number: int = round_number) -> None:
                parent.commit([round_number * 24 + at for at in range(24)])
                parent.close()

            def spill(k: Array = others_k, v: Array = others_v) -> None:
                with cache.open_sequence() as other:
                    for at in range(24):  # takes spill records as soon as they are free
                        other.append(k[:, at : at + 1], v[:, at : at + 1])
                    with other.gather(1) as (got, _):
                        assert bits(got) == bits(k[1])

            run_threads([lambda c=child: read(c) for child in children] + [commit, spill])
            for child in children:
                child.close()
            check_nothing_is_left(cache)


@pytest.mark.usefixtures("jittery_disk")
def test_loads_run_beside_puts(tmp_path: Path) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 2, store=store) as cache:
        keys, pages = [make_key(n) for n in range(32)], make_pages(spec, range(32))
        cache.put(keys[:16], pages[:16])

        def load(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(10):
                wanted = rng.sample(range(16), 3)
                handle = cache.load([keys[n] for n in wanted])
                assert bits(handle.result()) == bits(pages[wanted])

        def put() -> None:
            for number in range(16, 32):
                cache.put(keys[number : number + 1], pages[number : number + 1])

        run_threads([lambda seed=seed: load(seed) for seed in range(6)] + [put, put])
        check_nothing_is_left(cache)


class WaitingArray(np.ndarray):
    """An array whose reader waits at one place, at its ``turn``-th visit."""

    def __array_finalize__(self, source: Any) -> None:
        self.turn = 10**9
        self.arrived = threading.Event()
        self.may_go_on = threading.Event()

    def __getitem__(self, index: Any) -> Any:
        self.turn -= 1
        if self.turn == 0:
            self.arrived.set()
            assert self.may_go_on.wait(PATIENCE_S)
        return np.asarray(self)[index]


@contextmanager
def running(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """A thread beside the block; it must have ended at its end."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the thread hangs"
    if errors:
        raise errors[0]


def test_get_waits_for_a_page_that_another_thread_has_begun_to_load(tmp_path: Path) -> None:
    spec = make_spec()
    keys, pages = [make_key(0), make_key(1)], make_pages(spec, [1, 2])
    with pk.PagedKVCache(spec, 4, pk.PageStore.open(tmp_path / "a.zarr", spec)) as cache:
        cache.put(keys[1:], pages[1:])
    with pk.PagedKVCache(spec, 4, pk.PageStore.open(tmp_path / "a.zarr", spec)) as cache:
        slow = pages[:1].copy().view(WaitingArray)
        slow.turn = 1
        out = np.empty_like(pages[1:]).view(WaitingArray)
        out.turn = 2  # the first visit is the store's
        got: list[Array] = []
        with running(lambda: cache.put(keys[:1], slow)):
            assert slow.arrived.wait(PATIENCE_S)
            with running(lambda: got.append(cache.get(keys))) as reader:
                time.sleep(0.05)  # it waits for the first page
                with running(lambda: cache.get(keys[1:], out=out)) as loader:
                    ends = time.monotonic() + 2
                    while loader.is_alive() and not out.arrived.wait(0.01):
                        if time.monotonic() > ends:
                            break
                    slow.may_go_on.set()
                    reader.join(0.2)
                    out.may_go_on.set()
        assert bits(got[0]) == bits(pages)


def test_put_goes_on_when_others_put_its_next_pages_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    store = pk.PageStore.open(tmp_path / "cache.zarr", spec)
    with pk.PagedKVCache(spec, 4, store) as cache:
        cache.put([make_key(99)], make_pages(spec, [99]))
        cache.flush()  # so that the arrays need not grow
        before = [make_key(100 + number) for number in range(4)]
        cache.put(before, make_pages(spec, range(100, 104)))
        keys, pages = [make_key(number) for number in range(8)], make_pages(spec, range(8))
        writing, may_go_on = threading.Event(), threading.Event()
        real = files.write_all

        def write_all(fd: int, data: Any) -> None:
            if not writing.is_set():
                writing.set()
                assert may_go_on.wait(PATIENCE_S)
            real(fd, data)

        monkeypatch.setattr(files, "write_all", write_all)
        with running(lambda: cache.put(keys, pages)):
            assert writing.wait(PATIENCE_S)  # it makes room
            with running(
                lambda: [cache.put(keys[n : n + 1], pages[n : n + 1]) for n in (0, 1)]
            ) as t:
                t.join(1)
                may_go_on.set()
        assert cache.match(keys) == 8
        assert bits(cache.get(keys)) == bits(pages)


@pytest.mark.parametrize("how", ["copy on write", "saved tail"])
def test_a_copy_that_was_spilled_too_early_is_not_read_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    spec = make_spec()
    k, v = make_kv(spec, 3)
    with pk.PagedKVCache(spec, 1, pk.PageStore.open(tmp_path / "cache.zarr", spec)) as cache:
        parent = cache.open_sequence()
        parent.append(k[:, :2], v[:, :2], [0, 1])
        parent.save()
        cache.put([make_key(1)], make_pages(spec, [1]))  # leaves its numbers in the slot
        real = LayerGroup.new_pages

        def new_pages(group: LayerGroup, count: int, after: Any) -> Any:
            pages = real(group, count, after)
            with cache._lock:  # another thread makes room, and then finds a slot elsewhere
                group.moves.write(pages, spill=True)
            return pages

        with monkeypatch.context() as patch:
            patch.setattr(LayerGroup, "new_pages", new_pages)
            if how == "copy on write":
                sequence = parent.fork()
                sequence.append(k[:, 2:], v[:, 2:])
                expected = k
            else:
                sequence = cache.open_sequence([0, 1])
                expected = k[:, :2]
        cache.put([make_key(0)], make_pages(spec, [0]))
        with cache.acquire([make_key(0)]):  # takes the only slot
            for layer in range(2):
                with sequence.gather(layer) as kinds:
                    assert bits(kinds[0]) == bits(expected[layer])
        check = cache.open_sequence([0, 1])
        assert check.num_tokens == 2
