"""``PagedLayer``: one layer of a ``PagedCache``, as transformers addresses it."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers
    """One layer of a cache; what concerns all layers is done once, by the first.

    Args:
        cache: The cache.
        layer: Number of the layer.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False  # the whole context is kept, windows are masked

    def __init__(self, cache: "PagedCache", layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers
        self.is_initialized = True
        self._cache = cache
        self._layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pages are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``PagedCache.update`` of this layer."""
        return self._cache.update(key_states, value_states, self._layer)

    def get_seq_length(self) -> int:
        """Tokens that all layers hold."""
        return self._cache.sequence.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a mask covers, the new ones included, and the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1, by which transformers knows a cache without a bound."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens, once for all layers."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop by {tokens_to_remove}: give 0 or a negative number")
        if self._layer == 0 and tokens_to_remove:
            sequence = self._cache.sequence
            sequence.truncate(sequence.num_tokens + tokens_to_remove)

    def reset(self) -> None:
        """Drop all tokens, once for all layers."""
        if self._layer == 0:
            self._cache.reset()

    def offload(self) -> None:
        """Do nothing: the pages are where the cache put them."""

    def prefetch(self) -> None:
        """Do nothing: the pages are where the cache put them."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refuse: it is for beams."""
        raise NotImplementedError("PagedCache does not support beam search yet: use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse more than one sequence."""
        if repeats != 1:
            raise NotImplementedError("PagedCache holds one sequence: repeat the call instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: it is for several sequences."""
        raise NotImplementedError("PagedCache holds one sequence: there is nothing to select from")
