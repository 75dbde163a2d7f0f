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
from pagedkv_adapters.transformers.loaded_model import modules_of

_State = tuple[tuple[tuple[int, int, int], ...], bytes]

_FINGERPRINTS: WeakKeyDictionary[PreTrainedModel, tuple[_State, str]] = WeakKeyDictionary()
"""State of the parameters when they were hashed, and their fingerprint."""

_BEGIN = 4
"""Numbers of each matrix by which changes are seen that torch does not count."""

_NOT_WEIGHTS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What a configuration says beside the model: its dtype is a field of the ``KVSpec``."""


def fingerprint(model: PreTrainedModel) -> str:
    """Fingerprint of a model's weights, ``"sha256:..."``; computed again when they change.

    A model as it was loaded from a folder has the fingerprint of the folder's files, the same in
    every engine. Any other is hashed tensor by tensor: one that exists only in memory, that was
    loaded with another configuration than the folder's, to which parameters were added (LoRA), or
    whose parameters were changed or replaced. Changes are seen by torch's count of them, and where
    ``tensor.data`` evades that, by some numbers of each matrix.
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


def _state_of(model: PreTrainedModel) -> _State:
    """Where each parameter is, how often it was changed in place, its size, and how it begins."""
    found = [p for m in modules_of(model) for p in m._parameters.values() if p is not None]
    begins: dict[torch.device, list[torch.Tensor]] = {}
    with torch.inference_mode():
        for p in found:
            # What is no plain parameter (but quantised, say) need not have elements in this sense.
            if type(p) is torch.nn.Parameter and p.dim() > 1 and p.numel() >= _BEGIN:
                begins.setdefault(p.device, []).append(p.as_strided((_BEGIN,), (1,)))
        begins.pop(torch.device("meta"), None)
        sample = b"".join(torch.cat(b).double().cpu().numpy().tobytes() for b in begins.values())
    return tuple((p.data_ptr(), p._version, p.numel()) for p in found), sample


def _is_as_stored(model: PreTrainedModel, folder: Path) -> bool:
    """Whether the folder holds all parameters of the model as they are, and its configuration."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not (folder / "config.json").is_file():
        return False
    missing = dict(model.named_parameters())
    for shard in shards:
        with safe_open(shard, framework="pt") as tensors:
            for name in missing.keys() & set(tensors.keys()):
                if not _begins_alike(missing.pop(name), tensors.get_slice(name)):
                    return False
    if missing or any(parameter._version for parameter in model.parameters()):
        return False
    return _identity_of(type(model.config).from_pretrained(folder)) == _identity_of(model.config)


def _begins_alike(parameter: torch.Tensor, stored: Any) -> bool:
    """Whether a parameter has the shape of a stored tensor, and some of its rows."""
    if parameter.is_meta:
        return True
    shape = list(parameter.shape)
    if shape != stored.get_shape():
        return False
    rows = {0, shape[0] // 2, shape[0] - 1} if shape and shape[0] else set()
    for row in rows:
        expected = stored[row : row + 1].to(parameter.dtype)
        if not torch.equal(parameter[row : row + 1].detach().cpu(), expected):
            return False
    return True


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
