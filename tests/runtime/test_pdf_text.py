"""The text of PDF files, and of files that are none."""

import signal
import threading
import time

import pytest
from support.waiting import wait_for

from medusa_chat.errors import UsageError
from medusa_chat.runtime import pdf_text as module
from medusa_chat.runtime.pdf_text import BROKEN, ENCRYPTED, LARGE, SCANNED, SLOW, pdf_text


def made(*pages: str, trailer: str = "") -> bytes:
    """A PDF whose pages have these texts. trailer: more of its entries."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        kids.append(len(objects) + 1)
        at = f"/Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects) + 2} 0 R"
        objects.append(f"<< /Type /Page {at} /Resources << /Font << /F1 3 0 R >> >> >>")
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    named = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = f"<< /Type /Pages /Kids [{named}] /Count {len(kids)} >>"
    body, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    rows = "".join(f"{place:010} 00000 n \n" for place in places)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{rows}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(body)}\n"
    return body + table.encode() + end.encode() + b"%%EOF\n"


def test_the_text_of_all_pages_is_read():
    found = pdf_text(made("Rain forms", "when air cools"))
    assert found.text == "Rain forms\n\nwhen air cools" and found.pages == 2


def test_what_has_no_text_is_a_scan():
    with pytest.raises(UsageError, match="has no text"):
        pdf_text(made("", ""))
    assert "scan" in SCANNED


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"%PDF-1.4\n", b"%PDF-1.4\n" + b"\xff" * 5000, made("whole")[:300]],
)
def test_a_broken_file_is_refused_in_one_line(data):
    with pytest.raises(UsageError) as refusal:
        pdf_text(data)
    assert str(refusal.value) in (BROKEN, SCANNED)


def test_an_encrypted_file_is_refused():
    keys = f"/O <{'00' * 32}> /U <{'00' * 32}> /P -4"
    locked = f"/Encrypt << /Filter /Standard /V 1 /R 2 {keys} >> /ID [<00> <00>]"
    with pytest.raises(UsageError, match="is encrypted"):
        pdf_text(made("secret", trailer=locked))
    assert "password" in ENCRYPTED


def test_a_file_that_is_too_large_is_not_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE", 100)
    monkeypatch.setattr(module.subprocess, "run", None)
    with pytest.raises(UsageError, match="larger than"):
        pdf_text(made("hello"))


@pytest.mark.parametrize("name, most, why", [("MAX_PAGES", 1, "2 pages"), ("MAX_TEXT", 5, "char")])
def test_more_pages_or_text_than_a_message_takes_are_refused(monkeypatch, name, most, why):
    monkeypatch.setattr(module, name, most)
    assert why in module.read(made("Rain forms", "when air cools"))["refusal"]


CHILDREN = {
    "import signal, os; os.kill(os.getpid(), signal.SIGPROF)": SLOW,
    "import sys; sys.exit(3)": BROKEN,
    f'print(\'{{"refusal": "{LARGE}"}}\')': LARGE,
}


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="this system has no such limit")
@pytest.mark.parametrize("code", CHILDREN)
def test_a_child_that_ends_says_why(monkeypatch, code):
    monkeypatch.setattr(module, "COMMAND", (module.sys.executable, "-c", code))
    with pytest.raises(UsageError) as refusal:
        pdf_text(b"%PDF-1.4")
    assert str(refusal.value) == CHILDREN[code]


def test_a_child_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    hangs = (module.sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(module, "COMMAND", hangs)
    with pytest.raises(UsageError, match="seconds to read"):
        pdf_text(b"%PDF-1.4")


def test_a_file_beside_another_is_refused_in_a_moment(monkeypatch):
    monkeypatch.setattr(module, "TURN", 0.2, raising=False)
    monkeypatch.setattr(module, "PATIENCE", 5.0)
    slow = (module.sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(module, "COMMAND", slow)

    def read_first():
        with pytest.raises(UsageError, match="seconds to read"):
            pdf_text(b"%PDF-1.4")

    first = threading.Thread(target=read_first)
    first.start()
    wait_for(lambda: module.ONE._value == 0)
    began = time.monotonic()
    with pytest.raises(UsageError, match="another PDF is being read"):
        pdf_text(b"%PDF-1.4")
    assert time.monotonic() - began < 4.0
    first.join()
    monkeypatch.undo()
    assert pdf_text(made("hello")).text == "hello"
