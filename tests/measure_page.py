"""What the page costs, measured by hand on a quiet machine: python tests/measure_page.py [--json]

Chromium without a window, the demo checkpoint in its worker process, both on this machine. Rates
are wall clock: tokens of all steps over the time from the first event to the last one, as they
reach the page's process. It is no test: what it prints depends on the machine.
"""

import argparse
import json
import multiprocessing
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from support.scripted import ScriptedRunner

from medusa_chat.decoding.events import Event, Prefilled, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest, Request, V
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.runner import Runner, WorkerProcess
from medusa_chat.runtime.session import Session

PROMPT = "Count from 1 to 200: 1, 2, 3, 4,"
SEED = 7
NODES = 16  # in every step: an auto tree would shrink to plain decoding, with nothing to draw
MINUTE = 60_000  # milliseconds
EARLIER = (6, 80)  # messages before the answer; they come in pairs
GOALS = {
    "pictures per second": (20, "at least"),
    "lag of the last picture": (200, "under"),
    "page / headless, a client elsewhere": (0.95, "at least"),
    "page / headless, Chromium on these cores": (0.80, "at least"),
}

# [time (epoch, ms), step that is drawn] of every frame that shows another step.
WATCH = """() => {
  window.seen = [];
  const tree = document.querySelector("#tree svg.tree");
  let last = null;
  let dirty = false;
  const note = () => {
    dirty = false;
    const step = Number(tree.dataset.step);
    if (step !== last) window.seen.push([performance.timeOrigin + performance.now(), step]);
    last = step;
  };
  window.watching?.disconnect();
  window.watching = new MutationObserver(() => {
    if (!dirty) requestAnimationFrame(note);
    dirty = true;
  });
  window.watching.observe(tree, {attributes: true, attributeFilter: ["data-step"]});
}"""


class Stamped(list):
    """A trace that remembers when each event came (epoch, seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, event: object) -> None:
        self.times.append(time.time())
        super().append(event)


class Timed(Session):
    """A session whose jobs have stamped traces, and that remembers them."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.jobs: list[Ticket[Event]] = []
        self.seen: list[Ticket[Event]] = []  # those whose rate was taken

    def submit(self, request: Request[V], guest: str = "") -> Ticket[V]:
        with self._queue.changed:  # before the session's thread takes it
            ticket = super().submit(request, guest)
            if isinstance(request, Reply):
                ticket.trace = Stamped()
                self.jobs.append(ticket)
        return ticket


@dataclass(frozen=True)
class Answered:
    """One answer through the page. bytes and updates: of the event stream, as Chromium got them.

    update_ms: of the main thread, per picture between the first step and the last one: what is
    drawn once, when a message is sent and when its answer is put into the conversation, is apart.
    """

    job: Ticket[Event]
    frames: list[tuple[float, int]]  # of the picture: epoch in ms, the step it shows
    bytes: int
    updates: int
    update_ms: float
    posts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def pictures(self) -> float:
        """Frames a second that showed another step, while steps came."""
        first, last = _steps_from_to(self.job)
        drawn = sum(first * 1e3 <= at <= last * 1e3 for at, _ in self.frames)
        return drawn / max(1e-9, last - first)

    @property
    def lag_ms(self) -> float:
        """From the last step in the page's process to the first frame that shows it."""
        last = steps_of(self.job) - 1
        return (
            min(at for at, step in self.frames if step == last) - _steps_from_to(self.job)[1] * 1e3
        )


