"""``attn_implementation="pagedkv"``: attention over the block table, without gathering it."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pagedkv_adapters.transformers.tensors import to_numpy, to_torch

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache

ATTENTION_NAME = "pagedkv"
"""What ``attn_implementation`` is to be."""
MAX_QUERIES = 16
"""More tokens at once are attended by torch, over gathered pages."""

_PAGES = "_pagedkv_pages"
_NOT_TAKEN = ("s_aux", "head_mask", "position_bias")


class Pages(NamedTuple):
    """What stands for the keys of a layer, whose newest ones a tensor holds."""

    cache: "PagedCache"
    layer: int


def mark(keys: torch.Tensor, pages: Pages) -> None:
    """Let ``keys``, of the newest tokens, stand for all that a layer's pages hold."""
    setattr(keys, _PAGES, pages)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; ``(batch, token, head, channel)``.

    Keys that ``PagedCache`` marked are attended in its pages. All others, those of another cache
    or of a prompt's first forward pass, by ``scaled_dot_product_attention``.

    Raises:
        ValueError: The model wants what cannot be done over pages.
    """
    pages: Pages | None = getattr(key, _PAGES, None)
    if pages is None:
        if softcap is not None:
            return _capped_attention(module, query, key, value, attention_mask, scaling, softcap)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    others = [name for name in _NOT_TAKEN if kwargs.get(name) is not None]
    if others or dropout:
        raise ValueError(
            f"{type(module).__name__} attends with {', '.join(others) or 'dropout'}, which "
            f"{ATTENTION_NAME!r} does not know: load the model with attn_implementation='sdpa'"
        )
    out = pages.cache.attend(
        pages.layer, to_numpy(query), scale=scaling, window=sliding_window, soft_cap=softcap
    )
    return to_torch(out).transpose(1, 2).to(query.device), None


def register() -> None:
    """Make ``attn_implementation="pagedkv"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def _capped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float,
) -> tuple[torch.Tensor, None]:
    """What ``scaled_dot_product_attention`` cannot do: scores are capped before the softmax."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ repeat_kv(key, groups).transpose(2, 3)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        shape = scores.shape[-2:]
        attention_mask = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
    hidden = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask < 0
    scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return (weights @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), None
