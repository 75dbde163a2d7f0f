"""``examples/chat.py``: what was said is there after a restart, and so is the KV of it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `transformers` is not installed")

from filelock import FileLock
from transformers import AutoTokenizer

import pagedkv as pk

pytestmark = pytest.mark.torch

CHAT = Path(__file__).parent.parent / "examples" / "chat.py"
TURN = re.compile(r"\[([\d,]+) prompt tokens, ([\d,]+) reused; first token after [\d.]+ s.*\]")

Say = Callable[..., list[str]]


@pytest.fixture(scope="module")
def chat() -> Any:
    """The example as a module."""
    spec = spec_from_file_location("chat", CHAT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def say(chat: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """What the chat prints while lines are typed, in this process."""

    def say(store: Path, *lines: str, options: tuple[str, ...] = ()) -> list[str]:
        arguments = ["--tiny", "--store", str(store), "--max-new-tokens", "30", *options]
        monkeypatch.setattr("sys.argv", ["chat.py", *arguments])
        typed = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
        with suppress(EOFError):
            chat.main()
        return capsys.readouterr().out.splitlines()

    return say


def start(store: Path, num_new: int) -> subprocess.Popen[str]:
    """The chat in a process of its own, warnings being errors."""
    options = ["--tiny", "--store", str(store), "--max-new-tokens", str(num_new)]
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", str(CHAT), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], typed: str | None = None) -> list[str]:
    """What it prints until its end, which is to be a good one."""
    output, errors = process.communicate(typed)
    assert (process.returncode, errors) == (0, "")
    return output.splitlines()


def counts(output: list[str]) -> list[tuple[int, int]]:
    """Tokens of the prompt, and how many of them were reused, of each turn."""
    return [(int(m[1]), int(m[2])) for line in output if (m := TURN.fullmatch(line))]


def remembered(store: Path) -> tuple[list[int], list[str]]:
    """Tokens of the conversation, and what was said."""
    document = json.loads((store / "conversation.json").read_text())
    return document["tokens"], [message["content"] for message in document["messages"]]


def test_a_second_process_goes_on_at_the_last_token(say: Say, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    lines = ["My name is Ada.", "What is it?", "And now?"]
    first = finish(start(here, 30), f"{lines[0]}\n\n{lines[1]}\n/stats\n/nonsense\n")
    (prompt, reused), (longer, reused_then) = counts(first)
    # Of an answer's last token no KV was computed.
    assert (reused, reused_then) == (0, prompt + 29)
    assert f"conversation: 2 turns, {longer + 30} tokens" in first
    assert first[-1].startswith("/new starts over")
    second = finish(start(here, 30), f"{lines[2]}\n/quit\nnot read\n")
    assert f"tiny; 2 turns, {longer + 30} tokens remembered in {here}" in second
    assert [reused for _, reused in counts(second)] == [longer + 29]

    say(there, *lines)
    assert remembered(here) == remembered(there)
    assert remembered(here)[1][::2] == lines


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(say: Say, tmp_path: Path) -> None:
    process = begin_to_answer(tmp_path)
    process.send_signal(signal.SIGINT)
    output = finish(process, "/stats\n")
    assert any(line.endswith("; stopped]") for line in output)
    tokens, said = remembered(tmp_path)
    assert f"conversation: 1 turns, {len(tokens)} tokens" in output
    assert 5 < len(said[1]) < 50_000
    assert [reused for _, reused in counts(say(tmp_path, "Go on."))] == [len(tokens) - 1]
    assert remembered(tmp_path)[0][: len(tokens)] == tokens


def test_ctrl_c_twice_ends_the_chat_and_a_restart_finds_what_was_there(
    say: Say, tmp_path: Path
) -> None:
    say(tmp_path, "hello")
    tokens, _ = remembered(tmp_path)
    process = begin_to_answer(tmp_path)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    finish(process)
    assert remembered(tmp_path)[0][: len(tokens)] == tokens
    ((_, reused),) = counts(say(tmp_path, "hello again"))
    assert reused >= len(tokens) - 1


def begin_to_answer(store: Path) -> subprocess.Popen[str]:
    """A chat in the middle of an answer that would take it a long time."""
    process = start(store, 50_000)
    assert process.stdin
    assert process.stdout
    process.stdin.write("Talk for hours.\n")
    process.stdin.flush()
    for _ in range(2):
        process.stdout.readline()
    assert len(process.stdout.read(8)) == 8
    return process


def test_new_starts_over_and_pages_of_before_are_found_all_the_same(
    say: Say, tmp_path: Path
) -> None:
    output = say(tmp_path, "Tell me of the sea, please.", "/new", "Tell me of the sea, please.")
    (length, _), (again, reused) = counts(output)
    assert (again, reused) == (length, length - 1)  # the last one is computed
    assert "tiny; 0 turns, 0 tokens" in say(tmp_path, options=("--new",))[0]


def test_small_bounds_cost_time_and_nothing_else(say: Say, tmp_path: Path) -> None:
    lines = ["One.", "Two.", "Three."]
    say(tmp_path / "wide", *lines)
    options = ("--pool", "48KiB", "--max-store", "300KiB")
    output = say(tmp_path / "narrow", *lines, "/stats", options=options)
    assert remembered(tmp_path / "narrow") == remembered(tmp_path / "wide")
    assert any(re.match(r"pool: \d of 3 slots, 48.0 KiB", line) for line in output)
    assert not any(line.startswith("[the store") for line in output)


def test_a_turn_for_which_there_is_no_room_fails_alone(say: Say, tmp_path: Path) -> None:
    options = ("--pool", "48KiB", "--max-store", "20KB")
    output = say(tmp_path, "This is much too long for these.", "One.", "/stats", options=options)
    assert sum("no room for" in line for line in output) == 2
    assert "conversation: 0 turns, 0 tokens" in output
    wide = say(tmp_path, "One.", options=("--max-store", "1MB"))
    assert len(counts(wide)) == 1


def test_the_model_s_context_is_the_end_of_a_conversation(
    chat: Any, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = chat.tiny_model()
    model.config.max_position_embeddings = 40
    monkeypatch.setattr(chat, "tiny_model", lambda: (model, tokenizer))
    output = say(tmp_path, "One.", "Two.", "/stats", "/new", "One.")
    assert "[63 tokens are more than the model takes, 40: try /new]" in output
    assert "conversation: 1 turns, 40 tokens" in output
    assert len(counts(output)) == 2


def test_what_cannot_be_used_is_refused_with_advice(say: Say, tmp_path: Path) -> None:
    with FileLock(tmp_path / "chat.lock"), pytest.raises(SystemExit, match="another chat uses"):
        say(tmp_path)
    with pytest.raises(SystemExit, match="holds no page"):
        say(tmp_path, options=("--pool", "1KiB"))
    say(tmp_path, "hello")
    path = tmp_path / "conversation.json"
    document = json.loads(path.read_text())
    for damaged in ('{"tokens": [1, 2', "[]", json.dumps({**document, "tokens": [0, 96]})):
        path.write_text(damaged)
        with pytest.raises(SystemExit, match=r"conversation\.json is damaged .*--new"):
            say(tmp_path)
    path.write_text(json.dumps({**document, "model": "sha256:other"}))
    with pytest.raises(SystemExit, match="of another model: give another --store"):
        say(tmp_path)
    assert counts(say(tmp_path, "hello", options=("--new",)))


def test_the_store_of_another_model_is_refused(say: Say, tmp_path: Path) -> None:
    spec = pk.KVSpec(
        num_layers=4, num_kv_heads=2, head_dim=16, page_tokens=16, dtype="float32", model="other"
    )
    pk.PageStore.open(tmp_path / "cache.zarr", spec).close()
    with pytest.raises(SystemExit, match="model is 'other'.*\n.*its own --store"):
        say(tmp_path)


@pytest.mark.model
def test_turns_are_what_smollm2_s_template_makes_of_the_whole(
    chat: Any, smollm2_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    questions = ["What is PagedKV?\nBe brief. ", " Olá, e 你好?", "<<answer>> and\t\ttabs"]
    answers = ["A cache.", "Yes, <<answer>>.", ""]
    conversation = chat.Conversation([], [])
    for question, answer in zip(questions, answers, strict=True):
        prompt = conversation.tokens + chat.turn_tokens(tokenizer, conversation, question)
        messages = [*conversation.messages, chat.as_message("user", question)]
        assert prompt == whole(tokenizer, messages, return_dict=False)
        said = tokenizer(answer, add_special_tokens=False).input_ids
        messages.append(chat.as_message("assistant", answer))
        conversation = chat.Conversation(prompt + said, messages)


@pytest.mark.model
def test_an_answer_in_other_tokens_than_the_tokenizer_s_stays_as_it_was_chosen(
    chat: Any, smollm2_folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    question, answer = chat.as_message("user", "What?"), chat.as_message("assistant", "cache")
    letters = [token for letter in "cache" for token in tokenizer(letter).input_ids]
    tokens = whole(tokenizer, [question], return_dict=False) + letters
    conversation = chat.Conversation(tokens, [question, answer])
    prompt = tokens + chat.turn_tokens(tokenizer, conversation, "Go on.")
    messages = [question, answer, chat.as_message("user", "Go on.")]
    assert prompt != whole(tokenizer, messages, return_dict=False)
    assert tokenizer.decode(prompt) == whole(tokenizer, messages, tokenize=False)


def whole(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> Any:
    """What the template makes of the messages, up to the next answer."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
