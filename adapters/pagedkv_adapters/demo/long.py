"""``pagedkv demo --long``: contexts that are longer than the pool by far, on a model and without.

Everything is done in new processes, so that each one's memory is its own; this one shows what they
do.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

import pagedkv as pk
from pagedkv_adapters.demo.folder import check_room, own_folder
from pagedkv_adapters.demo.long_decode import CODEC, NUM_QUERY_HEADS, SLICE_NBYTES, SPEC
from pagedkv_adapters.demo.long_result import DecodeRun, DecodeStep, LongResult, ModelRun
from pagedkv_adapters.demo.new_process import ask
from pagedkv_adapters.demo.pool_size import pool_slots

NUM_TOKENS = 32_768
"""Of the cache that is decoded from, unless another number is asked for."""
_MIN_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSetup:
    """What is to be run.

    Args:
        model: Folder of the model.
        text: What its prompt repeats; None for the demo's own text.
        pool: Size of both pools, or their share of the KV.
        max_new_tokens: What the model generates at most.
        num_tokens: Of the cache that is decoded from, and of the model's context at most; None
            for ``NUM_TOKENS`` and for all that the model supports.
        num_steps: Decode steps that read from the disk.
    """

    model: Path
    text: str | None
    pool: str
    max_new_tokens: int
    num_tokens: int | None
    num_steps: int

    @property
    def num_decoded_from(self) -> int:
        """Tokens of the cache that is decoded from: of full pages."""
        num_tokens = NUM_TOKENS if self.num_tokens is None else self.num_tokens
        return num_tokens // SPEC.page_tokens * SPEC.page_tokens


def check_sizes(*, pool: str, num_tokens: int | None, num_steps: int, max_new_tokens: int) -> None:
    """Raise ``ValueError`` if a number makes no sense; the message names its option."""
    if num_tokens is not None and num_tokens < _MIN_TOKENS:
        raise ValueError(f"--long-tokens is {num_tokens}: it must be at least {_MIN_TOKENS}")
    if num_steps < 1:
        raise ValueError(f"--long-steps is {num_steps}: it must be at least 1")
    if max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}: --long needs at least 2")
    pool_slots(pool, SPEC, NUM_TOKENS if num_tokens is None else num_tokens)


def run_long(setup: LongSetup, progress: Progress) -> LongResult:
    """Run both parts; nothing is left on the disk, whatever happens.

    Raises:
        PagedKVError: There is no room on the disk, another demo runs, or a process failed.
    """
    with _scratch_folder() as folder:
        num_pages = setup.num_decoded_from // SPEC.page_tokens
        check_room(
            folder,
            num_pages * SPEC.num_layers * SLICE_NBYTES,
            f"a cache of {setup.num_decoded_from:,} tokens in {CODEC.name.upper()}",
        )
        dynamic = _run_model(setup, None, "DynamicCache, sdpa", progress)
        paged = _run_model(
            setup, folder / "model" / "cache.zarr", f"PagedKV, pool of {setup.pool}", progress
        )
        shutil.rmtree(folder / "model")
        decode = _run_decode(setup, folder / "decode" / "cache.zarr", progress)
    return LongResult(
        model=setup.model.name,
        is_demo_text=setup.text is None,
        spec=SPEC,
        num_query_heads=NUM_QUERY_HEADS,
        dynamic=dynamic,
        paged=paged,
        decode=decode,
    )


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A fresh folder that is removed afterwards."""
    with own_folder() as demo_folder:
        folder = demo_folder / "long"
        shutil.rmtree(folder, ignore_errors=True)  # of a demo that was killed
        try:
            (folder / "model").mkdir(parents=True)
            (folder / "decode").mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _run_model(setup: LongSetup, store: Path | None, name: str, progress: Progress) -> ModelRun:
    question = {
        "folder": str(setup.model.absolute()),
        "text": setup.text,
        "num_tokens": setup.num_tokens,
        "max_new_tokens": setup.max_new_tokens,
        "store_path": None if store is None else str(store),
        "pool": None if store is None else setup.pool,
    }
    task = progress.add_task(name, total=None, text="loading the model")

    def show(message: dict[str, Any]) -> None:
        if "prefill" in message:
            share = message["prefill"]
            progress.update(task, total=1, completed=0.99 * share, text=f"prefill, {share:.0%}")
        else:
            progress.update(task, text=" ".join(message["text"].split())[-60:])

    module = "pagedkv_adapters.demo.long_model"
    values = ask(module, question, f"generates with {name}", show)
    run = ModelRun(**{**values, "output_tokens": tuple(values["output_tokens"])})
    progress.update(
        task,
        total=1,
        completed=1,
        text=f"{run.num_prompt_tokens:,} + {len(run.output_tokens)} tokens, peak memory "
        f"{pk.format_nbytes(run.peak_nbytes)}",
    )
    return run


def _run_decode(setup: LongSetup, store: Path, progress: Progress) -> DecodeRun:
    module = "pagedkv_adapters.demo.long_decode"
    question = {
        "store_path": str(store),
        "num_tokens": setup.num_decoded_from,
        "pool": setup.pool,
        "num_steps": setup.num_steps,
    }
    num_pages = setup.num_decoded_from // SPEC.page_tokens
    task = progress.add_task(
        f"Storing {setup.num_decoded_from:,} tokens", total=num_pages, text="random numbers"
    )

    def show_pages(num_written: int) -> None:
        nbytes = pk.format_nbytes(num_written * SPEC.num_layers * SLICE_NBYTES)
        progress.update(task, completed=num_written, text=f"{nbytes} of {CODEC.name.upper()}")

    ask(module, {**question, "job": "fill"}, "fills the store", show_pages)
    task = progress.add_task(
        "Decode steps from disk",
        total=(setup.num_steps + 1) * SPEC.num_layers,
        text="opening the store",
    )

    def show_layer(message: dict[str, Any]) -> None:
        step, speed = message["step"], message["nbytes"] / message["seconds"] / 1e9
        where = f"step {step + 1} of {setup.num_steps}"
        if step == setup.num_steps:
            where = "one from the page cache"
        progress.update(
            task,
            completed=step * SPEC.num_layers + message["layers"],
            text=f"{where}, {speed:.2f} GB/s",
        )

    values = ask(module, {**question, "job": "decode"}, "decodes", show_layer)
    progress.update(task, text="")
    return DecodeRun(**{**values, "steps": tuple(DecodeStep(**step) for step in values["steps"])})
