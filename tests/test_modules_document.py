"""docs/modules.md names every module once, each part in the order of the layers."""

import re
import tomllib

import pytest
from store_samples import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/modules.md").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
LAYERS = PROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
RANKS = {
    name: rank for rank, layer in enumerate(LAYERS) for name in re.findall(r"\((\w+)\)", layer)
}
PARTS = {
    title: re.findall(r"^\| `(\w+)\.py` \|", text, re.MULTILINE)
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", DOCUMENT, re.MULTILINE)
}


def test_every_module_is_named_once() -> None:
    modules = [path.stem for path in (REPOSITORY / "pagedkv").glob("*.py")]
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(set(modules) - {"__init__"})


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_order_of_the_layers(part: str) -> None:
    ranks = [RANKS[name] for name in PARTS[part]]
    assert ranks == sorted(ranks), list(zip(PARTS[part], ranks, strict=True))
