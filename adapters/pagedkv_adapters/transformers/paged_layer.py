"""``PagedLayer``: one layer of a ``PagedCache``, as transformers addresses it."""

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from pagedkv_adapters.transformers.paged_cache import PagedCache


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers
    """One layer of a cache; what concerns all layers is done by ``PagedCache`` itself.

    A layer with a window returns what ``DynamicCache`` keeps of it; the pages hold all tokens.

    Args:
        cache: The cache.
        layer: Number of the layer.
        window: So many tokens does a query see, itself included; None for all before it.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: "PagedCache", layer: int, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers
        self.is_initialized = True
        self.is_sliding = window is not None
        self.window = window
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
        """``PagedCache.get_seq_length``, the same for all layers."""
        return self._cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns a mask covers, the new ones included, and the first of them."""
        past = self.get_seq_length()
        first = self.first_column(past)
        return past + query_length - first, first

    def first_column(self, past: int) -> int:
        """The first column that ``update`` returns if there are ``past`` before the new ones."""
        return 0 if self.window is None else max(0, past - self.window + 1)

    def get_max_length(self) -> int:
        """-1, by which transformers knows a cache without a bound."""
        return -1

    def offload(self) -> None:
        """Do nothing: the pages are where the cache put them."""

    def prefetch(self) -> None:
        """Do nothing: the pages are where the cache put them."""
