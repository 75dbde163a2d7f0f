"""A chat in the terminal that remembers, across restarts, what was said and the KV of it.

    python examples/chat.py                  SmolLM2-135M-Instruct, out of a PyPI wheel
    python examples/chat.py --model FOLDER   another model that has a chat template
    python examples/chat.py --tiny           a random model without a download, which talks nonsense

Type a line, read the answer. End the program and start it again: the conversation goes on, and
nothing of it is computed a second time. Memory and disk are bounded by --pool and --max-store.
Ctrl-C stops an answer; /new starts over, /stats shows figures, /quit, Ctrl-D or Ctrl-C ends.
"""

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is on this machine

try:
    import tokenizers
    import torch
    import transformers
    from filelock import FileLock, Timeout
except ImportError as error:
    sys.exit(f"{error}. Install it with: pip install '.[transformers]' in the clone")

import pagedkv as pk
from pagedkv_adapters.demo.folder import cache_folder
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.pool_size import pool_slots
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import SMOLLM2
from pagedkv_adapters.transformers import PagedCache, spec_for

COMMANDS = "/new starts over, /stats shows figures, /quit ends"


class Conversation(NamedTuple):
    """What was said, as tokens for the model and as text for people.

    The tokens of an answer are kept as the model chose them. Its text may be tokenised in another
    way, and then neither the model's context nor the keys of its pages would be those of before.
    """

    tokens: list[int]
    messages: list[dict[str, str]]

    @classmethod
    def read(cls, path: Path, spec: pk.KVSpec, vocabulary: int) -> Self:
        """The conversation in a file, an empty one if there is none; ``ValueError`` if damaged."""
        if not path.exists():
            return cls([], [])
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            model, tokens, messages = (document[k] for k in ("model", "tokens", "messages"))
            if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
                raise ValueError("not all tokens are token ids")
            found = cls(tokens, [as_message(**message) for message in messages])
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): --new starts over") from error
        if model != spec.model:
            raise ValueError(f"{path} is of another model: give another --store, or --new")
        return found

    def write(self, path: Path, spec: pk.KVSpec) -> None:
        """Replace the file; if the process ends meanwhile, it is the old one or the new one."""
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({"model": spec.model, **self._asdict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)


def as_message(role: str, content: str) -> dict[str, str]:
    """What someone said, as chat templates take it."""
    return {"role": role, "content": content}


def turn_tokens(tokenizer: Any, conversation: Conversation, text: str) -> list[int]:
    """What follows on a conversation's tokens when the user says ``text``, up to the answer.

    A template renders whole conversations, but answers are not to be tokenised again. So it renders
    a stand-in for them: what comes behind that follows on any answer. SmolLM2's template renders
    turn by turn, so that tokens and all that follows are what it makes of the whole conversation.
    """
    stand_in, messages = "<<answer>>", [as_message("user", text)]
    if conversation.tokens:
        messages[:0] = [as_message("user", "question"), as_message("assistant", stand_in)]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if conversation.tokens:
        rendered = rendered.partition(stand_in)[2]
    return tokenizer(rendered, add_special_tokens=False)["input_ids"]


class Watch(transformers.StoppingCriteria):
    """Takes the time of each token, and makes Ctrl-C end the answer: behind the current token.

    The exception that Ctrl-C raises otherwise could leave the cache unusable, wherever it comes;
    so it is raised only by a second Ctrl-C, which ends the program.
    """

    def __enter__(self) -> Self:
        self.times = [time.perf_counter()]
        self.is_stopped = False
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Whether to stop, asked by ``generate`` behind each token."""
        self.times.append(time.perf_counter())
        return torch.full((len(input_ids),), self.is_stopped)

    def _interrupt(self, *_: object) -> None:
        if self.is_stopped:
            raise KeyboardInterrupt
        self.is_stopped = True

    def __str__(self) -> str:
        start, first, *others = self.times
        speed = f", then {len(others) / (others[-1] - first):.1f} tokens/s" if others else ""
        stopped = "; stopped" if self.is_stopped else ""
        return f"first token after {first - start:.2f} s{speed}{stopped}"


class Chat:
    """A conversation with a model, whose KV ``kv`` keeps, and whose words a file."""

    def __init__(self, model: Any, tokenizer: Any, kv: pk.PagedKVCache, path: Path) -> None:
        self.model, self.tokenizer, self.kv, self.path = model, tokenizer, kv, path
        self.conversation = Conversation([], [])
        ends = model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]

    def keep(self, conversation: Conversation) -> None:
        """Go on with this conversation, after a restart too."""
        self.conversation = conversation
        conversation.write(self.path, self.kv.specs[0])

    def answer(self, text: str, max_new_tokens: int) -> None:
        """Print what the model says to ``text``, and keep both."""
        tokens, messages = self.conversation
        prompt = tokens + turn_tokens(self.tokenizer, self.conversation, text)
        limit = self.model.config.max_position_embeddings
        if len(prompt) >= limit:
            print(f"[{len(prompt):,} tokens are more than the model takes, {limit:,}: try /new]")
            return
        ids = torch.tensor([prompt])
        with Watch() as watch, PagedCache.from_prompt(self.model, ids, self.kv) as cache:
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=min(max_new_tokens, limit - len(prompt)),
                do_sample=False,
                streamer=transformers.TextStreamer(
                    self.tokenizer, skip_prompt=True, skip_special_tokens=True
                ),
                stopping_criteria=transformers.StoppingCriteriaList([watch]),
            )[0].tolist()
            print(f"[{len(prompt):,} prompt tokens, {cache.num_reused_tokens:,} reused; {watch}]")
            if output[-1] in self.ends:
                output.pop()  # the template closes an answer, one that was cut off too
            said = self.tokenizer.decode(output[len(prompt) :], skip_special_tokens=True)
            turn = [as_message("user", text), as_message("assistant", said)]
            self.keep(Conversation(output, messages + turn))
            cache.commit(output)
            cache.save()  # the last, partial page too: the next turn goes on at the last token

    def show_stats(self) -> None:
        """Print how much of pool and store is used, and what for."""
        stats, (tokens, messages) = self.kv.stats(), self.conversation
        pool, store = pk.format_nbytes(stats.pool_nbytes), pk.format_nbytes(stats.store_nbytes)
        print(f"conversation: {len(messages) // 2} turns, {len(tokens):,} tokens")
        print(f"pool: {stats.num_slots - stats.num_free_slots} of {stats.num_slots} slots, {pool}")
        print(f"pages: {stats.num_pages_stored} stored, {stats.num_pages_loaded} loaded", end="")
        print(f", {stats.num_pages_evicted} evicted\nstore: {store} in {self.kv.store.path}")

    def obey(self, line: str, max_new_tokens: int) -> None:
        """Do what was typed: a command, or something to answer."""
        if line == "/new":
            self.keep(Conversation([], []))
        elif line == "/stats":
            self.show_stats()
        elif line.startswith("/"):
            print(COMMANDS)
        elif line:
            self.answer(line, max_new_tokens)

    def talk(self, max_new_tokens: int) -> None:
        """Obey line by line, up to ``/quit``."""
        prompt = "> " if sys.stdin.isatty() else ""
        sys.stdin.reconfigure(errors="replace")
        while (line := input(prompt).strip()) != "/quit":
            try:
                self.obey(line, max_new_tokens)
            except (OSError, pk.PagedKVError) as error:
                print(f"\n[{error}]")


def tiny_model() -> tuple[Any, Any]:
    """A random Llama, and a tokenizer whose tokens are letters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=100_000,
        initializer_range=0.2,
        eos_token_id=None,
        attn_implementation="pagedkv",
    )
    vocabulary = {chr(32 + token): token for token in range(95)} | {"<end>": 95}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '<end>' }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def load_model(folder: Path | None) -> tuple[Any, Any]:
    """The model in the folder, or SmolLM2, and its tokenizer."""
    if folder is None:
        folder = unpack(SMOLLM2, lambda stage, share: print(f"{stage} ({share:.0%})"))
    model, tokenizer = load(folder, "pagedkv")
    if not tokenizer.chat_template:
        raise ValueError(f"{folder} has no chat template: give a model that was made to chat")
    return model, tokenizer


