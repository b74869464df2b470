"""The text of a PDF file, read in a child process (`main` here) with limits of time and memory.

A PDF is a program of sorts: a small file may take pypdf minutes, or unpack to gigabytes. The child
reads the file on its stdin and answers with one JSON object: {"text", "pages"}, or {"refusal"}.
"""

import io
import json
import signal
import subprocess
import sys
import threading
from typing import NamedTuple

from medusa_chat.checkpoints.process_limits import environment, limit_memory
from medusa_chat.errors import UsageError
from medusa_chat.messages import without_broken_characters
from medusa_chat.units import gb

MAX_FILE = 32 << 20  # bytes
MAX_PAGES = 2000
MAX_TEXT = 1_000_000  # characters: the most of a message
SECONDS = 20.0  # of processor time, where the system measures it
PATIENCE = 120.0  # of wall-clock time: the machine may be busy
MEMORY = 512 << 20  # bytes beyond those of Python and pypdf
COMMAND = (sys.executable, "-P", "-m", __name__)
ONE = threading.Semaphore(1)  # file at a time
TURN = 2.0  # seconds that a file waits for the one before it
SCANNED = "it has no text: its pages are pictures (a scan)"
ENCRYPTED = "it is encrypted: save it without a password first"
BROKEN = "it is no PDF, or a broken one"
BUSY = "another PDF is being read: try again in a moment"
SLOW = f"it takes more than {SECONDS:.0f} seconds to read"
LARGE = f"it needs more than {gb(MEMORY)} of memory"


class PdfText(NamedTuple):
    """The text of all pages, with an empty line between two, and how many there are."""

    text: str
    pages: int


def pdf_text(data: bytes) -> PdfText:
    """The text of a PDF file. Raises UsageError, in one line that follows the file's name."""
    if len(data) > MAX_FILE:
        raise UsageError(f"it is larger than {gb(MAX_FILE)}")
    if b"%PDF-" not in data[:1024]:
        raise UsageError(BROKEN)
    if not ONE.acquire(timeout=TURN):  # it may hold up a thread that others need
        raise UsageError(BUSY)
    try:
        done = _answer(data)
    finally:
        ONE.release()
    if done.returncode:
        raise UsageError(_why_ended(done.returncode))
    found = json.loads(done.stdout)
    if "refusal" in found:
        raise UsageError(found["refusal"])
    return PdfText(without_broken_characters(found["text"]), found["pages"])


def _answer(data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            COMMAND,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            timeout=PATIENCE,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"it takes more than {PATIENCE:.0f} seconds to read") from None
    except OSError as error:
        raise UsageError(f"it cannot be read: {error}") from None


def _why_ended(code: int) -> str:
    is_late = hasattr(signal, "SIGPROF") and code == -signal.SIGPROF
    return SLOW if is_late else BROKEN


def main() -> None:
    """Answer with the text of the file on stdin."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    import pypdf  # before the memory limit counts

    data = sys.stdin.buffer.read(MAX_FILE + 1)
    limit_memory(MEMORY)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        found = read(data)
    except MemoryError:
        found = {"refusal": LARGE}
    except pypdf.errors.FileNotDecryptedError:
        found = {"refusal": ENCRYPTED}
    except Exception:  # pypdf raises many kinds on a broken file
        found = {"refusal": BROKEN}
    answers.write(json.dumps(found).encode())
    answers.flush()


def read(data: bytes) -> dict[str, object]:
    """The answer for a file. Raises whatever pypdf raises."""
    from pypdf import PdfReader

    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return {"refusal": ENCRYPTED}
    pages = len(reader.pages)
    if pages > MAX_PAGES:
        return {"refusal": f"it has {pages:,} pages: at most {MAX_PAGES:,} are read"}
    texts, length = list[str](), 0
    for page in reader.pages:
        texts.append(page.extract_text().strip())
        length += len(texts[-1]) + 2
        if length > MAX_TEXT:
            return {"refusal": f"it has more than {MAX_TEXT:,} characters, the most of a message"}
    text = "\n\n".join(filter(None, texts))
    return {"text": text, "pages": pages} if text.strip() else {"refusal": SCANNED}


if __name__ == "__main__":
    main()
