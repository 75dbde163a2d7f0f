"""``Page``: one page of a layer group, and where it is now."""

from enum import IntEnum

from pagedkv.format import StoreRow
from pagedkv.prefix import Tokens
from pagedkv.spec import PageKey


class PageState(IntEnum):
    """What is happening to a page's slot."""

    READY = 0
    LOADING = 1
    """The slot's bytes are not there yet."""
    WRITING = 2
    """The slot's bytes are being written to disk: readable, but neither to change nor to free."""


Scope = tuple[bytes, bytes]
"""What goes into a page's key beside parent and tokens: salt and extra."""
NO_SCOPE: Scope = (b"", b"")


class Page:
    """One page and its places: a pool slot, a spill record, a store row, or several of them.

    Sequences that fork, and sequences with a common prefix, hold the same ``Page`` object in
    their block tables. All fields are guarded by the cache's lock.
    """

    __slots__ = (
        "children",
        "exact",
        "key",
        "parent",
        "ranked",
        "ref_count",
        "row",
        "scope",
        "slot",
        "spill",
        "state",
        "tokens",
    )

    def __init__(self, key: PageKey | None = None) -> None:
        self.key = key
        """Content address; ``None`` while the page is private to its sequences."""
        self.parent: PageKey | None = None
        self.tokens: bytes | None = None
        """Token ids as int32: an array a page would cost another 100 bytes."""
        self.scope: Scope = NO_SCOPE
        self.children: Page | list[Page] | None = None
        """The pages that follow it; ``PageIndex`` keeps them."""
        self.slot: int | None = None
        self.spill: int | None = None
        """Record of the spill file that holds exactly these bytes."""
        self.row: StoreRow | None = None
        """Row of the store that holds this key."""
        self.exact: bool = False
        """Whether ``row`` gives back exactly these bytes (no lossy codec, no other writer's)."""
        self.ref_count: int = 0
        """Live sequences that hold the page."""
        self.ranked: bool = False
        """Whether the eviction policy has it among its candidates."""
        self.state: PageState = PageState.READY

    def name(
        self, key: PageKey, parent: PageKey, tokens: Tokens, salt: bytes, extra: bytes = b""
    ) -> None:
        """Give the page its key, and what the key was made of."""
        self.key, self.parent, self.tokens = key, parent, tokens.tobytes()
        self.scope = (salt, extra) if salt or extra else NO_SCOPE

    @property
    def salt(self) -> bytes:
        """The tenant's salt, which is in the key."""
        return self.scope[0]

    @property
    def is_shared(self) -> bool:
        """Whether its bytes may no longer change: it has a key, or several sequences hold it."""
        return self.key is not None or self.ref_count > 1

    @property
    def is_lost(self) -> bool:
        """Whether no tier holds its bytes any more."""
        return self.slot is None and self.spill is None and self.row is None

    def __repr__(self) -> str:
        name = self.key.hex()[:12] if self.key else "private"
        return (
            f"<Page {name}: slot {self.slot}, spill {self.spill}, row {self.row}, "
            f"{self.ref_count} holders, {self.state.name.lower()}>"
        )