def open_chat(options: argparse.Namespace, stack: ExitStack) -> Chat:
    """The chat in the store's folder, which no other process may use meanwhile."""
    name = "tiny" if options.tiny else (options.model or SMOLLM2.folder).absolute().name
    folder = options.store or cache_folder() / "chat" / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(FileLock(folder / "chat.lock", timeout=0))
    except Timeout as error:
        raise ValueError(f"another chat uses {folder}: end it, or give another --store") from error
    model, tokenizer = tiny_model() if options.tiny else load_model(options.model)
    spec = spec_for(model)
    num_slots = pool_slots(options.pool, spec, model.config.max_position_embeddings)
    store = pk.PageStore.open(folder / "cache.zarr", spec, max_nbytes=options.max_store)
    kv = stack.enter_context(pk.PagedKVCache(spec, num_slots, store))
    chat = Chat(model, tokenizer, kv, folder / "conversation.json")
    if not options.new:
        chat.conversation = Conversation.read(chat.path, spec, model.config.vocab_size)
    chat.keep(chat.conversation)
    tokens, messages = chat.conversation
    print(f"{name}; {len(messages) // 2} turns, {len(tokens):,} tokens remembered in {folder}")
    print(COMMANDS)
    return chat


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="FOLDER", help="a transformers model")
    source.add_argument("--tiny", action="store_true", help="a random model of no size")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="where all of it is kept")
    parser.add_argument("--new", action="store_true", help="start over")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--pool", default="128MiB", help="memory for KV (128MiB)")
    parser.add_argument("--max-store", default="2GiB", help="disk for KV (2GiB)")
    options = parser.parse_args()
    if options.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {options.max_new_tokens}: give at least 1")
    with ExitStack() as stack:
        try:
            chat = open_chat(options, stack)
        except pk.SpecMismatchError as error:
            sys.exit(f"{error}\nThe store is of another model: give this one its own --store")
        except (OSError, ValueError, pk.PagedKVError) as error:
            sys.exit(str(error))
        chat.talk(options.max_new_tokens)


if __name__ == "__main__":
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines
    with suppress(EOFError, KeyboardInterrupt):
        main()
