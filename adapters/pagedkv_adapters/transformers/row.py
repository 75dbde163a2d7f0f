"""``Row``: one sequence of a batch, behind the pads that align it with the others."""

import numpy as np

import pagedkv as pk
from pagedkv_adapters.transformers.token_ids import (
    UNKNOWN,
    Ids,
    num_common,
    require_equal,
    with_unknown,
)


class Row:
    """One sequence of a batch: pads first, of which nothing is kept, then tokens.

    Columns are what transformers counts: pads and tokens. A token's place in the sequence, and so
    its position and its page, does not depend on the pads before it. (A store has rows and columns
    too, as arrays have: there a row is a page. Neither is meant in this package.)

    Args:
        sequence: Holds the tokens' KV; the row owns it.
        prompt: Ids of the tokens that are to come, those that the sequence holds included.
        num_pads: Columns before the first token.
    """

    def __init__(self, sequence: pk.Sequence, prompt: Ids | None = None, num_pads: int = 0) -> None:
        self.sequence = sequence
        self.num_pads = num_pads
        self.num_reused_tokens = sequence.num_tokens
        """Tokens whose KV was there before any was computed."""
        held = with_unknown(sequence.tokens, sequence.num_tokens)
        self._prompt = held if prompt is None else prompt
        self._is_placed = prompt is not None
        self._ids = held
        self.is_committed = False
        """Whether tokens were named since the last forward pass."""

    @property
    def num_tokens(self) -> int:
        """Tokens that all layers hold."""
        return self.sequence.num_tokens

    @property
    def num_columns(self) -> int:
        """Pads, and tokens that all layers hold."""
        return self.num_pads + self.sequence.num_tokens

    @property
    def ids(self) -> Ids:
        """Ids of the tokens that the row holds, some of them perhaps ``UNKNOWN``."""
        return with_unknown(self._ids, self.num_tokens)

    def require_pads(self, num_pads: int, num_columns: int) -> None:
        """``ValueError`` if these cannot be the row's pads.

        Args:
            num_pads: Columns that a mask hides before the first that it shows.
            num_columns: How many the mask covers; they may be pads all of them.
        """
        known = min(self.num_pads, num_columns)
        is_open = not (self._is_placed or self.num_tokens)
        if num_pads != known and not (is_open and num_pads > known):
            raise ValueError(
                f"attention_mask has {num_pads} pads before a row for which the cache expects "
                f"{known}: give from_prompt the attention_mask that generate gets, and another "
                "batch another PagedCache"
            )

    def require_ids(self, ids: Ids, column: int) -> None:
        """``ValueError`` if the prompt has other ids from that column on."""
        at, new = self._tokens_among(ids, column)
        require_equal(self._prompt[at:], new, "input_ids", "the cache was made for", at=at)

    def is_prompt(self, ids: Ids) -> bool:
        """Whether these are pads and the prompt as it was announced, and more that comes behind."""
        tokens = ids[self.num_pads :]
        count = len(self._prompt)
        return self.num_tokens < count <= len(tokens) and num_common(self._prompt, tokens) == count

    def place(self, num_pads: int) -> None:
        """Take the pads from a mask, where they were not known yet."""
        if not (self._is_placed or self.num_tokens):
            self.num_pads = max(self.num_pads, num_pads)

    def drop_others(self, ids: Ids, column: int) -> None:
        """Drop tokens that are held but are others than ``ids``, which begin at that column."""
        at, new = self._tokens_among(ids, column)
        if at < self.num_tokens:
            self.truncate(at + num_common(self.ids[at:], new))

    def note_ids(self, ids: Ids, column: int) -> None:
        """Note the ids of the columns that are about to be computed."""
        at, new = self._tokens_among(ids, column)
        self._ids = np.concatenate([with_unknown(self._ids, at), new])
        self.is_committed = False

    def note_unknown(self) -> None:
        """Note that the ids of what is about to be computed are not known."""
        self._ids = self.ids
        self.is_committed = False

    def settle(self) -> None:
        """Drop what a forward pass that failed left in some layers."""
        self.sequence.truncate(self.num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens only."""
        self.sequence.truncate(num_tokens)
        self._ids = self._ids[:num_tokens]
        self.num_reused_tokens = min(self.num_reused_tokens, num_tokens)

    def crop(self, num_tokens: int) -> None:
        """Keep the first tokens only, behind which others may come than those announced."""
        self.truncate(num_tokens)
        self._prompt = self._prompt[:num_tokens]

    def drop_before(self, num_tokens: int, num_named: int) -> None:
        """Give up the pages before that token, whole ones; they are named first.

        Args:
            num_tokens: Where a page begins.
            num_named: Of the tokens before it, so many get a name, if their ids are known.
        """
        if num_tokens <= self.sequence.num_dropped_tokens:
            return
        ids = self.ids[: min(num_tokens, num_named)]
        if UNKNOWN not in ids:
            self.sequence.commit(ids)
        self.sequence.drop_before(num_tokens)

    def take_over(self, other: "Row", num_tokens: int) -> None:
        """Hold the first tokens of another row, whose pages are shared, in place of the own."""
        sequence = other.sequence.fork()
        try:
            sequence.truncate(num_tokens)
        except BaseException:
            sequence.close()
            raise
        self.sequence.close()
        self.sequence = sequence
        self._ids = other.ids[:num_tokens]

    def fork(self) -> "Row":
        """Another row that holds the same tokens; pages are shared until one of them writes."""
        row = Row(self.sequence.fork(), self._prompt, self.num_pads)
        row.num_reused_tokens = self.num_reused_tokens
        row._is_placed = self._is_placed
        row._ids = self._ids
        return row

    def reset(self) -> None:
        """Drop all tokens, and what was announced of them."""
        self.truncate(0)
        self.num_pads = 0
        self._is_placed = False
        self._prompt = self._ids = self._prompt[:0]

    def commit(self, ids: Ids) -> None:
        """Name the first tokens of the row, as they were seen."""
        self.sequence.commit(ids)
        self.is_committed = True

    def require_known(self) -> None:
        """``ValueError`` if the ids of some tokens were never seen."""
        unknown = int((self.ids == UNKNOWN).sum())
        if unknown:
            raise ValueError(
                f"{unknown} of {self.num_tokens} tokens were not given as input_ids (but as "
                "embeddings), or computed with dropout: their KV cannot be named by token ids"
            )

    def save(self) -> None:
        """Store the tokens that are named durably, the last, partial page too."""
        num_named = len(self.sequence.tokens)
        if not self.is_committed or num_named == self.num_tokens:
            self.sequence.save()
            return
        with self.sequence.fork() as named:  # pads behind an answer are held, but have no name
            named.truncate(num_named)
            named.save()

    def close(self) -> None:
        """Give up the pages."""
        self.sequence.close()

    def _tokens_among(self, ids: Ids, column: int) -> tuple[int, Ids]:
        """Of the ids of columns from that one on those of tokens, and which token is the first."""
        return max(0, column - self.num_pads), ids[max(0, self.num_pads - column) :]
