"""``PagedCache``: sequences of a ``PagedKVCache`` in the shape that transformers expects."""

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import pagedkv as pk
from pagedkv_adapters.transformers.answers import Padding, match_beams, match_rows
from pagedkv_adapters.transformers.attention import (
    ATTENTION_NAME,
    MAX_GATHERED_NBYTES,
    MAX_QUERIES,
    Pages,
    mark,
)
from pagedkv_adapters.transformers.batch_arrays import append, attend, gather
from pagedkv_adapters.transformers.forward_input import ForwardInput
from pagedkv_adapters.transformers.model_hook import watch
from pagedkv_adapters.transformers.model_spec import spec_for, windows_of
from pagedkv_adapters.transformers.paged_layer import PagedLayer
from pagedkv_adapters.transformers.row import Row
from pagedkv_adapters.transformers.rows import Rows, Snapshot
from pagedkv_adapters.transformers.seen import Seen, seen_through
from pagedkv_adapters.transformers.shared_prefill import MIN_SAVED_TOKENS, Compute, bring_level
from pagedkv_adapters.transformers.tensors import no_gradient, to_torch
from pagedkv_adapters.transformers.token_ids import as_rows, pads_of, require_equal


class PagedCache(Cache):
    """The KV of a batch of sequences in a ``PagedKVCache``, in the shape that transformers expects.

    Use it as ``model.generate(input_ids, cache=cache)``, then ``commit`` the output, so that
    prompts and answers can be reused. It takes what ``generate`` does: greedy search, sampling,
    beams, several returned sequences, batches with pads on the left, prompt lookup and assisted
    decoding, prefill in chunks.

    Pads are not kept: a prompt in a padded batch has the pages that it has alone. Rows that are
    equal so far, as beams are at first, are one sequence; once they part they share the pages
    before that. Where the caller wants the last logits only, as ``generate`` does, what rows have
    in common is computed once.

    A hook on the model looks at each forward pass that is given a ``PagedCache`` and refuses,
    before anything is computed, what would put wrong numbers under a prompt's key.

    With ``attn_implementation="pagedkv"`` the model attends to the pages where they are; with any
    other, each layer's are gathered first. So they are for models that cannot attend to pages,
    which the log says once.

    Close it, or use it in a ``with`` statement: until then its pages are kept.

    Args:
        model: The model that will use it.
        kv: The cache that holds the pages, made for ``spec_for(model)``. Many caches may share
            it, in several threads.
        sequence: What it starts from; an empty sequence by default. The cache owns it from then on.
        model_fingerprint: The one given to ``spec_for``, if any.
        window_only: Hold no page that lies before the windows of all layers, for models whose
            layers all have one. A page is committed before it is given up, where its ids are
            known, so that it stays cached like any other. Once some were given up, ``crop`` goes
            back no further than to the first that is left, and ``save`` is refused.

    Raises:
        ValueError: The model is not supported, ``kv`` has several specs, or ``window_only`` is
            asked of a model with a layer without a window.
        SpecMismatchError: ``kv`` holds the KV of other weights, or of another geometry.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kv: pk.PagedKVCache,
        sequence: pk.Sequence | None = None,
        model_fingerprint: str | None = None,
        *,
        window_only: bool = False,
    ) -> None:
        check_spec(model, kv, model_fingerprint)
        windows = windows_of(model, window_only=window_only)
        row = Row(kv.open_sequence() if sequence is None else sequence)
        self._start(model, kv, [row], windows, model_fingerprint, window_only)

    @classmethod
    def from_prompt(
        cls,
        model: PreTrainedModel,
        input_ids: torch.Tensor | npt.ArrayLike,
        kv: pk.PagedKVCache,
        salt: bytes = b"",
        model_fingerprint: str | None = None,
        attention_mask: torch.Tensor | npt.ArrayLike | None = None,
        *,
        window_only: bool = False,
    ) -> Self:
        """A cache that begins with the longest prefix of each prompt that pool or store hold.

        At least one token of each is left for the model to compute.

        Args:
            model: The model that will use it.
            input_ids: The prompts, ``(row, token)`` or ``(token,)``; give ``generate`` the same.
            kv: The cache that holds the pages.
            salt: The tenant's; prefixes are shared under an equal salt only.
            model_fingerprint: The one given to ``spec_for``, if any.
            attention_mask: ``(row, token)``, 0 for the pads on the left; without it there are none.
            window_only: As for the constructor.

        Raises:
            ValueError: A row of ``input_ids`` has no token, the mask does not fit, or the model is
                not supported.
            SpecMismatchError: ``kv`` holds the KV of other weights, or of another geometry.
        """
        check_spec(model, kv, model_fingerprint)
        windows = windows_of(model, window_only=window_only)
        ids = as_rows(input_ids, "input_ids")
        num_pads = pads_of(attention_mask, ids.shape)
        if (num_pads == ids.shape[1]).any():
            raise ValueError("input_ids hold a row without a token: a prompt needs at least one")
        rows: list[Row] = []
        try:
            for row_ids, pads in zip(ids, num_pads.tolist(), strict=True):
                prompt = row_ids[pads:]
                sequence = kv.open_sequence(prompt, salt=salt)
                rows.append(Row(sequence, prompt, pads))
                rows[-1].truncate(min(sequence.num_tokens, len(prompt) - 1))
            cache = cls.__new__(cls)
            cache._start(model, kv, rows, windows, model_fingerprint, window_only)
            return cache
        except BaseException:
            for row in rows:
                row.close()
            raise

    def _start(
        self,
        model: PreTrainedModel,
        kv: pk.PagedKVCache,
        rows: Seq[Row],
        windows: Seq[int | None],
        model_fingerprint: str | None,
        window_only: bool,
    ) -> None:
        """Take rows that are there, for a model that has been checked."""
        self.kv = kv
        self._model = model
        self._model_fingerprint = model_fingerprint
        self._rows = Rows(rows)
        self._prompt_rows = tuple(rows)
        self._past = 0  # columns before those that this forward pass appends
        self._is_begun = False  # whether there is one
        self._before: Snapshot | None = None  # the rows before it, until it has ended
        self._is_reordered = False
        self._gathered: AbstractContextManager[Any] | None = None  # what the last call returned
        self.wants_weights = False
        """Whether this forward pass returns the weights of its attention."""
        self._attends_to_pages: bool | None = False
        self._marked: int | None = None  # the layer whose keys' attention is still to come
        self._arrived: dict[int, bool] = {}  # layers whose keys did, and whether as returned
        self._masks: list[tuple[torch.Tensor | None, int | None, list[Seen]]] = []
        watch(model, PagedCache)
        self._window_only = window_only
        super().__init__(layers=[PagedLayer(self, at, one) for at, one in enumerate(windows)])

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the prompts whose KV was found in pool or store, summed over the rows.

        Fewer after the first forward pass, if a batch had to compute some of them again.
        """
        return sum(row.num_reused_tokens for row in self._prompt_rows)

    @property
    def sequences(self) -> tuple[pk.Sequence, ...]:
        """The sequence of each row; rows that are equal so far have the same."""
        return tuple(row.sequence for row in self._rows.all)

    @property
    def sequence(self) -> pk.Sequence:
        """The only sequence; ``ValueError`` if there are several."""
        if len(self._rows.distinct) > 1:
            raise ValueError(
                f"the cache holds {len(self._rows.distinct)} sequences: take sequences"
            )
        return self._rows.all[0].sequence

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self._rows)

    def commit(
        self, output_ids: torch.Tensor | npt.ArrayLike, pad_token_id: int | None = None
    ) -> None:
        """Make prompts and answers reusable by other prompts.

        Pads get no key. After beam search, whose beams go on while others are finished, what the
        cache still holds of the returned sequences is made reusable: their prompt at least.

        Args:
            output_ids: What ``generate`` returned: prompts and answers, ``(row, token)`` or
                ``(token,)``. The last token may be one whose KV was not computed.
            pad_token_id: What stands behind answers that are shorter than others; by default what
                the model's ``generation_config`` says.

        Raises:
            ValueError: The rows are not those of the cache, too short, or not what the model was
                given. Nothing has changed then.
            SpecMismatchError: The model's weights were changed since the cache was made.
        """
        self.settle()
        check_spec(self._model, self.kv, self._model_fingerprint)  # weights may have changed since
        outputs = as_rows(output_ids, "output_ids")
        if self._is_reordered:
            named = match_beams(self._rows.distinct, outputs)
        else:
            pads = Padding.of(self._model, pad_token_id)
            named = match_rows(self._rows.all, outputs, pads)
        for row, ids in named:
            row.commit(ids)

    def save(self) -> None:
        """Store all sequences durably, the last, partial pages too; ``commit`` them first.

        Raises:
            ValueError: A sequence is not committed, or its first pages were given up.
            StoreError: There is no writable store, or it failed.
        """
        self.settle()
        # Beams that were not returned have no names: they are not to be found again.
        committed = [row for row in self._rows.distinct if row.is_committed]
        for row in committed or self._rows.distinct:
            row.save()

    def close(self) -> None:
        """Give up the pages; committed ones stay cached."""
        self._end_gather()
        for row in self._rows.distinct:
            row.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what transformers calls ---------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns, pads and tokens, that all rows hold; in a forward pass, before it."""
        if self._is_begun:
            return self._past
        return self._rows.num_columns

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer; all keys and values of it, ``(row, head, token, channel)``.

        The tensors are valid until the next call. Where the model attends to pages, they are those
        of the new tokens only, marked for ``paged_attention``. Where it is not the model that the
        cache was made for that calls this, or a part of it alone, the tokens cannot be committed.

        Raises:
            ValueError: The batch has other rows, or the keys of the layer before were not attended.
        """
        if layer_idx == 0 and not self._is_begun:
            self._begin_unseen()
        self._check_attended()
        self._end_gather()
        shape = key_states.shape
        num_rows = len(self._rows)
        if len(shape) != 4 or shape[0] != num_rows or value_states.shape[0] != num_rows:
            raise ValueError(
                f"key_states have shape {tuple(shape)} and value_states "
                f"{tuple(value_states.shape)}, but the cache holds {num_rows} rows: call the model "
                "that the cache was made for, or batch_repeat_interleave first"
            )
        append(self._rows, layer_idx, self._past, key_states, value_states)
        is_whole = not self._attends_to_pages or self._is_gathered(layer_idx, shape[2])
        if is_whole:
            if self._past:
                key_states, value_states = self.gather_layer(layer_idx, key_states, value_states)
            if self._attends_to_pages is False:
                return key_states, value_states
        else:
            self._marked = layer_idx
        return mark(key_states, Pages(self, layer_idx, value_states, is_whole)), value_states

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` columns.

        Raises:
            ValueError: It is positive, there are fewer columns, or ``window_only`` has given up
                pages that would be needed then.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop by {tokens_to_remove}: give 0 or a negative number")
        self.settle()
        num_left = self._past + tokens_to_remove
        if num_left < 0:
            raise ValueError(f"crop by {tokens_to_remove}: the cache holds {self._past} tokens")
        for row in self._rows.distinct:
            row.crop(min(row.num_tokens, max(0, num_left - row.num_pads)))

    def reset(self) -> None:
        """Drop all rows, and begin with an empty one."""
        self.settle()
        self._rows.select(torch.zeros(1, dtype=torch.long))
        self._rows.all[0].reset()
        self._is_reordered = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Go on with these rows; one that occurs several times is forked when its copies differ."""
        self.settle()
        self._rows.select(beam_idx)
        self._is_reordered = True

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Go on with these rows, which numbers or booleans select; give up the others.

        Raises:
            ValueError: None is selected.
        """
        self.settle()
        self._rows.select(torch.arange(len(self._rows))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Go on with every row so many times, one beside the other.

        Raises:
            ValueError: ``repeats`` is not positive.
        """
        if repeats < 1:
            raise ValueError(f"repeats is {repeats}: give 1 or more")
        self.settle()
        self._rows.repeat(repeats)

    # -- what the hook on the model calls ------------------------------------------------------

    def settle(self) -> None:
        """End the last gather, and drop what a pass that was interrupted left in some layers.

        Raises:
            ClosedError: The cache is closed.
        """
        self._end_gather()
        if self._before is not None:
            before, self._before = self._before, None
            self._rows.restore(before, self._past)
        for row in self._rows.distinct:
            row.settle()
        self._is_begun = False
        self._past = self.get_seq_length()
        self._marked = None
        self._arrived.clear()
        self._masks.clear()

    def abort_forward(self) -> None:
        """Go back to what was held before a forward pass that raised an exception."""
        if self._before is not None:
            before, self._before = self._before, None
            self._end_gather()
            self._rows.restore(before)
            self.settle()

    def begin_forward(
        self,
        given: ForwardInput,
        compute: Compute | None = None,
        *,
        num_kept: int = 0,
        attends_to_pages: bool | None = False,
        wants_weights: bool = False,
    ) -> int:
        """Look at the rows of a forward pass before it is computed, after ``settle``.

        Args:
            given: The rows; ``given.past`` is ``get_seq_length()``.
            compute: Computes some of them ahead; None if that is not wanted.
            num_kept: Columns at the end that the pass itself has to compute.
            attends_to_pages: Whether the model's attention is this package's; None if that is to
                be found out in this pass, during which pages are gathered.
            wants_weights: Whether the pass is to return the weights of its attention.

        Returns:
            How many columns are computed by now, and are to be left out of the pass.

        Raises:
            ValueError: The rows are not those of the cache, or go on otherwise than announced.
        """
        self._rows.check(given)
        self._before = self._rows.snapshot()
        try:
            self._go_on(given, compute, num_kept)
        except BaseException:
            self.abort_forward()
            raise
        if self._window_only:
            self._drop_before_windows()
        self._is_begun = True
        self._attends_to_pages = attends_to_pages
        self.wants_weights = wants_weights
        return self._past - given.past

    def require_model(self, model: PreTrainedModel) -> None:
        """``ValueError`` if the cache was made for another model."""
        if model is not self._model:
            raise ValueError(
                f"the PagedCache was made for another {type(self._model).__name__}: make one for "
                "this model"
            )

    def is_prompt(self, input_ids: torch.Tensor) -> bool:
        """Whether these are whole rows as they were announced, of which the first tokens are held.

        For models that are given neither a mask nor positions, which would tell.
        """
        ids = as_rows(input_ids, "input_ids")
        return len(ids) == len(self._rows) and all(
            row.is_prompt(row_ids) for row, row_ids in zip(self._rows.all, ids, strict=True)
        )

    def require_held(self, input_ids: torch.Tensor) -> None:
        """``ValueError`` if whole rows do not begin with the tokens that the cache holds."""
        ids = as_rows(input_ids, "input_ids")
        for at, row_ids in enumerate(ids):
            row = self._rows.all[at * len(self._rows) // len(ids)]
            require_equal(row.ids, row_ids[row.num_pads :], "input_ids", "the cache holds")

    def of_rows(self, numbers: Seq[int]) -> "PagedCache":
        """A cache over some of the rows, to compute what is theirs; it is not to be closed."""
        cache = PagedCache.__new__(PagedCache)
        windows = [self._layer(layer).window for layer in range(len(self.layers))]
        rows = [self._rows.all[at] for at in numbers]
        cache._start(
            self._model, self.kv, rows, windows, self._model_fingerprint, self._window_only
        )
        return cache

    def end_forward(self) -> bool | None:
        """Look at what a forward pass did after it was computed.

        Returns:
            Whether the model attends to what its cache returns, if that was to be found out.

        Raises:
            ValueError: The pass attended to the newest tokens of the last layer only.
        """
        self._check_attended()
        self._is_begun = False
        self._before = None
        if self._attends_to_pages is not None:
            return None
        return [self._arrived.get(layer) for layer in range(len(self.layers))] == (
            [True] * len(self.layers)
        )

    # -- what attention calls ------------------------------------------------------------------

    def gather_layer(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, ``(row, head, token, channel)``, until the next call.

        They are those of all tokens, or of what a window can show. Pads that are not among the
        new columns are zeros.

        Args:
            layer: Which layer.
            keys: The newest of them, which the layer holds already.
            values: The same.
        """
        first = self._layer(layer).first_column(self._past)
        if not self._rows.is_plain:
            k, v = gather(self._rows, layer, self._past, first, keys, values)
        elif keys.shape[2] > 1:
            with self.sequence.gather(layer, self._past, first) as held:
                before = [to_torch(array[None]).transpose(1, 2) for array in held]
                k = torch.cat([before[0].to(keys.device), keys], dim=2)
                v = torch.cat([before[1].to(keys.device), values], dim=2)
        else:
            self._gathered = self.sequence.gather(layer, start=first)
            held = self._gathered.__enter__()
            k, v = (to_torch(array[None]).transpose(1, 2).to(keys.device) for array in held)
            if layer == len(self.layers) - 1:
                k, v = k.clone(), v.clone()  # no call follows that would end the gather
                self._end_gather()
        return no_gradient(k, keys), no_gradient(v, values)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scale: float | None,
        soft_cap: float | None,
    ) -> torch.Tensor | None:
        """Attention of the newest tokens, ``(row, token, head, channel)``, to the pages.

        Args:
            layer: Of which layer.
            query: ``(row, head, token, channel)``.
            attention_mask: Says what they see.
            scale: Factor on the scores.
            soft_cap: Scores are capped to it.

        Returns:
            None if the mask is neither causal nor a window. Pads get zeros.
        """
        window = self._layer(layer).window
        seen = self._seen_through(attention_mask, query.shape[2], window)
        if not all(one.is_causal for one in seen):
            return None
        return attend(self._rows, layer, self._past, query, seen, scale, soft_cap)

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

    # -- inside --------------------------------------------------------------------------------

    def _begin_unseen(self) -> None:
        """Begin a pass that no hook has shown: whose it is, and of which tokens, is not known."""
        self.settle()
        self._attends_to_pages = False
        for row in self._rows.distinct:
            row.note_unknown()

    def _go_on(self, given: ForwardInput, compute: Compute | None, num_kept: int) -> None:
        """Become the rows of a pass, and bring them to one column."""
        self._rows.part(given)
        for at, row in self._rows.numbered:
            row.place(int(given.num_pads[at]))
            if given.ids is not None:
                row.drop_others(given.ids[at], given.past)
        if len(self._rows) > 1:
            if self._window_only:  # a row that has dropped its beginning cannot lend it to others
                compute = None
            stop = given.num_columns - num_kept if compute else given.past
            min_saved = MIN_SAVED_TOKENS[self.kv.specs[0].dtype]
            self._past = bring_level(
                self._rows, given, stop, compute or _compute_nothing, min_saved
            )
        for at, row in self._rows.numbered:
            if given.ids is None:
                row.note_unknown()
            else:
                row.note_ids(given.ids[at], given.past)

    def _drop_before_windows(self) -> None:
        """Give up the pages that no layer looks at any more."""
        first = min(self._layer(at).first_column(self._past) for at in range(len(self.layers)))
        page_tokens = self.kv.specs[0].page_tokens
        padding = Padding.of(self._model, None)
        for row in self._rows.distinct:
            num_tokens = max(0, first - row.num_pads) // page_tokens * page_tokens
            is_alone = len(self._rows) == 1
            num_named = num_tokens if is_alone else padding.num_without_pads(row.ids)
            row.drop_before(num_tokens, num_named)

    def _is_gathered(self, layer: int, num_new: int) -> bool:
        """Whether torch attends to gathered pages, though the model's attention knows pages."""
        if not self._past or num_new > MAX_QUERIES:
            return True
        spec = self.kv.specs[0]
        num_columns = self._past + num_new - self._layer(layer).first_column(self._past)
        nbytes = len(self._rows) * num_columns * spec.layer_nbytes // spec.page_tokens
        return spec.dtype != "float32" and nbytes <= MAX_GATHERED_NBYTES

    def _layer(self, layer: int) -> PagedLayer:
        found = self.layers[layer]
        assert isinstance(found, PagedLayer)
        return found

    def _seen_through(
        self, mask: torch.Tensor | None, num_queries: int, window: int | None
    ) -> list[Seen]:
        """What the newest tokens of each row see; computed once for layers that share a mask."""
        for known, known_window, seen in self._masks:
            if known is mask and known_window == window:
                return seen
        num_tokens = self._past + num_queries
        seen = [
            seen_through(mask, at, num_queries, num_tokens, row.num_pads, window)
            for at, row in enumerate(self._rows.all)
        ]
        self._masks.append((mask, window, seen))
        return seen

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


def check_spec(model: PreTrainedModel, kv: pk.PagedKVCache, model_fingerprint: str | None) -> None:
    """Raise unless ``kv`` holds the KV of that model, as the class's docstring says."""
    if len(kv.specs) > 1:
        raise ValueError(f"kv has {len(kv.specs)} specs: PagedCache needs a cache with one")
    spec = spec_for(model, kv.specs[0].page_tokens, model_fingerprint)
    spec.require_equal(kv.specs[0], "the PagedKVCache")


def _compute_nothing(numbers: Seq[int], start: int, stop: int) -> None:
    raise AssertionError(f"rows {numbers} were to compute {start}..{stop}")
