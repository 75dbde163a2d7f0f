"""``CostModel``: what a prompt costs until its first token, with and without cached pages."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

TOKEN_NBYTES = 128 * 1024
"""KV of a token of an 8B model: 32 layers x 2 kinds x 8 heads x 128 channels of bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of prefill and of reading, one request at a time, nothing overlapped, no queue.

    Computing the tokens ``a..n - 1`` of a prompt whose first ``a`` are cached takes
    ``prefill_s_per_token * (n - a) + attention_s_per_pair * (n² - a²) / 2``; reading pages takes
    their bytes over ``store_bytes_per_s``, and each request that reads any waits
    ``store_latency_s`` once. Pages in the pool are free. The last token of a prompt is always
    computed.

    The defaults are about those of an 8B model with 32 layers of 4,096 channels, computed at
    400 TFLOP/s: 2 FLOP a parameter and token, 4 x 32 x 4,096 a pair of tokens; and of an NVMe disk.

    Args:
        prefill_s_per_token: Seconds a computed token, without attention.
        attention_s_per_pair: Seconds for each pair of a token and one that it sees.
        store_bytes_per_s: Bandwidth of the disk.
        store_latency_s: Seconds until the first byte of a read.

    Raises:
        ValueError: A figure is negative, not finite, or a bandwidth of 0.
    """

    prefill_s_per_token: float = 40e-6
    attention_s_per_pair: float = 1.3e-9
    store_bytes_per_s: float = 5e9
    store_latency_s: float = 100e-6

    def __post_init__(self) -> None:
        for name in (
            "prefill_s_per_token",
            "attention_s_per_pair",
            "store_bytes_per_s",
            "store_latency_s",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: it must be finite and not negative")
        if not self.store_bytes_per_s:
            raise ValueError("store_bytes_per_s is 0: it must be positive")

    def prefill_s(self, prompt: Numbers, cached: Numbers) -> npt.NDArray[np.float64]:
        """Seconds to compute what is not cached of each prompt ``(request,)``."""
        n = prompt.astype(np.float64)
        a = np.minimum(cached, np.maximum(prompt - 1, 0)).astype(np.float64)
        return self.prefill_s_per_token * (n - a) + self.attention_s_per_pair * (n * n - a * a) / 2

    def read_s(self, nbytes: Numbers) -> npt.NDArray[np.float64]:
        """Seconds to read so many bytes for each request ``(request,)``."""
        return nbytes / self.store_bytes_per_s + self.store_latency_s * (nbytes > 0)
