"""TemplateRenderer: conversations rendered by a checkpoint's chat template, under limits.

A template is a program that comes with a checkpoint. It runs in a child process (`main` here) with
limits of time and memory, which never holds the model. Questions come as JSON lines on its stdin,
answers go as JSON lines to its stdout: first {}, when it is ready, then {"text"}, or {"error"} in
the template's own words, or {"refusal"} as the end of a sentence.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from time import monotonic
from typing import Any

from medusa_chat.checkpoints.process_limits import can_limit_memory, environment, limit_memory
from medusa_chat.errors import ConversationRefused, UsageError
from medusa_chat.messages import Message
from medusa_chat.units import gb

MAX_TEMPLATE = 1 << 16  # bytes
SECONDS = 2.0  # of processor time for one conversation, where the system measures it
PATIENCE = 20.0  # of wall-clock time: the machine may be busy, and Windows has no other limit
STARTUP = 120.0  # seconds for the child to begin on a busy machine
COMMAND = (sys.executable, "-P", "-m", __name__)
TIMED_OUT = (-signal.SIGPROF,) if hasattr(signal, "SIGPROF") else ()  # its exit code
SLOW = f"takes more than {SECONDS:.0f} seconds"
UNBOUNDED = "chat templates run without a memory limit: this system does not support one"


@cache
def renderer() -> "TemplateRenderer":
    """The renderer of this process, made at the first call."""
    return TemplateRenderer()


def missing_limits() -> list[str]:
    """A note on the limits that this system does not support."""
    return [] if can_limit_memory() else [UNBOUNDED]


class TemplateRenderer:
    """One child process for the templates of all models, started when first needed. Thread-safe;
    the child ends with this object, or with our process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._has_begun = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Start the child early, so that the first conversation need not wait; returns at once.
        Raises OSError."""
        with self._lock:
            if self._child is None:
                pipe = subprocess.PIPE
                self._child = subprocess.Popen(  # out of reach of the terminal's Ctrl-C
                    COMMAND,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=subprocess.DEVNULL,
                    env=environment(),
                    start_new_session=True,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
                self._has_begun = False
                self._end = weakref.finalize(self, _end, self._child)

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        add_prompt: bool = True,
        continues: bool = False,
        options: Mapping[str, Any] = {},  # noqa: B006  never written
    ) -> str:
        """The text of a conversation by the tokenizer's template. add_prompt: add the generation
        prompt. continues: the answer continues the last message, so no prompt is added. options:
        other variables of the template, such as enable_thinking. Raises ConversationRefused where
        the template refuses the conversation, and UsageError for a template beyond the limits."""
        template = tokenizer.get_chat_template()
        if len(template.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE:
            raise _refusal(f"has more than {gb(MAX_TEMPLATE)}")
        if not messages:
            raise UsageError("the conversation is empty: type something")
        told = {**options, **tokenizer.special_tokens_map} | {
            "chat_template": template,
            "add_generation_prompt": add_prompt and not continues,
            "continue_final_message": continues,
        }
        found = self._ask({"messages": list(messages), "options": told})
        if "error" in found:
            raise ConversationRefused(
                f"the chat template refuses this conversation: {found['error']}"
            )
        if "text" not in found:
            raise _refusal(found["refusal"])
        return found["text"]

    def _ask(self, question: dict[str, Any]) -> dict[str, str]:
        line = json.dumps(question, default=str).encode() + b"\n"
        try:
            with self._lock:
                self.start()
                if not self._has_begun:
                    self._exchange(b"", STARTUP)
                    self._has_begun = True
                return self._exchange(line, PATIENCE)
        except OSError as error:
            raise UsageError(f"the chat template cannot be rendered: {error}") from error

    def _exchange(self, question: bytes, seconds: float) -> dict[str, str]:
        """Send the child one line and read one. Ends a child that takes too long and raises
        UsageError."""
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise OSError("its process did not start")
        clock = threading.Timer(seconds, child.kill)
        clock.daemon, begun = True, monotonic()
        clock.start()
        try:
            child.stdin.write(question)
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:  # it is gone: a broken pipe, on Windows an invalid argument
            line = b""
        is_late = monotonic() - begun >= seconds  # the timer has killed it
        clock.cancel()
        if line.endswith(b"\n"):
            found: dict[str, str] = json.loads(line)
            return found
        code = None if is_late else child.wait()
        self._child = None
        self._end()
        if is_late:
            raise UsageError(
                f"the chat template of this checkpoint takes more than {seconds:.0f} seconds: try "
                "again when the machine is less busy, or use another checkpoint"
            )
        return {"refusal": SLOW if code in TIMED_OUT else "ends the process it runs in"}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(OSError):  # unsent data
                pipe.close()


def _refusal(why: str) -> UsageError:
    return UsageError(
        f"the chat template of this checkpoint {why}: it is broken or malicious, "
        "use another checkpoint"
    )


HAS_CLOCK = hasattr(signal, "setitimer")
MEMORY = 256 << 20  # bytes beyond those of Python and its packages
MAX_TEXT = 16 << 20  # characters
PROBE = "70416093"  # digits: a template may change the case of letters


def main() -> None:
    """Answer every question; a template that takes too long ends the process."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    _jinja()  # imported before the memory limit counts
    limit_memory(MEMORY)
    _send(answers, {})
    for line in sys.stdin.buffer:
        _set_clock(SECONDS)
        answer = answer_to(line)
        _set_clock(0)
        _send(answers, answer)


def answer_to(line: bytes) -> dict[str, str]:
    """The conversation as `tokenizer.apply_chat_template` gives it, or why there is none."""
    try:
        asked = json.loads(line)
        text = _rendered(asked["messages"], asked["options"])
    except MemoryError:
        return {"refusal": f"needs more than {gb(MEMORY)} of memory"}
    except Exception as error:  # a template may raise anything, and refuse in its own words
        return {"error": f"{error or type(error).__name__}"[:300]}
    if len(text) > MAX_TEXT:
        return {"refusal": f"makes {len(text)} characters of it: {MAX_TEXT} are allowed"}
    return {"text": text}


def _rendered(messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The text of a conversation. Templates of vision-language models may accept lists of parts
    only, and drop a plain string or fail: those get each message as a list of one part."""
    if not _writes(PROBE, options) and _writes(_parts(PROBE), options):
        messages = [m | {"content": _parts(m["content"])} for m in messages]
    (text,), _ = _jinja()([messages], **options)
    return str(text)


def _writes(content: object, options: dict[str, Any]) -> bool:
    """Whether the template writes a user message with content in this form."""
    said = [{"role": "user", "content": content}]
    with suppress(Exception):
        (text,), _ = _jinja()([said], **options | {"continue_final_message": False})
        return PROBE in text and "{'type': 'text'" not in text
    return False


def _jinja() -> Callable[..., Any]:
    """transformers' own renderer, imported by the child process alone."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _set_clock(seconds: float) -> None:
    """End the process after this many seconds of processor time; 0 cancels it. A system timer,
    since a template may be inside one long call. Windows has none."""
    if HAS_CLOCK:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
