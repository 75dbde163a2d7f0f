"""``pagedkv demo``: gathers what the runs need, shows that they run, prints what they found."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pagedkv as pk
from pagedkv_adapters.demo.folder import own_folder
from pagedkv_adapters.demo.pool_size import check_pool, pool_slots
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import SMOLLM2

if TYPE_CHECKING:
    from rich.progress import Progress

    from pagedkv_adapters.demo.long_result import LongResult
    from pagedkv_adapters.demo.result import DemoResult

_CODECS = ("raw", "int8")


def installed_model() -> Path:
    """Folder of the demo's model; ``PagedKVError`` if it has not been unpacked yet."""
    if not SMOLLM2.is_unpacked():
        raise pk.PagedKVError(
            f"no --model was given, and the demo's {SMOLLM2.name} is not there yet: "
            "name a folder, or run `pagedkv demo` once"
        )
    return SMOLLM2.folder


def run_demo(
    *,
    model: Path | None,
    prompt: Path | None,
    pool: str,
    codec: str,
    store: Path | None,
    max_new_tokens: int,
    as_json: bool,
) -> None:
    """Run the demo and print its result; see ``pagedkv demo --help`` for the arguments.

    Raises:
        ValueError: An argument makes no sense; the message names it.
        PagedKVError: Something that the demo needs is not installed, a run failed, or the runs
            generated different tokens although the codec is exact.
    """
    from pagedkv_adapters.demo.progress import shown_progress

    _check_arguments(pool, codec, max_new_tokens)
    _check_installed()
    with shown_progress() as progress:
        result = _run(model, prompt, pool, codec, store, max_new_tokens, progress)
    _print(result, as_json=as_json)
    if codec == "raw" and not result.tokens_identical:
        raise pk.PagedKVError("the runs generated different tokens, which codec raw must not do")


def run_long_demo(
    *,
    model: Path | None,
    prompt: Path | None,
    pool: str,
    max_new_tokens: int,
    num_tokens: int | None,
    num_steps: int,
    as_json: bool,
) -> None:
    """Run the long demo and print its result; see ``pagedkv demo --help`` for the arguments.

    Raises:
        ValueError: An argument makes no sense; the message names it.
        PagedKVError: Something that the demo needs is not installed, there is no room on the disk,
            a run failed, or the model generated different tokens.
    """
    from pagedkv_adapters.demo.long import LongSetup, check_sizes, run_long
    from pagedkv_adapters.demo.progress import shown_progress

    check_pool(pool)
    check_sizes(
        pool=pool, num_tokens=num_tokens, num_steps=num_steps, max_new_tokens=max_new_tokens
    )
    _check_installed()
    text = None if prompt is None else prompt.read_text(encoding="utf-8")
    with shown_progress() as progress:
        setup = LongSetup(
            model=_unpacked_smollm2(progress) if model is None else model,
            text=text,
            pool=pool,
            max_new_tokens=max_new_tokens,
            num_tokens=num_tokens,
            num_steps=num_steps,
        )
        result = run_long(setup, progress)
    _print(result, as_json=as_json)
    if not result.tokens_identical:
        raise pk.PagedKVError("the model generated different tokens with the two caches")


