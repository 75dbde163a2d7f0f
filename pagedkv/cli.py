"""The command ``pagedkv``: it parses, calls a function of the library, and prints."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from pagedkv import __version__, cli_explain, cli_simulate, cli_store
from pagedkv.errors import PagedKVError

if TYPE_CHECKING:
    from rich.table import Table

    from pagedkv.sizing import KVSize

app = typer.Typer(
    name="pagedkv",
    help="A paged, tiered KV cache for LLM inference, on an open Zarr v3 store.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are wrapped to the terminal
)

ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="Folder of a transformers model. Default: the demo's SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """Run the command line; what the user can mend is one line on stderr and exit status 1."""
    try:
        app()
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (PagedKVError, ValueError) as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    typer.echo(f"pagedkv: {' '.join(message.split())}", err=True)
    sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedkv {__version__}")
        raise typer.Exit


@app.callback()
def pagedkv(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """A paged, tiered KV cache for LLM inference, on an open Zarr v3 store."""


@app.command()
def size(
    context: Annotated[int, typer.Option("--context", metavar="N", help="Tokens of the sequence.")],
    model: ModelOption = None,
    page_tokens: Annotated[
        int, typer.Option("--page-tokens", metavar="N", help="Tokens of a page.")
    ] = 16,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="float32, float16 or bfloat16. Default: the model's.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="How many tokens fit into this much, such as 8GiB?",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what the KV of a model needs at a context, in the pool and on disk.

    Reads the model's config.json alone.
    """
    from pagedkv.sizing import size_kv

    if model is None:
        from pagedkv_adapters.demo.command import installed_model

        model = installed_model()
    result = size_kv(model, context, page_tokens=page_tokens, dtype=dtype, memory=memory)
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
        return
    from rich.console import Console

    Console().print(_size_table(result))


def _size_table(size: "KVSize") -> "Table":
    from rich.table import Table

    from pagedkv.spec import format_nbytes

    limit = size.max_context_tokens
    table = Table(
        title=f"KV of {size.model_type} for {size.context_tokens:,} tokens", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_row(
        "layers x KV heads x head_dim",
        f"{size.num_layers} x {size.num_kv_heads} x {size.head_dim} {size.dtype}",
    )
    table.add_row("a token", format_nbytes(size.token_nbytes))
    table.add_row(
        f"a page of {size.page_tokens} tokens",
        f"{format_nbytes(size.page_nbytes)}, {size.num_pages:,} pages",
    )
    table.add_row("in the pool", format_nbytes(size.pool_nbytes), style="bold")
    for codec, nbytes in size.disk_nbytes.items():
        table.add_row(f"on disk, {codec}", format_nbytes(nbytes), style="bold")
    if size.memory_nbytes is not None and size.memory_tokens is not None:
        table.add_row(
            f"{format_nbytes(size.memory_nbytes)} of memory holds",
            f"{size.memory_tokens:,} tokens",
            style="bold",
        )
    if limit is not None and size.context_tokens > limit:
        table.caption = f"The model was made for {limit:,} tokens at most."
    return table


@app.command()
def demo(
    model: ModelOption = None,
    prompt: Annotated[
        Path | None,
        typer.Option(
            "--prompt",
            metavar="FILE",
            help="Text file to send to the model. Default: a chapter of Alice's Adventures in "
            "Wonderland and a question about it.",
            show_default=False,
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool",
            metavar="SIZE",
            help="The pool: a size such as 48MiB, or a share of the KV. Default: 50%, with --long "
            "10%.",
            show_default=False,
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            "--codec",
            metavar="CODEC",
            help="How pages are stored: raw or int8. Default: raw.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="PATH",
            help="Folder of the store; what it holds already is used. Default: a fresh one in "
            "your cache folder.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Tokens to generate. Default: 48, with --long 32.",
            show_default=False,
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long",
            help="Instead: the longest context of the model, then decode steps behind a cache "
            "like an 8B model's, both with a pool for a tenth. Takes minutes and 2.4 GiB of disk.",
        ),
    ] = False,
    long_tokens: Annotated[
        int | None,
        typer.Option(
            "--long-tokens",
            metavar="N",
            help="With --long: a shorter context, and tokens of the cache. Default: all that the "
            "model supports, and 32768.",
            show_default=False,
        ),
    ] = None,
    long_steps: Annotated[
        int | None,
        typer.Option(
            "--long-steps",
            metavar="N",
            help="With --long: decode steps from the disk. Default: 4.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a real model generate with its KV in a pool too small for it, then resume from disk.

    Runs the same prompt with the cache of transformers, with PagedKV, and in a new process that
    finds the prompt's KV on disk instead of computing it.
    """
    from pagedkv_adapters.demo.command import run_demo, run_long_demo

    if long:
        _refuse("--long", {"--codec": codec, "--store": store})
        run_long_demo(
            model=model,
            prompt=prompt,
            pool="10%" if pool is None else pool,
            max_new_tokens=32 if max_new_tokens is None else max_new_tokens,
            num_tokens=long_tokens,
            num_steps=4 if long_steps is None else long_steps,
            as_json=as_json,
        )
        return
    _refuse("a demo without --long", {"--long-tokens": long_tokens, "--long-steps": long_steps})
    run_demo(
        model=model,
        prompt=prompt,
        pool="50%" if pool is None else pool,
        codec="raw" if codec is None else codec,
        store=store,
        max_new_tokens=48 if max_new_tokens is None else max_new_tokens,
        as_json=as_json,
    )


def _refuse(what: str, options: Mapping[str, object]) -> None:
    """``ValueError`` if one of the options was given, which ``what`` does not take."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{what} does not take {' and '.join(given)}")


for _command in (
    cli_store.verify,
    cli_store.info,
    cli_store.ls,
    cli_store.gc,
    cli_store.bench,
    cli_simulate.simulate,
    cli_explain.explain,
):
    app.command()(_command)
