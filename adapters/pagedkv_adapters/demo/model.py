"""Loading a local transformers model for the demo."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pagedkv_adapters.demo.quiet import quiet_transformers


def load(folder: Path, attention: str | None = None) -> tuple[PreTrainedModel, Any]:
    """The model in ``folder``, float32 and ready for inference, and its tokenizer.

    Nothing is asked of the network.

    Args:
        folder: The model's.
        attention: Its ``attn_implementation``; the model's own choice by default.

    Raises:
        ValueError: ``folder`` holds no model that transformers can load; the message says why.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a transformers model")
    try:
        with quiet_transformers():
            AutoConfig.from_pretrained(folder, local_files_only=True)  # its errors are the clearest
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=attention,
                local_files_only=True,
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no model that can be loaded: {error}") from error
    return model, tokenizer
