"""torch's tensors as numpy's arrays, and back; bfloat16 too, and without copies on a CPU."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch


def to_numpy(states: torch.Tensor) -> npt.NDArray[Any]:
    """``(row, head, token, channel)`` as ``(row, token, head, channel)``: a view."""
    if states.requires_grad or not states.is_cpu:
        states = states.detach().cpu()
    if states.dtype == torch.bfloat16:
        array: npt.NDArray[Any] = states.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = states.numpy()
    tokens: npt.NDArray[Any] = array.swapaxes(1, 2)
    return tokens


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    """``(row, token, head, channel)`` as a tensor: a view, to be read only."""
    if not array.flags.writeable:
        array = array.view()
        array.flags.writeable = True  # torch knows no read-only tensors and warns
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def no_gradient(states: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
    """``states``, through which no gradient goes back to ``sources``: ``backward`` says so."""
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        refusing: torch.Tensor = _Refusing.apply(states, *sources)  # type: ignore[no-untyped-call]  # torch
        return refusing
    return states


class _Refusing(torch.autograd.Function):
    """Passes numbers on, and refuses gradients."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError(
            "there is no gradient through the pages of a PagedCache: train without a cache, or "
            "give all tokens in one forward pass"
        )
