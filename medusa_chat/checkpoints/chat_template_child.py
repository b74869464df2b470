"""The child process that renders chat templates, which are programs of a checkpoint's author.

It is started by chat_template.py and by nothing else. Questions come as JSON lines on stdin,
answers go as JSON lines to stdout: first {}, when it has begun, then {"text"}, or {"error"} in the
template's own words, or {"refusal"} as the end of a sentence. Imports no torch.
"""

import json
import signal
import sys
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from medusa_chat.checkpoints.process_limits import limit_memory
from medusa_chat.units import gb

SECONDS = 2.0  # of the processor, for one conversation
HAS_CLOCK = hasattr(signal, "setitimer")
MEMORY = 256 << 20  # bytes beyond what Python and its packages take
MAX_TEXT = 16 << 20  # characters
PROBE = "70416093"  # digits, for a template may change the case of what is said


def main() -> None:
    """Answer every question; a template that takes too long ends the process."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
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
    """The text of a conversation. Templates of vision-language models may read lists of parts
    alone, and lose a message that is a text, or fail at it: they get it as a list of one part."""
    if not _tells(PROBE, options) and _tells(_parts(PROBE), options):
        messages = [m | {"content": _parts(m["content"])} for m in messages]
    (text,), _ = render_jinja_template([messages], **options)
    return str(text)


def _tells(content: object, options: dict[str, Any]) -> bool:
    """Whether the template writes what a user says in this form."""
    said = [{"role": "user", "content": content}]
    with suppress(Exception):
        (text,), _ = render_jinja_template([said], **options | {"continue_final_message": False})
        return PROBE in text and "{'type': 'text'" not in text
    return False


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _set_clock(seconds: float) -> None:
    """End the process after so many seconds of the processor; 0 takes that back. The system's own
    clock, for a template may be inside one long call. Windows has none."""
    if HAS_CLOCK:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
