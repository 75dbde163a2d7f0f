"""The contract: a cache for another model, geometry or dtype is refused, and left as it is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pagedkv as pk
from pagedkv_adapters.testing.adapter import AdapterUnderTest, Engine
from pagedkv_adapters.testing.calls import Interruption


class Refusals(AdapterUnderTest[Engine]):
    """Tests of whose KV is whose."""

    def test_equal_weights_have_one_spec(self) -> None:
        """Else nothing is found after a restart: the fingerprint hangs on more than weights."""
        specs = [self.spec_for(self.make_engine(seed=0), self.page_tokens) for _ in range(2)]
        assert specs[0] == specs[1]

    def test_the_pages_of_other_weights_are_refused(self) -> None:
        """The fingerprint hangs on all weights, and is compared with the cache's."""
        engine, other, prompt = self.make_engine(seed=0), self.make_engine(seed=1), self.prompt(20)
        with self.open_cache(engine) as cache:
            self.check_answer(engine, prompt, cache)
            before = cache.stats()
            with pytest.raises(pk.SpecMismatchError):
                self.generate(other, prompt, cache, self.num_new_tokens, b"")
            self.check_nothing_is_held(cache)
            assert cache.stats().num_free_slots == before.num_free_slots
            assert self.check_answer(engine, prompt, cache) > 0

    @pytest.mark.parametrize(
        "field", ["model", "dtype", "num_layers", "num_kv_heads", "head_dim", "num_kinds"]
    )
    def test_a_cache_of_another_spec_is_refused_and_left_as_it_is(
        self, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``KVSpec.require_equal``, before anything is computed."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        spec = self.spec_for(engine, self.page_tokens)
        changed = {field: _another(getattr(spec, field))}
        other = replace(spec, layer_range=None, head_range=None, **changed)  # all layers and heads
        keys = pk.page_keys(other, prompt)
        pages = np.ones((len(keys), *other.page_shape), other.np_dtype)
        with pk.PagedKVCache(other, 2 * len(keys)) as cache:
            cache.put(keys, pages)
            calls = Interruption(monkeypatch)
            with pytest.raises(pk.SpecMismatchError):
                self.generate(engine, prompt, cache, self.num_new_tokens, b"")
            assert calls.num_calls == 0
            self.check_nothing_is_held(cache)
            assert cache.stats().num_free_slots == len(keys)
            np.testing.assert_array_equal(cache.get(keys), pages)

    def test_a_cache_of_several_specs_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A model whose layers all look alike has one."""
        engine, prompt = self.make_engine(seed=0), self.long_prompt()
        spec = self.spec_for(engine, self.page_tokens)
        with pk.PagedKVCache([spec, replace(spec, group="1")], 64) as cache:
            calls = Interruption(monkeypatch)
            with pytest.raises(ValueError):
                self.generate(engine, prompt, cache, self.num_new_tokens, b"")
            assert calls.num_calls == 0
            self.check_nothing_is_held(cache)


def _another(value: Any) -> Any:
    """A legal value of the same field of a spec."""
    match value:
        case "float32":
            return "bfloat16"
        case "float16" | "bfloat16":
            return "float32"
        case str():
            return f"not {value}"
        case 2:
            return 1
        case _:
            return value + 2
