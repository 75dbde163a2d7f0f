"""Models that were compiled, moved, wrapped or changed: refused before they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import accelerate
import tiny_models as tiny
import torch
from tiny_models import generate, random_ids
from transformers import CompileConfig, DynamicCache, LlamaForCausalLM

import pagedkv as pk
from pagedkv_adapters.transformers import PagedCache, fingerprint, loaded_model, spec_for

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# -- compiled ----------------------------------------------------------------------------------


def compiled_wrapper() -> Any:
    return torch.compile(tiny.llama(), backend="eager")


def compiled_in_place() -> Any:
    model = tiny.llama()
    model.compile(backend="eager")
    return model


def compiled_forward() -> Any:
    model = tiny.llama()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def compiled_layer() -> Any:
    model = tiny.llama()
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (compiled_wrapper, "OptimizedModule is no transformers model, .* what was compiled"),
        (compiled_in_place, "LlamaForCausalLM is compiled"),
        (compiled_forward, "LlamaForCausalLM is compiled"),
        (compiled_layer, "LlamaForCausalLM is compiled"),
    ],
)
def test_a_compiled_model_is_refused(build: Callable[[], Any], reason: str) -> None:
    for model_fingerprint in (None, "mine"):
        with pytest.raises(ValueError, match=reason):
            spec_for(build(), model_fingerprint=model_fingerprint)


# -- where the weights are ---------------------------------------------------------------------


def offloaded_to_memory(folder: Path) -> Any:
    return accelerate.cpu_offload(tiny.llama(), CPU)


def offloaded_to_disk(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=folder / "offloaded"
    )


def offloaded_in_part(folder: Path) -> Any:
    on_cpu = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb")
    places = {**dict.fromkeys(on_cpu, "cpu"), "lm_head": "disk"}
    return LlamaForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=folder / "offloaded"
    )


def moved_to_its_device_when_used(folder: Path) -> Any:
    model, _ = accelerate.cpu_offload_with_hook(tiny.llama(), CPU)
    return model


@pytest.mark.parametrize(
    "build",
    [offloaded_to_memory, offloaded_to_disk, offloaded_in_part, moved_to_its_device_when_used],
)
def test_a_model_whose_weights_accelerate_moves_is_refused(
    build: Callable[[Path], Any], folder: Path
) -> None:
    with pytest.raises(ValueError, match="weights that accelerate loads when they are used"):
        spec_for(build(folder))


@pytest.mark.parametrize("other", ["meta", "cuda:0"])
def test_a_model_on_several_devices_is_refused(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    parts = loaded_model._parts_of(model)._replace(devices={CPU, torch.device(other)})
    monkeypatch.setattr(loaded_model, "_parts_of", lambda _: parts)
    with pytest.raises(ValueError, match=f"has its weights on cpu, {other}: load all of them to"):
        spec_for(model)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny.llama()
    with pytest.raises(ValueError, match="has its weights on meta"):
        spec_for(model, model_fingerprint="mine")


def test_a_model_that_was_sharded_is_refused() -> None:
    class DTensor(torch.nn.Parameter):
        """What torch's class of that name is for a model that is spread over processes."""

    model = tiny.llama()
    weight = model.lm_head.weight
    model.lm_head.weight = DTensor(weight.detach())
    model.lm_head.weight.__class__ = DTensor
    with pytest.raises(ValueError, match="spread over processes"):
        spec_for(model)


@pytest.mark.parametrize("with_hooks", [False, True])
def test_a_model_on_one_device_is_not_refused(with_hooks: bool, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    if with_hooks:
        model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert spec_for(model).model == pk.fingerprint_files(folder)


# -- what was added to the weights -------------------------------------------------------------


class Adapter(torch.nn.Linear):
    """Marked as peft marks its layers, without peft."""

    adapter_layer_names = ("lora_A", "lora_B")


class OfPeft(torch.nn.Linear):
    """Of peft, but not marked."""

    __module__ = "peft.tuners.some_adapter"


class Packed(torch.nn.Linear):
    """As torch's dynamic quantisation makes it, without what is deprecated."""

    __module__ = "torch.ao.nn.quantized.dynamic.modules.linear"


class OtherBytes(torch.Tensor):
    """As torchao's quantisation makes weights."""


def with_layer(kind: type[torch.nn.Linear]) -> Any:
    model = tiny.llama()
    model.model.layers[1].self_attn.q_proj = kind(64, 64, bias=False)
    return model


def with_other_weights() -> Any:
    model = tiny.llama()
    weight = model.lm_head.weight.detach().as_subclass(OtherBytes)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert type(model.lm_head.weight) is OtherBytes
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: with_layer(Adapter), "has adapters .Adapter., .* merge them"),
        (lambda: with_layer(OfPeft), "has adapters .OfPeft., .* merge them"),
        (lambda: with_layer(Packed), "has weights that are no parameters"),
        (with_other_weights, "has weights of the type OtherBytes"),
    ],
    ids=["adapter", "peft", "packed weights", "other weights"],
)
def test_weights_whose_bytes_do_not_tell_them_apart_need_a_name(
    build: Callable[[], Any], reason: str
) -> None:
    model = build()
    with pytest.raises(ValueError, match=f"{reason}.*give model_fingerprint"):
        spec_for(model)
    assert spec_for(model, model_fingerprint="mine").model == "mine"


def test_a_wrapper_is_refused_and_what_it_wraps_is_not() -> None:
    model = tiny.llama()
    wrapper = torch.nn.DataParallel(model)
    with pytest.raises(ValueError, match="DataParallel is no transformers model, but perhaps"):
        spec_for(wrapper, model_fingerprint="mine")  # type: ignore[arg-type]
    assert spec_for(wrapper.module).model == fingerprint(model)


def test_what_is_done_to_a_model_later_is_noticed() -> None:
    model = tiny.llama()
    spec_for(model)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled"):
        spec_for(model)


def test_modules_are_visited_once_even_in_a_circle() -> None:
    model = tiny.llama()
    model.model.layers[0].parent = model
    parts = loaded_model._parts_of(model)
    assert parts.kinds == {type(module) for module in model.modules()}
    assert parts.devices == {CPU}


# -- how it generates --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["static", "offloaded", "offloaded_static", "quantized", "paged"])
def test_generate_refuses_another_kind_of_cache_before_it_computes(kind: str) -> None:
    model, ids = tiny.llama(), random_ids(40, seed=1)
    model.generation_config.cache_implementation = kind
    with pk.PagedKVCache(spec_for(model), 16) as kv, PagedCache(model, kv) as cache:
        model.model.register_forward_pre_hook(lambda *_: pytest.fail("something is computed"))
        with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
            generate(model, ids, cache)


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_implementation", "hybrid"), ("compile_config", CompileConfig(backend="no such"))],
    ids=["hybrid", "compiled"],
)
def test_generate_passes_over_what_it_cannot_do_with_a_cache(name: str, value: Any) -> None:
    model, ids = tiny.llama(), random_ids(40, seed=1)
    expected = generate(model, ids, DynamicCache())
    setattr(model.generation_config, name, value)
    with pk.PagedKVCache(spec_for(model), 16) as kv, PagedCache(model, kv) as cache:
        output = generate(model, ids, cache)
        assert cache.get_seq_length() == 59
    assert torch.equal(output.sequences, expected.sequences)


def test_offloading_is_no_parameter() -> None:
    model = tiny.llama()
    with pk.PagedKVCache(spec_for(model), 16) as kv, pytest.raises(TypeError, match="offloading"):
        PagedCache(model, kv, offloading=True)  # type: ignore[call-arg]
