"""The identity of the weights of a transformers model."""

import hashlib
import json
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

import pagedkv as pk

_FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, tuple[tuple[tuple[str, int, int], ...], str]] = (
    WeakKeyDictionary()
)
"""State of the parameters when they were hashed, and their fingerprint."""

_NOT_WEIGHTS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What a configuration says beside the model: its dtype is a field of the ``KVSpec``."""


def fingerprint(model: PreTrainedModel) -> str:
    """Fingerprint of a model's weights, ``"sha256:..."``; computed again when they change.

    A model as it was loaded from a folder has the fingerprint of the folder's files, the same in
    every engine. Any other is hashed tensor by tensor: one that exists only in memory, that was
    loaded with another configuration than the folder's, to which parameters were added (LoRA), or
    whose parameters were changed in place (torch counts that; ``tensor.data`` evades it).
    """
    state = _state_of(model)
    known_state, known = _FINGERPRINTS.get(model, (None, ""))
    if known_state != state:
        folder = model.name_or_path
        if folder and _is_as_stored(model, Path(folder)):
            known = pk.fingerprint_files(folder)
        else:
            known = _fingerprint_tensors(model)
        _FINGERPRINTS[model] = (state, known)
    return known


def _state_of(model: PreTrainedModel) -> tuple[tuple[str, int, int], ...]:
    """Which tensors are the model's parameters, and how often each was changed in place."""
    return tuple((n, p.data_ptr(), p._version) for n, p in model.named_parameters())


def _is_as_stored(model: PreTrainedModel, folder: Path) -> bool:
    """Whether the folder holds all parameters of the model, and its configuration."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not (folder / "config.json").is_file():
        return False
    stored: set[str] = set()
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            stored.update(tensors.keys())
    if not {name for name, _ in model.named_parameters()} <= stored:
        return False
    if any(parameter._version for parameter in model.parameters()):
        return False
    return _identity_of(type(model.config).from_pretrained(folder)) == _identity_of(model.config)


def _fingerprint_tensors(model: PreTrainedModel) -> str:
    """SHA-256 over the canonical configuration and all tensors by name, type and shape."""
    digest = hashlib.sha256(_identity_of(model.config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"\0{name}\0{data.dtype}\0{tuple(data.shape)}\0".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy())
    return f"sha256:{digest.hexdigest()}"


def _identity_of(config: Any) -> str:
    """The configuration as canonical JSON, without what does not tell models apart."""
    return json.dumps(_without_asides(config.to_dict()), sort_keys=True, default=str)


def _without_asides(values: Any) -> Any:
    if isinstance(values, dict):
        return {k: _without_asides(v) for k, v in values.items() if k not in _NOT_WEIGHTS}
    return values
