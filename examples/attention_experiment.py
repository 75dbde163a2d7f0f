"""Attention to a few pages only: try a rule of your own on a real model.

Which pages of a long context does a decode step need? Here a rule is a function that scores pages
for a query, from a summary of their keys. The first page, the most recent ones and the ``k`` with
the highest scores are attended, the others left out. Four rules run side by side: two from papers,
a baseline, and the bound that no rule exceeds. Add yours to ``RULES``.

For each rule and ``k`` this prints the share of the true attention weights that lies on the chosen
pages, the share of pages chosen, by how much the attention's output is off, and what the model
answers. Summaries are computed anew for each query, which reads all keys: this shows what a rule
finds, not how fast it could be.

    python examples/attention_experiment.py                   SmolLM2-135M-Instruct, 2,788 tokens
    python examples/attention_experiment.py --plot mass.svg   the same, and a figure
    python examples/attention_experiment.py --tiny            a small model with random weights
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

try:
    import torch
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    sys.exit(f"{error}. Install it with: pip install '.[transformers]' in the clone")

import pagedkv as pk
from pagedkv_adapters.demo import model as local_model
from pagedkv_adapters.demo.prompt import alice_prompt, encode
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import SMOLLM2
from pagedkv_adapters.transformers import PagedCache, spec_for

Array = npt.NDArray[Any]
Rule = Callable[[Array, Array, Array], Array]
"""Takes a scaled query ``(head, group, channel)``, where ``group`` are the query heads that share a
KV head, keys ``(token, head, channel)``, and each page's first token. Gives ``(head, page)``."""


# -- the rules -------------------------------------------------------------------------------

SINK_PAGES, RECENT_PAGES = 1, 2  # chosen in any case (attention sinks: Xiao et al., 2024)
ALWAYS = SINK_PAGES + RECENT_PAGES


def quest(q: Array, keys: Array, starts: Array) -> Array:
    """What no key between a page's lowest and highest channels exceeds (Tang et al., 2024)."""
    low, high = np.minimum.reduceat(keys, starts), np.maximum.reduceat(keys, starts)
    positive, negative = np.maximum(q, 0), np.minimum(q, 0)
    return np.einsum("hgc,phc->hp", positive, high) + np.einsum("hgc,phc->hp", negative, low)


def mean_key(q: Array, keys: Array, starts: Array) -> Array:
    """The score of the page's mean key (as in MoBA; Lu et al., 2025)."""
    counts = np.diff(starts, append=len(keys))
    means = np.add.reduceat(keys, starts) / counts[:, None, None]
    return np.einsum("hgc,phc->hp", q, means)


def recent(q: Array, keys: Array, starts: Array) -> Array:
    """The later the better: a sliding window, which looks at no key."""
    return np.broadcast_to(np.arange(len(starts)), (len(q), len(starts)))


def oracle(q: Array, keys: Array, starts: Array) -> Array:
    """The true weights: the most that ``k`` pages can have. To know it, all keys are read."""
    return page_weights(q, keys, starts).sum(axis=1)


RULES: dict[str, Rule] = {"quest": quest, "mean": mean_key, "recent": recent, "oracle": oracle}


def ranked(scores: Array) -> Array:
    """Pages in the order in which they are chosen: sinks, recent ones, then the best."""
    scores = scores.astype(np.float64)
    scores[:, :SINK_PAGES] = scores[:, -RECENT_PAGES:] = np.inf
    return np.argsort(-scores, axis=-1, kind="stable")


def attend(q: Array, keys: Array, values: Array, pages: Array, page_tokens: int) -> Array:
    """Attention to the tokens of ``pages``, ``(head, chosen)``, alone; no others are read."""
    out = np.empty_like(q)
    for head, chosen in enumerate(pages):
        tokens = (np.sort(chosen)[:, None] * page_tokens + np.arange(page_tokens)).ravel()
        tokens = tokens[tokens < len(keys)]  # the last page may not be full
        out[head] = softmax(q[head] @ keys[tokens, head].T) @ values[tokens, head]
    return out


