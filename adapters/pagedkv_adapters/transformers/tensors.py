"""torch's tensors as numpy's arrays, and back; bfloat16 too, and without copies on a CPU."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch


def to_numpy(states: torch.Tensor) -> npt.NDArray[Any]:
    """``(1, head, token, channel)`` as ``(token, head, channel)``: a view."""
    tokens = states.detach().cpu()[0].transpose(0, 1)
    if tokens.dtype == torch.bfloat16:
        view: npt.NDArray[Any] = tokens.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return view
    array: npt.NDArray[Any] = tokens.numpy()
    return array


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """``(token, head, channel)`` as ``(1, head, token, channel)``: a view, to be read only."""
    view = array.view()
    view.flags.writeable = True  # torch knows no read-only tensors and warns
    if view.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(view)
    return tensor.transpose(0, 1)[None]
