"""The demo's second process: ``python -m pagedkv_adapters.demo.resume``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.new_process import Tell, answer
from pagedkv_adapters.demo.run import PagedSetup, run_paged
from pagedkv_adapters.transformers import spec_for


def resume(question: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Generate as asked, and tell the id of each token; what the run did."""
    setup = question["setup"]
    model, _ = load(Path(question["folder"]))
    run = run_paged(
        model,
        spec_for(model),
        torch.tensor([question["ids"]]),
        question["max_new_tokens"],
        PagedSetup(**{**setup, "store_path": Path(setup["store_path"])}),
        on_token=tell,
    )
    return asdict(run)


if __name__ == "__main__":
    answer(resume)
