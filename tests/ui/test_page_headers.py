"""What the guard tells the browser, and what of Gradio it leaves out."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from medusa_chat.ui.access.guard import Guard

CLIENT = TestClient(Guard(PlainTextResponse("page")), base_url="http://127.0.0.1:7860")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        *(("content-security-policy", f"{kind} 'self'") for kind in ("form-action", "base-uri")),
        *(("content-security-policy", f"{kind} 'none'") for kind in ("object-src", "frame-src")),
        ("content-security-policy", "connect-src 'self'"),
        ("cross-origin-opener-policy", "same-origin"),
        ("permissions-policy", "camera=(), microphone=(), geolocation=()"),
    ],
)
def test_every_answer_forbids_what_the_page_does_not_need(name, part):
    assert part in CLIENT.get("/").headers[name]


def test_the_page_fetches_nothing_for_others():
    assert CLIENT.get("/").text == "page"
    assert CLIENT.get("/gradio_api/proxy=https://x.hf.space/a").status_code == 404
