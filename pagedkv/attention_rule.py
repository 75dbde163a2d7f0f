"""``AttentionRule``: what a query sees, and how scores become weights."""

import functools
import math
from dataclasses import dataclass

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """What a query sees, and how scores become weights.

    Args:
        scale: Factor on the scores; ``1 / sqrt(channels)`` if None.
        window: So many tokens does a query see, itself included; None for all before it.
        soft_cap: Scores are capped to ``soft_cap * tanh(score / soft_cap)``; None for no cap.

    Raises:
        ValueError: A value is out of range.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}: it must be a finite number")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}: a query sees itself, so it must be >= 1")
        if self.soft_cap is not None and not (0 < self.soft_cap < math.inf):
            raise ValueError(f"soft_cap is {self.soft_cap}: it must be a positive number")

    def factor(self, num_channels: int) -> float:
        """The factor on queries; it includes log2(e) for the kernels unless there is a cap."""
        scale = 1 / math.sqrt(num_channels) if self.scale is None else self.scale
        return scale * (1.0 if self.soft_cap else _LOG2_E)

    def first_seen(self, position: int) -> int:
        """Position of the first token that a query at ``position`` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@functools.lru_cache(64)
def rule_of(scale: float | None, window: int | None, soft_cap: float | None) -> AttentionRule:
    """An ``AttentionRule``, which is checked once."""
    return AttentionRule(scale=scale, window=window, soft_cap=soft_cap)