def page_weights(q: Array, keys: Array, starts: Array) -> Array:
    """What full attention gives each page, ``(head, group, page)``; the sum over pages is 1."""
    weights = softmax(np.einsum("hgc,thc->hgt", q, keys))
    return np.add.reduceat(weights, starts, axis=-1)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


# -- the queries of a real model, and what a rule makes of them --------------------------------


class Query(NamedTuple):
    """One layer's query in one decode step, and what the model's own attention answered."""

    layer: int
    num_tokens: int
    q: Array
    out: Array


class Curve(NamedTuple):
    """What a rule gave, by ``k``: means over queries and heads.

    Attributes:
        ks: Pages chosen by score, beside sinks and recent ones; the last is all.
        read: Share of the pages that were read, ``(k,)``.
        num_read: Their number, likewise.
        mass: Share of the true weights on them, ``(k, layer)``.
        error: Relative error of the attention's output, likewise.
    """

    ks: list[int]
    read: Array
    num_read: Array
    mass: Array
    error: Array


def measure(
    sequence: pk.Sequence, queries: list[Query], rule: Rule, ks: list[int], page_tokens: int
) -> Curve:
    """Put queries, in the order of the model's layers, to the pages that ``rule`` chooses."""
    figures = []
    for layer, num_tokens, q, expected in queries:
        with sequence.gather(layer, num_tokens) as (keys, values):  # views of the pool
            starts = np.arange(0, num_tokens, page_tokens)
            weights = page_weights(q, keys, starts)
            order = ranked(rule(q, keys, starts))
            for k in ks:
                pages = order[:, : ALWAYS + k]
                mass = np.take_along_axis(weights, pages[:, None], axis=-1).sum(axis=-1).mean()
                off = attend(q, keys, values, pages, page_tokens) - expected
                error = np.linalg.norm(off) / np.linalg.norm(expected)
                figures.append((mass, error, pages.shape[1], pages.shape[1] / len(starts)))
    num_layers = 1 + max(query.layer for query in queries)
    by_step = np.array(figures, dtype=np.float64).reshape(-1, num_layers, len(ks), 4)
    mass, error, num_read, read = by_step.mean(axis=0).transpose(2, 1, 0)
    return Curve(ks, read[:, 0], num_read[:, 0], mass, error)


def record(model: Any, queries: list[Query]) -> None:
    """Let the model attend to everything, and keep the queries of some decode steps."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)
        if query.shape[2] == 1 and key.shape[2] % EVERY == 0:
            q = grouped(query * scaling, key)
            queries.append(Query(module.layer_idx, key.shape[2], q, out.numpy().reshape(q.shape)))
        return out, None

    use_attention(model, "experiment-record", attention)


def select(model: Any, rule: Rule, k: int, page_tokens: int) -> None:
    """Let a token that comes alone attend to the pages that ``rule`` chooses; a prompt to all."""

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        if query.shape[2] > 1:
            return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)
        q = grouped(query * scaling, key)
        keys, values = (tensor[0].transpose(0, 1).numpy() for tensor in (key, value))
        order = ranked(rule(q, keys, np.arange(0, len(keys), page_tokens)))
        out = attend(q, keys, values, order[:, : ALWAYS + k], page_tokens)
        return torch.from_numpy(out).view(1, 1, query.shape[1], query.shape[3]), None

    use_attention(model, "experiment-select", attention)


def grouped(query: torch.Tensor, key: torch.Tensor) -> Array:
    """One token's queries by the KV heads that they share, ``(head, group, channel)``."""
    return query.view(key.shape[1], -1, key.shape[3]).numpy()


def use_attention(model: Any, name: str, attention: Callable[..., Any]) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


# -- the experiment ----------------------------------------------------------------------------

KS = (0, 1, 2, 4, 8, 16, 32, 64)
ANSWER_KS = (4, 64)
EVERY = 4


