"""Work in a process of its own: one question, messages while it works, one answer; all JSON."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pagedkv as pk

Tell = Callable[[Any], None]
"""Takes a message: anything that JSON can say."""


def ask(module: str, question: object, what: str, on_message: Tell) -> Any:
    """What ``python -m module``, which calls ``answer``, makes of the question.

    However this ends, the process has ended before.

    Args:
        module: Full name of the module.
        question: What it is told.
        what: What the process does, for the message if it fails.
        on_message: Is told what the process tells.

    Raises:
        PagedKVError: The process failed; the message is its own, or the last line that it wrote.
    """
    command = [sys.executable, "-P", "-m", module]
    answers: list[Any] = []
    failures: list[str] = []
    take = {"message": on_message, "answer": answers.append, "failure": failures.append}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended, and says why
                process.stdin.write(json.dumps(question))
                process.stdin.close()
            for line in process.stdout:
                kind, value = json.loads(line)
                take[kind](value)
        except BaseException:
            process.kill()
            process.wait()  # whatever it had open may be removed now
            raise
        status = process.wait()
        errors.seek(0)
        failures += errors.read().strip().splitlines()[-1:]
    if status or not answers:
        reason = failures[0] if failures else f"exit status {status}"
        raise pk.PagedKVError(f"the process that {what} failed: {reason}")
    return answers[0]


def answer(work: Callable[[Any, Tell], Any]) -> None:
    """In the new process: what ``work`` returns for the question is the answer.

    Args:
        work: Is given the question, and what tells the asking process a message.
    """
    question = json.load(sys.stdin)
    try:
        result = work(question, lambda message: _write("message", message))
    except (pk.PagedKVError, ValueError, OSError) as error:
        _write("failure", str(error))
        sys.exit(1)
    _write("answer", result)


def _write(kind: str, value: object) -> None:
    sys.stdout.write(json.dumps([kind, value]) + "\n")
    sys.stdout.flush()