def main() -> None:
    """Measure everything and print it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=400)
    options.add_argument(
        "--temperature", type=float, default=2.0, help="high: long answers, little accepted"
    )
    asked = options.parse_args()
    rows = list(measure(asked.rounds, asked.tokens, asked.temperature))
    machine = f"{platform.processor() or platform.machine()}, {multiprocessing.cpu_count()} cores"
    if asked.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return
    print(f"{machine}\n{'':44}{'median':>10}{'min':>10}{'max':>10}  unit")
    for row in rows:
        goal = f"  (goal: {row['goal']})" if row["goal"] else ""
        figures = "".join(f"{row[key]:>10.3g}" for key in ("value", "min", "max"))
        print(f"{row['name']:44}{figures}  {row['unit']}{goal}")


def measure(rounds: int, tokens: int, temperature: float) -> Iterator[dict[str, Any]]:
    """The rows of the table; a warm-up round is not in them."""
    from playwright.sync_api import sync_playwright

    settings = GenerationSettings(
        max_new_tokens=tokens, temperature=temperature, seed=SEED, nodes=NODES
    )
    with serving(WorkerProcess()) as (session, url), sync_playwright() as play:
        tell("warm-up")
        with chromium(play) as open_tab:
            recorded = ask(session, prepared(open_tab(url), settings), PROMPT)
        paints, answers, rates = [], [], {name: [] for name in ("headless", "client", "idle")}
        sizes = []
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            rates["headless"].append(wall_rate(headless(session, settings)))
            sizes.append(replay(url, recorded.posts))
            rates["client"].append(wall_rate(newest(session)))
            with chromium(play) as open_tab:
                tab = open_tab(url)
                paints.append(paint(tab))
                replay(url, recorded.posts)
                rates["idle"].append(wall_rate(newest(session)))
                answers.append(ask(session, prepared(tab, settings), PROMPT))
        yield row("first paint", "ms", [p["first-contentful-paint"] for p in paints])
        yield row("pictures per second", "1/s", [a.pictures for a in answers])
        yield row("lag of the last picture", "ms", [a.lag_ms for a in answers])
        yield row("bytes per update", "B", [a.bytes / max(1, a.updates) for a in answers])
        yield row("bytes per step", "B", [a.bytes / steps_of(a.job) for a in answers])
        yield row("bytes per step, plain client", "B", [s / steps_of(recorded.job) for s in sizes])
        page = [wall_rate(answer.job) for answer in answers]
        yield row("tokens/s, no client", "1/s", rates["headless"])
        yield row("tokens/s, plain client", "1/s", rates["client"])
        yield row("tokens/s, plain client and idle Chromium", "1/s", rates["idle"])
        yield row("tokens/s, Chromium", "1/s", page)
        ratios = {
            "page / headless, a client elsewhere": rates["client"],
            "page / headless, and an idle Chromium": rates["idle"],
            "page / headless, Chromium on these cores": page,
        }
        for name, those in ratios.items():
            pairs = zip(those, rates["headless"], strict=True)
            yield row(name, "", [mine / alone for mine, alone in pairs])
    with sync_playwright() as play:
        for count in EARLIER:
            tell(f"with {count} earlier messages")
            runner = ScriptedRunner(delay=0.02, prefill=0.0, nodes=NODES)
            with serving(runner) as (session, url), chromium(play) as open_tab:
                costs = list(costs_after(count, session, runner, open_tab(url), rounds))
            yield row(f"browser, {count} earlier messages", "ms per picture", costs)


def costs_after(
    count: int, session: Timed, runner: ScriptedRunner, tab: Any, rounds: int
) -> Iterator[float]:
    """Main-thread milliseconds per picture of an answer behind `count` messages, with nothing
    else to do on the machine: its steps are made up, 50 a second."""
    runner.steps = 20
    for _ in range(count // 2):
        ask(session, tab, "hi", watched=False)
    runner.steps = 200
    for _ in range(rounds):
        yield ask(session, tab, "hi").update_ms


# ---- the server and the browser ----


@contextmanager
def serving(runner: Runner) -> Iterator[tuple[Timed, str]]:
    """A page over the demo checkpoint, or what stands for it, once it is loaded."""
    from medusa_chat.ui.app import open_page

    session = Timed(runner)
    session.submit(LoadRequest("demo", device="cpu"))
    while session.state.status != "ready":
        if session.state.status == "failed":
            sys.exit(session.state.message)
        time.sleep(0.05)
    page = open_page(session)
    yield session, page.url
    page.close()
    session.close()


@contextmanager
def chromium(play: Any) -> Iterator[Callable[[str], Any]]:
    """A browser of its own; gives what opens a tab that is ready."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])

    def open_tab(url: str) -> Any:
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(MINUTE)
        tab.goto(url)
        tab.wait_for_selector('.status-line[data-status="ready"]')
        tab.wait_for_selector("#send", state="visible")
        return tab

    yield open_tab
    browser.close()


def prepared(tab: Any, settings: GenerationSettings) -> Any:
    """The tab with these settings in its controls."""
    if not tab.get_by_label("Max new tokens").first.is_visible():
        tab.click("#settings button")
    for label, value in (
        ("Max new tokens", settings.max_new_tokens),
        ("Temperature", settings.temperature),
        ("Seed", settings.seed),
        ("Nodes", settings.nodes),
    ):
        box = tab.get_by_label(label).first
        box.fill(str(value))
        box.blur()
    tab.wait_for_timeout(500)
    return tab


