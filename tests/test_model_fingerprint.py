"""``fingerprint`` sees changes of weights that torch does not count."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

import tiny_models as tiny
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.transformers import fingerprint

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_torch_thread", "own_cache_folder"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def merge(model: PreTrainedModel) -> None:
    """As peft merges an adapter: torch counts no change, and every object stays what it was."""
    left, right = torch.randn(64, 4), torch.randn(4, 64)
    model.model.layers[1].self_attn.q_proj.weight.data += 1e-3 * left @ right


def scale_rows(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.weight.data *= torch.linspace(1, 2, 64)[:, None]


def replace(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].self_attn.q_proj.weight
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(weight.detach() * 2)


def cut(model: PreTrainedModel) -> None:
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(weight[: len(weight) // 2])


def change_one_number(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[5, 7] += 1e-3


@pytest.mark.parametrize("change", [merge, scale_rows, replace, cut, change_one_number])
def test_weights_that_were_changed_are_not_those_of_the_folder(
    change: Callable[[PreTrainedModel], None], folder: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    change(model)
    assert fingerprint(model) != pk.fingerprint_files(folder)


@pytest.mark.parametrize("change", [merge, replace, cut, change_one_number])
def test_a_change_after_the_fingerprint_was_taken_is_seen(
    change: Callable[[PreTrainedModel], None], folder: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    assert fingerprint(model) == pk.fingerprint_files(folder)
    change(model)
    changed = fingerprint(model)
    assert changed != pk.fingerprint_files(folder)
    change(model)
    assert fingerprint(model) != changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_that_are_loaded_in_another_dtype_are_those_of_the_folder(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = torch.bfloat16 if dtype == torch.float32 else torch.float32
    tiny.llama().to(stored).save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    assert model.dtype == dtype
    assert fingerprint(model) == pk.fingerprint_files(tmp_path / "model")
