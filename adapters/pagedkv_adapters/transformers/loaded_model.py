"""How a model was loaded, and whether ``PagedCache`` can work with it."""

import functools
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

_OR_NAME_THEM = (
    "give model_fingerprint, a name of your own for the weights and for all that is added to them"
)


class Parts(NamedTuple):
    """What a model consists of.

    Args:
        kinds: Types of its modules.
        weights: Types of its parameters.
        devices: Where these are.
        altered: Modules whose own ``forward`` or call was replaced.
    """

    kinds: set[type]
    weights: set[type]
    devices: set[torch.device]
    altered: list[torch.nn.Module]


def require_plain(model: torch.nn.Module, *, is_named: bool) -> None:
    """``ValueError`` if a model is wrapped, compiled, spread or changed so that KV could be wrong.

    It is looked at anew in every call, since all of this can be done to a model at any time.

    Args:
        model: The model.
        is_named: Whether the caller named the weights; else they are told apart by their bytes.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{name} is no transformers model, but perhaps a wrapper of one: give the model "
            "itself (of torch.compile: what was compiled; of peft: get_base_model())"
        )
    parts = _parts_of(model)
    reason = _where_it_runs(parts)
    if reason is None and not is_named:
        reason = _what_its_bytes_do_not_tell(parts)
    if reason is not None:
        raise ValueError(f"{name} {reason}")


def _where_it_runs(parts: Parts) -> str | None:
    if any(map(_is_compiled, parts.altered)):
        return (
            "is compiled: PagedCache is Python code, which torch.compile would compile anew for "
            "each length: give the model as it was before"
        )
    if any(map(_is_moved, parts.altered)):
        return (
            "has weights that accelerate loads when they are used, so that fingerprint() cannot "
            "see whether they changed: load all of them to one device"
        )
    if len(parts.devices) > 1 or torch.device("meta") in parts.devices:
        places = ", ".join(sorted(map(str, parts.devices)))
        return f"has its weights on {places}: load all of them to one device"
    if any(kind.__name__ == "DTensor" for kind in parts.weights):
        return "is spread over processes: load it in one"
    return None


def _what_its_bytes_do_not_tell(parts: Parts) -> str | None:
    for kind in parts.kinds:
        if _adapts(kind):
            return (
                f"has adapters ({kind.__name__}), and its weights do not say which of them is "
                f"active: merge them (merge_and_unload), or {_OR_NAME_THEM}"
            )
        if _hides_weights(kind):
            return (
                f"has weights that are no parameters ({kind.__module__}.{kind.__name__}): "
                f"{_OR_NAME_THEM}"
            )
    for kind in parts.weights:
        if not issubclass(kind, torch.nn.Parameter):
            return (
                f"has weights of the type {kind.__name__}, whose bytes fingerprint() does not "
                f"read: {_OR_NAME_THEM}"
            )
    return None


def _parts_of(model: torch.nn.Module) -> Parts:
    """What a model consists of."""
    parts = Parts(set(), set(), set(), [])
    for module in modules_of(model):
        own = module.__dict__
        parts.kinds.add(type(module))
        if "forward" in own or own.get("_compiled_call_impl") is not None:
            parts.altered.append(module)
        for parameter in own["_parameters"].values():
            if parameter is not None:
                parts.weights.add(type(parameter))
                parts.devices.add(parameter.device)
    return parts


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Each module once, as ``model.modules()``, in less time."""
    found, seen = [model], {model}
    for module in found:  # which grows
        for child in module.__dict__["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether torch.compile replaced a module's call, or its ``forward``, or made the module."""
    own = module.__dict__
    return own.get("_compiled_call_impl") is not None or hasattr(
        own.get("forward"), "_torchdynamo_orig_callable"
    )


def _is_moved(module: torch.nn.Module) -> bool:
    """Whether accelerate loads a module's weights when it is called, and gives them up after."""
    hook: Any = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return any(getattr(h, "offload", False) or type(h).__name__ == "CpuOffload" for h in hooks)


@functools.cache
def _adapts(kind: type) -> bool:
    """Whether modules of a type are adapters of peft, which can be exchanged and switched off."""
    return kind.__module__.partition(".")[0] == "peft" or hasattr(kind, "adapter_layer_names")


@functools.cache
def _hides_weights(kind: type) -> bool:
    """Whether modules of a type keep their weights packed, and not as parameters."""
    return kind.__module__.startswith(("torch.ao.", "torch.nn.quantized", "optimum."))
