"""The README's pictures, taken by hand of a real run.

    python tests/shoot_page.py [--smollm2 FILE.gguf]

The demo checkpoint in Chromium without a window. Writes assets/screenshot.png and
assets/screenshot.webp; the animation's frames stand as long as they stood in the browser. With
--smollm2 the real model instead, after an answer: assets/screenshot-smollm2.png.
"""

import argparse
import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from support.page import CHROMIUM, SLOW, ask, wait_end

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.runner import WorkerProcess
from medusa_chat.runtime.session import Session
from medusa_chat.ui.app import PageOptions, open_page

ASSETS = Path(__file__).parents[1] / "assets"
READY = '.status-line[data-status="ready"]'
WINDOW = {"width": 1280, "height": 800}
SHOWN = 960  # pixels across the animation
LAST = 2500  # milliseconds that its last frame stands
QUESTION = "Give me three tips to sleep better."


def record(tab: Any, act: Any) -> list[tuple[float, Image.Image]]:
    """(seconds, frame) of everything that changed on the page while `act` ran."""
    frames: list[tuple[float, Image.Image]] = []
    client = tab.context.new_cdp_session(tab)

    def keep(event: dict) -> None:
        image = Image.open(io.BytesIO(base64.b64decode(event["data"]))).convert("RGB")
        frames.append((event["metadata"]["timestamp"], image))
        client.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    client.on("Page.screencastFrame", keep)
    client.send("Page.startScreencast", {"format": "png", "everyNthFrame": 1})
    act()
    tab.wait_for_timeout(500)
    client.send("Page.stopScreencast")
    return frames


def save(frames: list[tuple[float, Image.Image]], path: Path) -> None:
    """An endless WebP in which every frame stands as long as it stood."""
    times = [time for time, _ in frames]
    gaps = [
        max(round(1000 * (after - time)), 1) for time, after in zip(times, times[1:], strict=False)
    ]
    height = round(SHOWN * frames[0][1].height / frames[0][1].width)
    images = [image.resize((SHOWN, height), Image.Resampling.LANCZOS) for _, image in frames]
    images[0].save(
        path,
        save_all=True,
        append_images=images[1:],
        duration=[*gaps, LAST],
        loop=0,
        quality=70,
        method=4,
    )
    print(f"{path.name}: {len(images)} frames, {sum(gaps) / 1000:.1f} s, {path.stat().st_size:,} B")


@contextmanager
def opened(request: LoadRequest) -> Iterator[Any]:
    """A tab with the page of the loaded model."""
    from playwright.sync_api import sync_playwright

    session = Session(WorkerProcess())
    session.submit(request)
    page = open_page(session, PageOptions())
    with sync_playwright() as play:
        chrome = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = chrome.new_page(viewport=WINDOW, color_scheme="light")
        tab.set_default_timeout(SLOW)
        tab.goto(page.url)
        tab.wait_for_selector(READY)
        print(json.dumps({"url": page.url}))
        yield tab
        chrome.close()
    page.close()
    session.close()


def shoot_demo(output: Path) -> None:
    """The first click, as an animation and as a picture of its end."""
    with opened(LoadRequest()) as tab:

        def first_click() -> None:
            users = "() => document.querySelector('#history .user-row')"
            tab.locator("#examples button").first.click()
            tab.wait_for_function(users)
            wait_end(tab)

        save(record(tab, first_click), output / "screenshot.webp")
        tab.screenshot(path=output / "screenshot.png")


def shoot_real(output: Path, file: str) -> None:
    """An answer of SmolLM2 at full speed, with its most telling step."""
    with opened(LoadRequest("smollm2", file)) as tab:
        ask(tab, QUESTION)
        tab.wait_for_selector("svg.tree")
        latest = tab.inner_text("#tree .counter")
        tab.click(".answer-strip")
        tab.wait_for_function(
            "was => document.querySelector('#tree .counter').textContent !== was", arg=latest
        )
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(500)
        tab.screenshot(path=output / "screenshot-smollm2.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ASSETS)
    parser.add_argument("--smollm2", metavar="FILE.gguf")
    wish = parser.parse_args()
    if wish.smollm2:
        shoot_real(wish.output, wish.smollm2)
    else:
        shoot_demo(wish.output)


if __name__ == "__main__":
    main()
