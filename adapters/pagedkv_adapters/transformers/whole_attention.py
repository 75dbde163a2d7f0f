"""Attention to whole keys and values, as the model would have it without this package.

That is torch's ``scaled_dot_product_attention`` for models that say that they support it, and else
the eager attention of their own module, which knows what only they do: sinks, caps on the scores.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""``(batch, token, head, channel)``, and the weights if there are any."""

_UNKNOWN_TO_SDPA = ("s_aux", "sinks", "head_mask", "softcap")
_FOLDED_IN_BY_NAME = ("indices", "block_indices")
"""What models fold into the mask only if the implementation is called 'sdpa' or 'eager'."""


class OwnAttention(NamedTuple):
    """What the module that defines an attention says of it."""

    eager: Callable[..., Attended] | None
    supports_sdpa: bool


@functools.cache
def own_attention(module_name: str) -> OwnAttention:
    """What is known of the attention of a Python module."""
    module = sys.modules.get(module_name)
    models = [
        found
        for found in vars(module).values()
        if isinstance(found, type)
        and issubclass(found, PreTrainedModel)
        and found.__module__ == module_name
    ]
    eager = getattr(module, "eager_attention_forward", None)
    return OwnAttention(eager, all(model._supports_sdpa for model in models))


def attend_whole(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    wants_weights: bool = False,
    **options: Any,
) -> Attended:
    """Attention of a model's own kind.

    Args:
        module: The model's attention.
        query: ``(batch, q_head, token, channel)``.
        key: ``(batch, head, token, channel)``.
        value: The same.
        attention_mask: As ``mask_for`` made it, or None for a causal one.
        wants_weights: Whether the weights are returned too, where the model has an eager attention.
        **options: What the model gave beside.

    Raises:
        ValueError: The model wants what neither torch's attention nor an eager one of its own does.
    """
    own, name = own_attention(type(module).__module__), type(module).__name__
    folded = [option for option in _FOLDED_IN_BY_NAME if options.get(option) is not None]
    if folded:
        raise ValueError(
            f"{name} chooses tokens by {', '.join(folded)}, which 'pagedkv' does not know: load the"
            " model with attn_implementation='eager'"
        )
    if own.eager is not None and (wants_weights or not own.supports_sdpa):
        mask = _additive(module, query, key, attention_mask, options.get("is_causal"))
        return own.eager(module, query, key, value, mask, **options)
    lost = [option for option in _UNKNOWN_TO_SDPA if options.get(option) is not None]
    if lost or not own.supports_sdpa:
        raise ValueError(
            f"{name} attends with {', '.join(lost) or 'what torch does not support'}, and its "
            "module has no eager_attention_forward to do it: load the model with "
            "attn_implementation='eager'"
        )
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def mask_for(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask for ``attend_whole``; for what the model does itself if it asks for no attention.

    A model that does not know ``AttentionInterface`` attends eagerly under a name that it does not
    know, and adds the mask to the scores: it gets one of numbers. All others get one of booleans.
    """
    make = sdpa_mask if _asks_for_attention(type(config)) else eager_mask
    mask: torch.Tensor | None = make(*args, config=config, **kwargs)
    return mask


def _asks_for_attention(config: type) -> bool:
    """Whether the models of a configuration let ``AttentionInterface`` choose; False if unknown."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        found: Any = mapping.get(config, None)
        if found is not None:
            models = found if isinstance(found, tuple) else (found,)
            return all(model._can_set_attn_implementation() for model in models)
    return False


def _additive(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool | None,
) -> torch.Tensor:
    """The mask as numbers that are added to the scores."""
    if mask is None:
        num_queries, num_tokens = query.shape[2], key.shape[2]
        mask = torch.ones(1, 1, num_queries, num_tokens, dtype=torch.bool, device=query.device)
        if getattr(module, "is_causal", True) if is_causal is None else is_causal:
            mask = mask.tril(num_tokens - num_queries)
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(query.dtype).min)
