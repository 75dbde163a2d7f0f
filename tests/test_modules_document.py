"""docs/modules.md names every module once, each part in the order of the layers."""

import re
import tomllib

import pytest
from store_samples import REPOSITORY

DOCUMENT = (REPOSITORY / "docs/modules.md").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONTRACTS = PROJECT["tool"]["importlinter"]["contracts"]
LAYERS = {
    contract["containers"][0].removeprefix("pagedkv").lstrip("."): contract["layers"]
    for contract in CONTRACTS
    if contract["type"] == "layers"
}
PACKAGES = [package for package in LAYERS if package]
RANKS = {
    f"{package}/{name}".lstrip("/"): rank
    for package, layers in LAYERS.items()
    for rank, layer in enumerate(layers)
    for name in re.findall(r"\((\w+)\)", layer)
}
PARTS = {
    title: re.findall(r"^\| `([\w/]+)\.py` \|", text, re.MULTILINE)
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", DOCUMENT, re.MULTILINE)
}


def rank(module: str) -> tuple[int, ...]:
    """That of a package's module is that of the package, then its own."""
    package = module.rpartition("/")[0]
    return (RANKS[package], RANKS[module]) if package else (RANKS[module],)


def test_every_module_is_named_once() -> None:
    folder = REPOSITORY / "pagedkv"
    modules = [
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.py")
        if path.stem != "__init__"
    ]
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(modules)


def test_every_package_has_layers_of_its_own() -> None:
    folder = REPOSITORY / "pagedkv"
    packages = [path.parent.name for path in folder.glob("*/__init__.py")]
    assert sorted(packages) == sorted(PACKAGES)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_order_of_the_layers(part: str) -> None:
    ranks = [rank(name) for name in PARTS[part]]
    assert ranks == sorted(ranks), list(zip(PARTS[part], ranks, strict=True))
