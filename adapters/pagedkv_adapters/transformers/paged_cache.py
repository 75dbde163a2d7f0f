"""``PagedCache``: one sequence of a ``PagedKVCache`` in the shape that transformers expects."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import pagedkv as pk
from pagedkv_adapters.transformers.attention import (
    ATTENTION_NAME,
    MAX_QUERIES,
    Pages,
    Seen,
    mark,
    seen_through,
)
from pagedkv_adapters.transformers.model_hook import watch
from pagedkv_adapters.transformers.model_spec import spec_for
from pagedkv_adapters.transformers.paged_layer import PagedLayer
from pagedkv_adapters.transformers.tensors import no_gradient, to_numpy, to_torch
from pagedkv_adapters.transformers.token_ids import (
    UNKNOWN,
    one_row,
    require_equal,
    with_unknown,
)


class PagedCache(Cache):
    """The KV of one sequence in a ``PagedKVCache``, in the shape that transformers expects.

    Use it as ``model.generate(input_ids, cache=cache)``, then ``commit`` the output, so that
    prompt and answer can be reused. One sequence (batch of 1), greedy search or sampling, no
    padding: a hook on the model looks at each forward pass that is given a ``PagedCache`` and
    refuses, before anything is computed, what would put wrong numbers under a prompt's key.

    With ``attn_implementation="pagedkv"`` the model attends to the pages where they are; with any
    other, each layer's are gathered first. So they are for models that cannot attend to pages,
    which the log says once.

    Close it, or use it in a ``with`` statement: until then its pages are kept.

    Args:
        model: The model that will use it.
        kv: The cache that holds the pages, made for ``spec_for(model)``.
        sequence: What it starts from; an empty sequence by default.
        model_fingerprint: The one given to ``spec_for``, if any.

    Raises:
        ValueError: The model is not supported, or ``kv`` has several specs.
        SpecMismatchError: ``kv`` holds the KV of other weights, or of another geometry.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: pk.PagedKVCache,
        sequence: pk.Sequence | None = None,
        model_fingerprint: str | None = None,
    ) -> None:
        if len(kv.specs) > 1:
            raise ValueError(f"kv has {len(kv.specs)} specs: PagedCache needs a cache with one")
        self.kv = kv
        spec = spec_for(model, kv.specs[0].page_tokens, model_fingerprint)
        spec.require_equal(kv.specs[0], "the PagedKVCache")
        self.sequence = kv.open_sequence() if sequence is None else sequence
        self.num_reused_tokens = self.sequence.num_tokens
        """Tokens of the prompt whose KV was found in pool or store."""
        self._prompt = with_unknown(self.sequence.tokens, self.num_reused_tokens)
        self._seen = self._prompt  # ids of the tokens that the sequence holds
        self._gathered: AbstractContextManager[Any] | None = None  # what the last call returned
        self.wants_weights = False
        """Whether this forward pass returns the weights of its attention."""
        self._attends_to_pages: bool | None = False
        self._marked: int | None = None  # the layer whose keys' attention is still to come
        self._past = 0  # tokens before those that this forward pass appends
        self._arrived: dict[int, bool] = {}  # layers whose keys did, and whether as returned
        self._masks: list[tuple[torch.Tensor | None, Seen]] = []  # of this forward pass
        watch(model, PagedCache)
        super().__init__(layers=[PagedLayer(self, layer) for layer in range(spec.num_layers)])

    @classmethod
    def from_prompt(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor | npt.ArrayLike,
        kv: pk.PagedKVCache,
        salt: bytes = b"",
        model_fingerprint: str | None = None,
    ) -> Self:
        """A cache that begins with the longest prefix of the prompt that pool or store hold.

        At least one token is left for the model to compute.

        Args:
            model: The model that will use it.
            input_ids: The prompt, ``(1, token)`` or ``(token,)``; give ``generate`` the same.
            kv: The cache that holds the pages.
            salt: The tenant's; prefixes are shared under an equal salt only.
            model_fingerprint: The one given to ``spec_for``, if any.

        Raises:
            ValueError: ``input_ids`` are not one row of at least one token.
            SpecMismatchError: ``kv`` holds the KV of other weights, or of another geometry.
        """
        ids = one_row(input_ids, "input_ids")
        if not len(ids):
            raise ValueError("input_ids hold no token: a prompt needs at least one")
        sequence = kv.open_sequence(ids, salt=salt)
        try:
            sequence.truncate(min(sequence.num_tokens, len(ids) - 1))
            cache = cls(model, kv, sequence, model_fingerprint)
            cache._prompt = ids
            return cache
        except BaseException:
            sequence.close()
            raise

    def commit(self, output_ids: torch.Tensor | npt.ArrayLike) -> None:
        """Make prompt and answer reusable by other prompts.

        Args:
            output_ids: What ``generate`` returned: prompt and answer, ``(1, token)`` or
                ``(token,)``. The last token may be one whose KV was not computed.

        Raises:
            ValueError: The ids are not one row, too few, or not those that the model was given.
        """
        self._settle()
        ids = one_row(output_ids, "output_ids")
        num_tokens = self.sequence.num_tokens
        if len(ids) < num_tokens:
            raise ValueError(
                f"output_ids hold {len(ids)} tokens, but the cache {num_tokens}: give all ids "
                "that generate returned, the prompt included"
            )
        seen = with_unknown(self._seen, num_tokens)
        if (seen == UNKNOWN).any():
            raise ValueError(
                f"{int((seen == UNKNOWN).sum())} of {num_tokens} tokens were not given as "
                "input_ids (but as embeddings): their KV cannot be named by token ids"
            )
        require_equal(seen, ids, "output_ids", "the model was given")
        self.sequence.commit(ids[:num_tokens])

    def save(self) -> None:
        """Store the whole sequence durably, the last, partial page too; ``commit`` it first."""
        self._settle()
        self.sequence.save()

    def close(self) -> None:
        """Give up the pages; committed ones stay cached."""
        self._end_gather()
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin_forward(
        self,
        input_ids: torch.Tensor | None,
        attention_mask: object,
        position_ids: torch.Tensor | None,
        *,
        attends_to_pages: bool | None = False,
        wants_weights: bool = False,
    ) -> None:
        """Look at the arguments of a forward pass before it is computed.

        Args:
            input_ids: What it is given.
            attention_mask: The same.
            position_ids: The same.
            attends_to_pages: Whether the model's attention is this package's; None if that is to
                be found out in this pass, during which pages are gathered.
            wants_weights: Whether the pass is to return the weights of its attention.

        Raises:
            ValueError: There are several rows, hidden tokens, positions other than those that
                follow, or other ids than those of the prompt.
        """
        self._settle()
        self._attends_to_pages = attends_to_pages
        self.wants_weights = wants_weights
        past = self._past
        if input_ids is None:  # embeddings: their ids are unknown, and so is what commit gets
            self._seen = self._seen[:past]
            return
        new = one_row(input_ids, "input_ids")
        if not isinstance(attention_mask, torch.Tensor | None) or (
            attention_mask is not None and attention_mask.ndim != 2
        ):
            raise ValueError(
                "attention_mask must be (1, token), of ones, or left out: PagedCache cannot tell "
                "what another mask hides"
            )
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                f"attention_mask hides {int((attention_mask == 0).sum())} tokens: PagedCache takes "
                "unpadded prompts only; if none is padding, give "
                "attention_mask=torch.ones_like(input_ids)"
            )
        expected = np.arange(past, past + len(new))
        if position_ids is not None and not (position_ids.cpu().numpy() == expected).all():
            raise ValueError(
                f"position_ids are not {past}..{past + len(new) - 1}, which follow on the "
                f"{past} tokens that the cache holds: PagedCache takes unpadded prompts, and "
                "another prompt takes another PagedCache"
            )
        require_equal(self._prompt[past:], new, "input_ids", "from_prompt was given", at=past)
        self._seen = np.concatenate([with_unknown(self._seen, past), new])

    def end_forward(self) -> bool | None:
        """Look at what a forward pass did after it was computed.

        Returns:
            Whether the model attends to what its cache returns, if that was to be found out.

        Raises:
            ValueError: The pass attended to the newest tokens of the last layer only.
        """
        self._check_attended()
        if self._attends_to_pages is not None:
            return None
        return [self._arrived.get(layer) for layer in range(len(self.layers))] == (
            [True] * len(self.layers)
        )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer; all keys and values of it, ``(1, head, token, channel)``.

        The tensors are valid until the next call. Where the model attends to pages, they are those
        of the new tokens only, marked for ``paged_attention``.

        Raises:
            ValueError: The batch is not 1, or the keys of the layer before were not attended.
        """
        if layer_idx == 0:
            self._settle()
        elif self._marked is not None:
            self._check_attended()
        self._end_gather()
        shape = key_states.shape
        if len(shape) != 4 or shape[0] != 1 or value_states.shape[0] != 1:
            raise ValueError(
                f"key_states have shape {tuple(shape)} and value_states "
                f"{tuple(value_states.shape)}: PagedCache holds one sequence, so the batch (beams, "
                "returned sequences) must be 1"
            )
        self.sequence.append_layer(layer_idx, to_numpy(key_states), to_numpy(value_states))
        is_whole = not (self._attends_to_pages and self._past and shape[2] <= MAX_QUERIES)
        if is_whole:
            if self._past:
                key_states, value_states = self.gather_layer(layer_idx, key_states, value_states)
            if self._attends_to_pages is False:
                return key_states, value_states
        else:
            self._marked = layer_idx
        return mark(key_states, Pages(self, layer_idx, value_states, is_whole)), value_states

    def gather_layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, ``(1, head, token, channel)``, valid until the next call.

        Args:
            layer: Which layer.
            keys: The newest of them, which the layer holds already.
            values: The same.
        """
        if keys.shape[2] > 1:
            with self.sequence.gather(layer, self._past) as held:
                before = [to_torch(array).transpose(1, 2).to(keys.device) for array in held]
                k = torch.cat([before[0], keys], dim=2)
                v = torch.cat([before[1], values], dim=2)
        else:
            self._gathered = self.sequence.gather(layer)
            held = self._gathered.__enter__()
            k, v = (to_torch(array).transpose(1, 2).to(keys.device) for array in held)
            if layer == len(self.layers) - 1:
                k, v = k.clone(), v.clone()  # no call follows that would end the gather
                self._end_gather()
        return no_gradient(k, keys), no_gradient(v, values)

    def note_attention(self, layer: int, *, is_untouched: bool) -> None:
        """What ``update`` returned came to ``paged_attention``.

        Args:
            layer: Of which layer.
            is_untouched: Whether the values are those that were returned.

        Raises:
            ValueError: They are others, of the newest tokens only.
        """
        if self._marked is not None and not is_untouched:
            raise ValueError(
                f"the model changed the values of layer {layer} before it attended to them by "
                f"{ATTENTION_NAME!r}: load it with attn_implementation='sdpa'"
            )
        self._marked = None
        if self._attends_to_pages is None:
            self._arrived[layer] = is_untouched and self._arrived.get(layer, True)

    def seen_through(self, mask: torch.Tensor | None, num_queries: int) -> Seen:
        """What the newest tokens see through a mask; computed once for all layers that share it."""
        for known, seen in self._masks:
            if known is mask:
                return seen
        seen = seen_through(mask, num_queries, self._past + num_queries)
        self._masks.append((mask, seen))
        return seen

    def reset(self) -> None:
        """Drop all tokens."""
        self._settle()
        self.sequence.truncate(0)
        self._prompt = self._seen = self._prompt[:0]

    def _settle(self) -> None:
        """End the last gather, and drop what a forward pass that failed left in some layers."""
        self._end_gather()
        self._past = self.sequence.num_tokens
        self.sequence.truncate(self._past)
        self._marked = None
        self._arrived.clear()
        self._masks.clear()

    def _end_gather(self) -> None:
        if self._gathered is not None:
            gathered, self._gathered = self._gathered, None
            gathered.__exit__(None, None, None)

    def _check_attended(self) -> None:
        """``ValueError`` if the model did something else with the keys of the layer before."""
        if self._marked is not None:
            raise ValueError(
                f"the model did not attend to layer {self._marked} by {ATTENTION_NAME!r}, which it"
                " was loaded with: load it with attn_implementation='sdpa'"
            )
