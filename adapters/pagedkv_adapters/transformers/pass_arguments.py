"""The arguments of a forward pass: which of them change KV in a way that page keys do not name."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

BY_COLUMN = ("input_ids", "position_ids")
"""Arguments whose last axis is that of the columns to compute."""
_LAST_LOGITS = (
    *BY_COLUMN,
    "attention_mask",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "return_dict",
)
"""Arguments that are known to ask for nothing but the logits of the last columns."""
_HARMLESS = (*_LAST_LOGITS, "inputs_embeds", "labels", "cache_position", "num_items_in_batch")
"""Arguments that are read elsewhere, or that do not touch KV."""
_DISTANCES_ONLY = ("bloom", "mpt")
"""By ``model_type``, models that know no positions, but how far apart tokens are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """How a model knows where tokens stand.

    Args:
        are_taken: Whether its forward pass knows the argument ``position_ids``.
        are_distances: Whether it knows distances only, so that pads shift nothing.
        are_own: Whether it counts in a way of its own where ``position_ids`` are not given.
    """

    are_taken: bool
    are_distances: bool
    are_own: bool


def positions_of(model: PreTrainedModel) -> Positions:
    """How a model knows where tokens stand."""
    config = model.config.get_text_config(decoder=True)
    is_known = config.model_type in _DISTANCES_ONLY or bool(getattr(config, "alibi", False))
    return Positions(
        are_taken="position_ids" in inspect.signature(model.forward).parameters,
        are_distances=is_known,
        are_own=any(
            hasattr(type(one), "create_position_ids_from_input_ids") for one in model.modules()
        ),
    )


def require_named_by_keys(
    model: PreTrainedModel, arguments: dict[str, Any], positions: Positions
) -> None:
    """``ValueError`` for arguments on which KV depends beside token ids and their order.

    Args:
        model: The model.
        arguments: All that its forward pass is given, by name.
        positions: How the model knows them.
    """
    others = [n for n, v in arguments.items() if n not in _HARMLESS and _may_change_kv(n, v)]
    if others:
        raise ValueError(
            f"{', '.join(others)} given: PagedCache takes text only, since page keys name nothing "
            "but token ids"
        )
    if arguments.get("use_cache") is False:
        raise ValueError("use_cache=False given with a cache: leave one of them out")
    if positions.are_own and arguments.get("position_ids") is None:
        raise ValueError(
            f"{type(model).__name__} counts positions in a way of its own if it is given no "
            "position_ids: give position_ids=torch.arange(...) as generate does"
        )


def is_random(model: PreTrainedModel) -> bool:
    """Whether dropout changes what a forward pass computes."""
    if not model.training:
        return False
    config = vars(model.config.get_text_config(decoder=True))  # to_dict would copy it in each step
    rates = [v for name, v in config.items() if "drop" in name and isinstance(v, int | float)]
    return any(rates) or any(
        isinstance(one, torch.nn.Dropout) and one.p > 0 for one in model.modules()
    )


def num_kept(model: PreTrainedModel, arguments: dict[str, Any]) -> int:
    """The last columns whose logits are wanted; 0 if something of all columns may be wanted."""
    count = arguments.get("logits_to_keep")
    config = model.config
    wants_all = getattr(config, "output_hidden_states", False) or getattr(
        config, "output_attentions", False
    )
    others = [
        name
        for name, value in arguments.items()
        if name not in _LAST_LOGITS and value is not None and value is not False
    ]
    if others or wants_all or isinstance(count, bool) or not isinstance(count, int):
        return 0
    return 0 if arguments.get("input_ids") is None else count


def _may_change_kv(name: str, value: object) -> bool:
    if name == "mm_token_type_ids" and isinstance(value, torch.Tensor):
        return bool(value.any())  # zeros stand for text
    if name == "is_causal":
        return value is False
    return not (
        value is None or isinstance(value, bool | int | float | str) or value in ({}, [], ())
    )
