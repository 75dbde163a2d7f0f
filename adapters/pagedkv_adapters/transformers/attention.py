"""``attn_implementation="pagedkv"``: attention over the block table, without gathering it."""

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pagedkv_adapters.transformers.tensors import no_gradient
from pagedkv_adapters.transformers.whole_attention import (
    Attended,
    attend_whole,
    mask_for,
    own_attention,
)

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache

logger = logging.getLogger("pagedkv")

ATTENTION_NAME = "pagedkv"
"""What ``attn_implementation`` is to be."""
MAX_QUERIES = 16
"""More tokens at once are attended by torch, over gathered pages."""
MAX_GATHERED_NBYTES = 2**24
"""So much of a layer of a half type is gathered, to be attended by torch, for the sake of its bits.

torch rounds weights to the half type before it multiplies values with them, and kernels do not: a
token more or less likely by a bit in the last place may be another token. Where a context takes
more than this, which is what kernels take to read pages from disk, bounded memory comes first.
"""

_PAGES = "_pagedkv_pages"
_NOT_OVER_PAGES = ("s_aux", "sinks", "head_mask", "position_bias", "indices", "block_indices")
"""Arguments of models that say more of the attention than pages know."""
_INSTEAD = (
    f"{ATTENTION_NAME!r} cannot do that over pages, which are gathered for it and attended by the "
    "model's own kind of attention, as without 'pagedkv'"
)

_warned: set[tuple[type, str]] = set()


class Pages(NamedTuple):
    """The mark on keys that a ``PagedCache`` returned.

    Args:
        cache: Which one.
        layer: Of which layer.
        values: What it returned with the keys.
        is_whole: Whether keys and values are those of all tokens; else of the newest only.
    """

    cache: "PagedCache"
    layer: int
    values: torch.Tensor
    is_whole: bool


def mark(keys: torch.Tensor, pages: Pages) -> torch.Tensor:
    """``keys`` as another tensor, by which ``paged_attention`` knows where they are from."""
    marked = keys.view_as(keys)  # marked itself, and not what the model keeps
    setattr(marked, _PAGES, pages)
    return marked


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> Attended:
    """Attention as transformers calls it; returns ``(row, token, head, channel)``.

    Keys that ``PagedCache`` marked are attended in its pages. All others, those of another cache
    or of a prompt's first forward pass, and what cannot be done over pages, by ``attend_whole``.

    Which tokens a query sees is read from the mask, as it is for torch's attention.

    Raises:
        ValueError: The model wants what neither pages nor ``attend_whole`` can do, or it changed
            the values since the cache returned them.
    """
    pages: Pages | None = getattr(key, _PAGES, None)
    wants_weights = bool(kwargs.get("output_attentions"))
    if pages is not None:
        cache, layer, values, is_whole = pages
        cache.note_attention(layer, is_untouched=value is values)
        wants_weights = wants_weights or cache.wants_weights
        obstacle = _obstacle(module, dropout, softcap, kwargs, wants_weights)
        if not is_whole:
            if obstacle is None:
                attended = cache.attend(layer, query, attention_mask, scaling, softcap)
                if attended is not None:
                    return no_gradient(attended, query, key, value), None
            obstacle = obstacle or "a mask of its own"
            key, value = cache.gather_layer(layer, key, value)
        if obstacle is not None:
            warn_once(type(module), f"attends with {obstacle}: {_INSTEAD}")
    return attend_whole(
        module,
        query,
        key,
        value,
        attention_mask,
        wants_weights=wants_weights,
        scaling=scaling,
        dropout=dropout,
        softcap=softcap,
        **kwargs,
    )


def register() -> None:
    """Make ``attn_implementation="pagedkv"`` known to transformers."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_for)


def _obstacle(
    module: torch.nn.Module,
    dropout: float,
    softcap: float | None,
    kwargs: dict[str, Any],
    wants_weights: bool,
) -> str | None:
    """What the model wants that cannot be done over pages."""
    if wants_weights:
        return "output_attentions"
    if dropout:
        return "dropout"
    for name in _NOT_OVER_PAGES:
        if kwargs.get(name) is not None:
            return name
    if softcap is None and not own_attention(type(module).__module__).supports_sdpa:
        # Models that cap their scores do not support it for that alone, and pages know caps.
        return "what torch does not support"
    return None


def warn_once(subject: type, message: str) -> None:
    """Log what ``subject`` does, the first time that it does it."""
    if (subject, message) not in _warned:
        _warned.add((subject, message))
        logger.warning("%s %s", subject.__name__, message)