def ask(session: Timed, tab: Any, text: str, watched: bool = True) -> Answered:
    """Send a message and wait until its answer is in the conversation."""
    cdp = tab.context.new_cdp_session(tab)
    cdp.send("Performance.enable")
    cdp.send("Network.enable")
    streams, received, posts = set(), [], []
    cdp.on(
        "Network.requestWillBeSent",
        lambda event: streams.add(event["requestId"]) if _is_stream(event) else None,
    )
    cdp.on(
        "Network.dataReceived",
        lambda event: received.append(event) if event["requestId"] in streams else None,
    )

    def note(request: Any) -> None:
        """The message that was sent; not the clock's events."""
        if "/run/predict" in request.url and text in (request.post_data or ""):
            posts.append({"url": request.url, "body": request.post_data_json})

    tab.on("request", note)
    if watched:
        tab.evaluate(WATCH)
    jobs = len(session.jobs)
    tab.fill("#box textarea", text)
    tab.click("#send")
    while len(session.jobs) == jobs or not session.jobs[-1].trace:
        tab.wait_for_timeout(5)
    before, earlier = task_ms(cdp), frames(tab)
    session.jobs[-1].done.wait()  # without asking the browser: that costs it time
    cost = (task_ms(cdp) - before) / max(1, frames(tab) - earlier)
    tab.wait_for_selector("#stop", state="hidden")
    tab.wait_for_selector("#send", state="visible")
    tab.wait_for_timeout(500 if watched else 0)
    tab.remove_listener("request", note)
    seen = tab.evaluate("window.seen || []")
    cdp.detach()
    job = session.jobs[-1]
    if job.error:
        sys.exit(job.error)
    size = sum(event["dataLength"] for event in received)
    return Answered(job, seen, size, len(received), cost, posts)


def frames(tab: Any) -> int:
    """Frames in which the picture has changed since it is watched."""
    count: int = tab.evaluate("(window.seen || []).length")
    return count


def paint(tab: Any) -> dict[str, float]:
    """Milliseconds from the navigation to the first paints."""
    entries = tab.evaluate(
        "performance.getEntriesByType('paint').map(entry => [entry.name, entry.startTime])"
    )
    return dict(entries)


def task_ms(cdp: Any) -> float:
    """All the main thread has done since the page was opened."""
    metrics = {m["name"]: m["value"] for m in cdp.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"] * 1e3


def _is_stream(event: dict[str, Any]) -> bool:
    return event["request"]["url"].endswith("/live")


# ---- answers without a browser ----


def headless(session: Timed, settings: GenerationSettings) -> Ticket[Event]:
    """The same answer with nobody looking."""
    job = session.submit(Reply([{"role": "user", "content": PROMPT}], settings))
    job.done.wait()
    session.seen.append(job)
    return job


def replay(url: str, posts: list[dict[str, Any]]) -> int:
    """The recorded message from a process of its own, its stream read to the end; bytes."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    client = context.Process(target=consume, args=(url, posts, queue))
    client.start()
    size = queue.get()
    client.join()
    return size


def newest(session: Timed) -> Ticket[Event]:
    """The job that a client just brought."""
    job = session.jobs[-1]
    job.done.wait()
    assert job not in session.seen, "the client's message began no answer"
    session.seen.append(job)
    return job


def consume(url: str, posts: list[dict[str, Any]], queue: Any) -> None:
    """What the browser sent, sent again in a session of its own."""
    import httpx

    name, size = f"measure{time.time_ns():x}", 0
    with httpx.Client(base_url=url, timeout=None) as http:
        for post in posts:
            body = post["body"] | {"session_hash": name}
            answer = http.post(post["url"], json=body).raise_for_status()
            key = re.search(r'"key\\*":\\*"([\w-]+)', answer.text)
            assert key is not None, "the answer to the message names no stream"
            with http.stream("GET", "/live", headers={"x-medusa-tab": key[1]}) as stream:
                for chunk in stream.raise_for_status().iter_raw():
                    size += len(chunk)
    queue.put(size)


# ---- figures ----


def wall_rate(job: Ticket[Event]) -> float:
    """Tokens per second from the first event to the last, as they reached this process."""
    tokens = sum(len(event.token_ids) for event in job.trace if isinstance(event, Step))
    return tokens / (job.trace.times[-1] - job.trace.times[0])


def steps_of(job: Ticket[Event]) -> int:
    """How many steps the answer took; at least 1."""
    return max(1, sum(isinstance(event, Step) for event in job.trace))


def _steps_from_to(job: Ticket[Event]) -> tuple[float, float]:
    """When the prompt was read, and when the last step came (epoch, seconds)."""
    assert isinstance(job.trace[0], Prefilled)
    return job.trace.times[0], job.trace.times[-2]


def row(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    """One line of the table."""
    goal = GOALS.get(name)
    return {
        "name": name,
        "unit": unit,
        "value": median(values),
        "min": min(values),
        "max": max(values),
        "goal": f"{goal[1]} {goal[0]}" if goal else "",
    }


def tell(line: str) -> None:
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
