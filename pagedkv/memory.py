"""``PageMemory``: where the pages of a call lie in memory, whatever array they belong to."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class PageMemory(NamedTuple):
    """Where pages lie in memory: each layer and kind is one block, ``(token, head, channel)``."""

    addresses: npt.NDArray[np.int64]
    """Address of each page's first byte."""
    layer_stride: int
    """Bytes from one layer to the next."""
    kind_stride: int
    """Bytes from one kind to the next."""
