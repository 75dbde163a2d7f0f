"""Reading a model folder's ``config.json``."""

import json
from pathlib import Path
from typing import Any


def read_config(directory: Path) -> dict[str, Any]:
    """The object in ``directory``'s ``config.json``.

    Raises:
        ValueError: The folder or the file is not there, or the file is no JSON object; the message
            names the path.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no folder: give the folder of a model")
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(
            f"{directory} has no config.json: give the folder of a transformers model"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object, but {type(config).__name__}")
    return config
