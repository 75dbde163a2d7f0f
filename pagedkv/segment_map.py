"""``SegmentMap``: where the pages of a segment are in its file, and how to verify them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagedkv.codec import Crcs
from pagedkv.format import LayerSizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SegmentMap:
    """Where the pages of a segment are in its file, and how to verify them.

    Args:
        holds: Whether a row holds a page, ``(row,)``.
        crcs: CRC32C of each layer's payload, ``(row, layer)``.
        bounds: Offset of each layer's chunk, and of the end, ``(row, layer + 1)``; None where they
            can be computed, since all chunks have the same size.
    """

    holds: npt.NDArray[np.bool_]
    crcs: Crcs
    bounds: npt.NDArray[np.int64] | None

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        bounds_nbytes = 0 if self.bounds is None else self.bounds.nbytes
        return int(self.holds.nbytes + self.crcs.nbytes + bounds_nbytes)


def bounds_of(sizes: LayerSizes) -> npt.NDArray[np.int64]:
    """``SegmentMap.bounds`` of pages whose chunks have these payloads, one behind the other."""
    ends = np.cumsum(sizes.reshape(-1).astype(np.int64) + 4)
    bounds = np.concatenate([[0], ends])
    count, num_layers = sizes.shape
    rows = np.arange(count)[:, None] * num_layers
    found: npt.NDArray[np.int64] = bounds[rows + np.arange(num_layers + 1)]
    return found
