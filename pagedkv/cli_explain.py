"""The command ``pagedkv explain``: why a prompt hits as far as it does in a store."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli_output import JsonOption, StoreArgument, console, mistakes, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from pagedkv.explanation import Explanation

_BAR_WIDTH = 40


def explain(
    store: StoreArgument,
    tokens: Annotated[
        Path,
        typer.Option(
            "--tokens",
            metavar="FILE",
            help="The prompt's token ids: a JSON list, numbers, or .npy; - is standard input.",
        ),
    ],
    salt: Annotated[
        str,
        typer.Option("--salt", metavar="TEXT", help="The tenant's; hex:… gives bytes."),
    ] = "",
    extra: Annotated[
        str,
        typer.Option(
            "--extra", metavar="TEXT", help="The extra of all pages (LoRA); hex:… gives bytes."
        ),
    ] = "",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FINGERPRINT",
            help="The model that the prompt is for. Default: that of the store.",
            show_default=False,
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group",
            metavar="NAME",
            help="The only layer group to look at. Default: all.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell why a prompt hits as far as it does in a store, and no further.

    It names the page where the prompt stops and whether that page was never written, evicted (when
    and why), damaged, of another model, or stored under another salt or extra; the last two only
    for the owner of the store. The store may be in use. The exit status is 0 if it could be told.
    """
    with mistakes():
        from pagedkv.explain import explain_prefix
        from pagedkv.token_file import read_tokens

        result = explain_prefix(
            store,
            read_tokens(tokens),
            salt=_bytes(salt, "--salt"),
            extra=_bytes(extra, "--extra") or None,
            model=model,
            group=group,
        )
    if as_json:
        print_json(asdict(result) | {"num_found_tokens": result.num_found_tokens})
    else:
        console().print(_table(result))


def _bytes(text: str, option: str) -> bytes:
    """The bytes that a text of the command line stands for."""
    if not text.startswith("hex:"):
        return os.fsencode(text)
    try:
        return bytes.fromhex(text[4:])
    except ValueError as error:
        raise ValueError(f"{option} is {text!r}: after hex: come pairs of hex digits") from error


def _table(result: "Explanation") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from pagedkv.explanation import StopReason

    is_complete = result.reason is StopReason.COMPLETE
    table = Table(title=result.store, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for title, text in result.lines():
        style = ""
        if title == "because":
            style = "bold green" if is_complete else "bold red"
        table.add_row(title, Text(text, style=style))
        if title == "prompt" and result.num_tokens:
            filled = round(_BAR_WIDTH * result.num_found_tokens / result.num_tokens)
            bar = Text("█" * filled, style="green")
            bar.append("░" * (_BAR_WIDTH - filled), style="red")
            table.add_row("", bar)
    return table