class Subject(NamedTuple):
    """A model, a prompt ``(1, token)``, and how to read what it answers."""

    model: Any
    prompt: torch.Tensor
    decode: Callable[[torch.Tensor], str]


def smollm2_subject() -> Subject:
    try:
        folder = unpack(SMOLLM2, lambda stage, share: print(f"{stage} ({share:.0%})"))
    except pk.PagedKVError as error:
        sys.exit(f"{error}\nOr take a random model: python examples/{Path(__file__).name} --tiny")
    model, tokenizer = local_model.load(folder)
    prompt = encode(tokenizer, alice_prompt())
    return Subject(model, prompt, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))


def tiny_subject() -> Subject:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    prompt = torch.randint(256, (1, 400))
    model: Any = LlamaForCausalLM(config)
    return Subject(model.eval(), prompt, lambda ids: f"tokens {ids[:8].tolist()} ...")


def generate(subject: Subject, cache: PagedCache, num_new: int) -> torch.Tensor:
    """Prompt and answer, ``(1, token)``."""
    ids = subject.prompt
    output: torch.Tensor = subject.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=cache,
        max_new_tokens=num_new,
        do_sample=False,
    )
    return output


def run(subject: Subject, num_new: int, console: Console) -> dict[str, Curve]:
    """Generate once in full, measure the rules on its queries, then generate by each rule."""
    spec = spec_for(subject.model)
    num_pages = -(-(subject.prompt.shape[1] + num_new) // spec.page_tokens)
    with pk.PagedKVCache(spec, num_slots=num_pages + 8) as kv:
        queries: list[Query] = []
        record(subject.model, queries)
        with PagedCache.from_prompt(subject.model, subject.prompt, kv) as cache:
            output = generate(subject, cache, num_new)
            cache.commit(output)  # the answers below begin with the same pages
            expected = output[0, subject.prompt.shape[1] :]
            num_pages = cache.sequence.num_pages
            ks = [k for k in KS if k + ALWAYS < num_pages] + [num_pages]
            curves = {
                name: measure(cache.sequence, queries, rule, ks, spec.page_tokens)
                for name, rule in RULES.items()
            }
        num_tokens = subject.prompt.shape[1]
        console.print(
            f"A prompt of {num_tokens:,} tokens, with the answer {num_pages} pages\n"
            f"{len(queries)} queries, of {spec.num_layers} layers in every {EVERY}th decode step\n",
            highlight=False,
        )
        show(curves, console)
        console.print(answers(subject, kv, expected, spec.page_tokens))
    return curves


def answers(
    subject: Subject, kv: pk.PagedKVCache, expected: torch.Tensor, page_tokens: int
) -> Table:
    """What the model answers when each rule chooses, and up to where that is ``expected``."""
    title = "Answers, and their tokens up to the first that differs"
    table = Table("k", "rule", "same", "answer", title=title, box=box.SIMPLE, pad_edge=False)
    table.add_row("all", "", "", escape(subject.decode(expected)))
    prompt = subject.prompt
    for k in ANSWER_KS:
        for name, rule in RULES.items():
            select(subject.model, rule, k, page_tokens)
            with PagedCache.from_prompt(subject.model, prompt, kv) as cache:
                found = generate(subject, cache, len(expected))[0, prompt.shape[1] :]
            count = min(len(found), len(expected))
            same = int((found[:count] == expected[:count]).cumprod(0).sum())
            table.add_row(str(k), name, f"{same} of {len(expected)}", escape(subject.decode(found)))
    return table


# -- tables and plots --------------------------------------------------------------------------

PLOT_ROWS = 16


def show(curves: Mapping[str, Curve], console: Console) -> None:
    console.print(
        table_of(
            "Attention mass on the pages read, in %: mean (worst layer)",
            curves,
            lambda curve, row: (curve.mass[row].mean(), curve.mass[row].min()),
        )
    )
    console.print(
        table_of(
            "Relative error of the attention's output, in %: mean (worst layer)",
            curves,
            lambda curve, row: (curve.error[row].mean(), curve.error[row].max()),
        )
    )
    worst = max(float(curve.error[-1].max()) for curve in curves.values())
    console.print(f"All pages against the model's own attention: relative error {worst:.1e}\n")
    console.print("Attention mass (mean), and # pages read, by k", highlight=False)
    console.print(text_plot(curves), highlight=False, markup=False)


def table_of(
    title: str, curves: Mapping[str, Curve], figures: Callable[[Curve, int], tuple[float, float]]
) -> Table:
    """A row for each ``k``, a column for each rule."""
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("k", "pages read", *curves):
        table.add_column(name, justify="right")
    first = next(iter(curves.values()))
    for row, label in enumerate(labels(first.ks)):
        cells = (figures(curve, row) for curve in curves.values())
        table.add_row(
            label,
            f"{first.num_read[row]:.0f} ({first.read[row]:.0%})",
            *(f"{100 * mean:.1f} ({100 * worst:.1f})" for mean, worst in cells),
        )
    return table


def text_plot(curves: Mapping[str, Curve]) -> str:
    """Shares from 0 to 1 upwards, ``k`` to the right."""
    first = next(iter(curves.values()))
    marks = marks_of(curves)
    lines = {marks[name]: curve.mass.mean(axis=1) for name, curve in curves.items()}
    lines["#"] = first.read
    width = len(lines) + 2
    grid = np.full((PLOT_ROWS + 1, width * len(first.ks)), " ")
    for offset, (mark, shares) in enumerate(lines.items()):
        for at, share in enumerate(shares):
            grid[PLOT_ROWS - round(PLOT_ROWS * float(share)), at * width + offset] = mark
    rows = [
        f"{1 - row / PLOT_ROWS:5.0%} |" + "".join(cells).rstrip() for row, cells in enumerate(grid)
    ]
    names = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    below = "".join(label.center(width - 2) + "  " for label in labels(first.ks))
    return "\n".join([*rows, f"    k  {below.rstrip()}", f"       {names}, # pages read"])


def marks_of(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name, its own first one where that is free."""
    marks: dict[str, str] = {}
    for name in names:
        letters = (letter for letter in name + ascii_letters if letter not in marks.values())
        marks[name] = next(letters)
    return marks


def write_plot(curves: Mapping[str, Curve], path: Path) -> None:
    """The same as a figure; the name's ending says of what kind, such as ``.svg`` or ``.png``."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, curve in curves.items():
        axes[0].plot(curve.mass.mean(axis=1), marker="o", label=name)
        axes[1].plot(curve.error.mean(axis=1), marker="o", label=name)
    first = next(iter(curves.values()))
    axes[0].plot(first.read, color="gray", linestyle="--", label="share of pages read")
    for axis, title in zip(
        axes, ("attention mass on the pages read", "relative error of the output"), strict=True
    ):
        axis.set(title=title, xlabel="k, pages chosen by score", ylim=(0, None))
        axis.set_xticks(range(len(first.ks)), labels(first.ks))
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(path)
    plt.close(figure)


def labels(ks: list[int]) -> list[str]:
    return [*map(str, ks[:-1]), "all"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights")
    parser.add_argument("--plot", type=Path, help="write a figure: a name in .svg, .png or .pdf")
    parser.add_argument("--new-tokens", type=int, default=28, help="tokens of the answer at most")
    arguments = parser.parse_args()
    if arguments.new_tokens <= EVERY:
        parser.error(f"--new-tokens must be more than {EVERY}: every {EVERY}th step is measured")
    if arguments.plot and arguments.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot {arguments.plot}: the name must end in .svg, .png or .pdf")
    if arguments.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[report]' in the clone")
    subject = tiny_subject() if arguments.tiny else smollm2_subject()
    curves = run(subject, arguments.new_tokens, Console())
    if arguments.plot:
        write_plot(curves, arguments.plot)
        print(f"Wrote {arguments.plot}")


if __name__ == "__main__":
    main()
