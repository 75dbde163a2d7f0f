"""``AdmissionPolicy``: which pages that leave the pool are worth writing to the store."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from pagedkv.spec import PageKey


class AdmissionPolicy(Protocol):
    """Spares the disk pages that nobody is likely to ask for again.

    A page that leaves the pool and is not admitted is forgotten; whoever wants it computes it again.
    A policy that was not used can be copied (``copy.deepcopy``).
    """

    name: ClassVar[str]
    """What the command line calls it."""

    def start(self, num_slots: int) -> None:
        """Say how many pages pool and store hold together, once, before all else."""

    def note(self, keys: Sequence[PageKey]) -> None:
        """Pages were requested, all those of a prompt, the root first, held or not."""

    def admits(self, key: PageKey) -> bool:
        """Whether a page that leaves the pool goes to the store. Changes nothing."""


class AdmitAll:
    """Every page is written."""

    name: ClassVar[str] = "all"

    def start(self, num_slots: int) -> None:
        """Nothing depends on the number of pages."""

    def note(self, keys: Sequence[PageKey]) -> None:
        """Nothing is remembered."""

    def admits(self, key: PageKey) -> bool:
        """Always."""
        return True
