"""The demo's second process: ``python -m pagedkv_adapters.demo.resume``.

Reads one JSON object from stdin; writes the id of each token, then what the run did, to stdout,
a JSON value a line.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.run import PagedSetup, run_paged
from pagedkv_adapters.transformers import spec_for


def main() -> None:
    """Generate as the request on stdin says."""
    request = json.load(sys.stdin)
    setup = request["setup"]
    model, _ = load(Path(request["folder"]))
    run = run_paged(
        model,
        spec_for(model),
        torch.tensor([request["ids"]]),
        request["max_new_tokens"],
        PagedSetup(**{**setup, "store_path": Path(setup["store_path"])}),
        on_token=_write,
    )
    _write(asdict(run))


def _write(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
