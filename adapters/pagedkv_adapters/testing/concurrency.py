"""The contract: several engines, threads and caches in one process."""

import threading
from pathlib import Path

import numpy as np
import pytest

from pagedkv_adapters.testing.adapter import FEW_SLOTS, AdapterUnderTest, Engine
from pagedkv_adapters.testing.calls import TakingTurns


class Concurrency(AdapterUnderTest[Engine]):
    """Tests in which more than one generation goes on."""

    def test_two_threads_generate_over_one_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each with its own engine and sequences, and with prompts that begin alike."""
        engines = [self.make_engine(seed=0) for _ in range(2)]
        parts = [
            [self.prompt(20, seed=turn) for turn in range(3)],
            [self.prompt(9), self.prompt(5)],
        ]
        prompts = [[np.concatenate([a, b]) for a in parts[0]] for b in parts[1]]
        turns = TakingTurns(monkeypatch)
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for prompt in prompts[number]:
                    self.check_answer(engines[number], prompt, cache)
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                errors.append(error)
            finally:
                turns.end()

        path = tmp_path / "cache.zarr"
        with self.open_cache(engines[0], path, num_slots=2 * FEW_SLOTS) as cache:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for error in errors:
                raise error
            self.check_nothing_is_held(cache)

    def test_two_engines_with_a_cache_each(self) -> None:
        """If it fails, the adapter keeps something in a module or class that is an engine's own."""
        engines = [self.make_engine(seed) for seed in range(2)]
        prompt = self.long_prompt()
        with self.open_cache(engines[0]) as one, self.open_cache(engines[1]) as other:
            for expected in (0, self.reusable_again(prompt)):
                for engine, cache in zip(engines, (one, other), strict=True):
                    assert self.check_answer(engine, prompt, cache) == expected