def _print(result: "DemoResult | LongResult", *, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        sys.stdout.write(json.dumps(result.to_dict(), indent=2) + "\n")
        return
    console = Console()
    console.print(result.render())
    for line in result.next_steps(*_program()):
        console.print(line, soft_wrap=True)  # to be copied, so that lines stay whole


def _program() -> tuple[str, str]:
    """What a person types for this command, and for its interpreter, in this shell."""
    found = shutil.which("pagedkv")
    if found and Path(found).resolve() == Path(sys.argv[0]).resolve():
        return "pagedkv", "python"
    return sys.argv[0], sys.executable


def _check_arguments(pool: str, codec: str, max_new_tokens: int) -> None:
    if codec not in _CODECS:
        raise ValueError(f"there is no codec {codec!r}: use one of {', '.join(_CODECS)}")
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {max_new_tokens}: it must be at least 1")
    check_pool(pool)


def _check_installed() -> None:
    try:
        import torch  # noqa: F401, I001  # all that the demo imports later, the weightiest first
        import transformers  # noqa: F401
        import filelock  # noqa: F401
    except ImportError as error:
        raise pk.PagedKVError(
            f"the demo needs {error.name}: in a clone, pip install '.[transformers]' "
            "(make demo does it)"
        ) from error


def _run(
    model_folder: Path | None,
    prompt_file: Path | None,
    pool: str,
    codec: str,
    store: Path | None,
    max_new_tokens: int,
    progress: "Progress",
) -> "DemoResult":
    from pagedkv_adapters.demo.model import load
    from pagedkv_adapters.demo.progress import task_shown
    from pagedkv_adapters.demo.prompt import alice_prompt, encode
    from pagedkv_adapters.demo.result import DemoResult
    from pagedkv_adapters.demo.run import PagedSetup, run_dynamic, run_in_new_process, run_paged
    from pagedkv_adapters.transformers import spec_for

    prompt = alice_prompt() if prompt_file is None else prompt_file.read_text(encoding="utf-8")
    folder = _unpacked_smollm2(progress) if model_folder is None else model_folder
    with task_shown(progress, f"Loading {folder.name}"):
        model, tokenizer = load(folder)
        ids = encode(tokenizer, prompt)
        num_prompt_tokens = ids.shape[1]
        _check_length(model, num_prompt_tokens, max_new_tokens)
        spec = spec_for(model)
        num_slots = pool_slots(pool, spec, num_prompt_tokens)
    with _store_path(store) as path:
        # A store that cannot be used is refused now, not after the first run.
        pk.PageStore.open(path, spec, codec=codec).close()
        setup = PagedSetup(store_path=path, codec=codec, num_slots=num_slots)

        def watch(name: str) -> AbstractContextManager[Callable[[int], None]]:
            return _watch(progress, name, tokenizer, max_new_tokens)

        with watch("DynamicCache of transformers") as on_token:
            dynamic = run_dynamic(model, ids, max_new_tokens, on_token)
        with watch("PagedKV, small pool") as on_token:
            paged = run_paged(model, spec, ids, max_new_tokens, setup, on_token)
        with watch("PagedKV, new process") as on_token:
            resumed = run_in_new_process(folder, ids, max_new_tokens, setup, on_token)
    return DemoResult(
        model=folder.name,
        spec=spec,
        num_prompt_tokens=num_prompt_tokens,
        setup=setup,
        dynamic=dynamic,
        paged=paged,
        resumed=resumed,
        texts=(
            _decode(tokenizer, dynamic.output_tokens),
            _decode(tokenizer, paged.output_tokens),
            _decode(tokenizer, resumed.output_tokens),
        ),
    )


def _check_length(model: Any, num_prompt_tokens: int, max_new_tokens: int) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, and {max_new_tokens} are to be generated, "
            f"but the model was made for {limit}: give a shorter prompt"
        )


@contextmanager
def _store_path(store: Path | None) -> Iterator[Path]:
    """The store to use: the one given, or a fresh one that no other demo uses meanwhile."""
    if store is not None:
        yield store.absolute()
        return
    with own_folder("give this one its own --store") as folder:
        path = folder / "cache.zarr"
        shutil.rmtree(path, ignore_errors=True)
        yield path


def _unpacked_smollm2(progress: "Progress") -> Path:
    if SMOLLM2.is_unpacked():
        return SMOLLM2.folder
    task = progress.add_task(f"Unpacking {SMOLLM2.name}, once", total=1.0, text="")
    folder = unpack(
        SMOLLM2,
        lambda stage, share: progress.update(task, description=f"{stage}, once", completed=share),
    )
    progress.update(task, description=f"Unpacked {SMOLLM2.name}", completed=1.0)
    return folder


@contextmanager
def _watch(
    progress: "Progress", name: str, tokenizer: Any, max_new_tokens: int
) -> Iterator[Callable[[int], None]]:
    """A line whose bar counts generated tokens, and that shows the text as it grows."""
    task = progress.add_task(name, total=None, text="prefill")
    tokens: list[int] = []

    def on_token(token: int) -> None:
        tokens.append(token)
        text = " ".join(_decode(tokenizer, tokens).split())
        progress.update(task, total=max_new_tokens, completed=len(tokens), text=text[-60:])

    yield on_token
    progress.update(task, total=len(tokens), completed=len(tokens), text="")


def _decode(tokenizer: Any, tokens: Any) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text
