"""Whether the page's process stays as it is under use: python tests/soak_page.py --minutes 10

Clients open tabs, hold their connections, send messages, read the streams and close the tabs again,
round after round; between rounds, when nobody is there, memory, files and threads are counted. The
model is a script, so that all that grows is the page's. --bounds of the program are lowered unless
they are asked for as they are: what is kept up to a bound would grow until it is reached.
"""

import argparse
import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import httpx
import psutil
from support.http_tab import HttpTab
from support.scripted import ScriptedRunner

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session

ANSWERS = 3  # of a tab
TABS = 3  # of a client in a round
ROUNDS = 6  # at least
SLACK = 4.0  # MB that Python's memory may grow by itself
EACH = 20.0  # KB a tab that was closed may leave: fragments, of some 400 that an open one takes


class Sample(NamedTuple):
    """The page's process when nobody is there. tabs: opened and closed since the beginning."""

    seconds: float
    tabs: int
    megabytes: float
    files: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.seconds:6.0f} s  {self.tabs:6,} tabs  {self.tabs * ANSWERS:7,} answers  "
            f"{self.megabytes:7.1f} MB  {self.files:3} files  {self.threads:3} threads"
        )


def main() -> int:
    """Print a line for each round, and what is not flat."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--bounds", choices=("low", "real"), default="low")
    asked = options.parse_args()
    samples = []
    for sample in soak(asked.minutes, asked.clients, asked.bounds == "low"):
        samples.append(sample)
        print(sample, flush=True)
    problems = rising(samples)
    print("\n".join(problems) or "flat")
    return 1 if problems else 0


def soak(minutes: float, clients: int, has_low_bounds: bool = True) -> Iterator[Sample]:
    """A sample after each of ROUNDS rounds, or of more. Raises what a client meets."""
    began, tabs = time.monotonic(), 0
    with served(has_low_bounds) as (pipe, url), ThreadPoolExecutor(clients) as pool:
        while tabs < ROUNDS * clients * TABS or time.monotonic() < began + minutes * 60:
            for done in [pool.submit(visit, url) for _ in range(clients)]:
                tabs += done.result()
            pipe.send("count")
            yield Sample(time.monotonic() - began, tabs, *pipe.recv())


def rising(samples: list[Sample]) -> list[str]:
    """What the second half has more of than the end of the first, in words."""
    half = len(samples) // 2
    before, after = samples[half // 2 : half], samples[-max(1, half // 2) :]
    tabs = after[-1].tabs - before[-1].tabs
    grown = median(one.megabytes for one in after) - median(one.megabytes for one in before)
    found = []
    if grown > SLACK + tabs * EACH / 1000:
        found.append(f"memory grew by {grown:.1f} MB in {tabs} tabs that were closed")
    for name in ("files", "threads"):
        counts = [[getattr(one, name) for one in part] for part in (before, after)]
        if min(counts[1]) > max(counts[0]) + 3:
            found.append(f"{name} grew from {counts[0]} to {counts[1]}")
    return found


def visit(url: str) -> int:
    """What a browser does in some tabs, one after the other; how many."""
    with httpx.Client(base_url=url, timeout=120) as client:
        config = client.get("/config").json()
        for _ in range(TABS):
            tab = HttpTab(client, config=config)
            with tab.connected():
                tab.open()
                tab.start_anew()
                for _ in range(ANSWERS):
                    tab.ask("hello " * 20)
                    tab.tick().raise_for_status()
    return TABS


@contextmanager
def served(has_low_bounds: bool) -> Iterator[tuple[Connection, str]]:
    """The page in a process of its own: what counts there, and its address."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, has_low_bounds), daemon=True)
    process.start()
    theirs.close()
    try:
        yield pipe, pipe.recv()
    finally:
        pipe.close()
        process.join(20)
        process.kill()


def serve(pipe: Connection, has_low_bounds: bool) -> None:
    """Serve the page until the other side of the pipe is gone; count when it asks."""
    from medusa_chat.ui import no_stubs

    with no_stubs():
        from medusa_chat.ui.app import open_page
    if has_low_bounds:
        lower_bounds()
    runner = ScriptedRunner(delay=0.001, prefill=0.001, steps=8, nodes=8)
    session = Session(runner)
    session.submit(LoadRequest())
    page = open_page(session)
    try:
        pipe.send(page.url)
        while pipe.recv():
            runner.prompts.clear()  # what it remembers for other tests
            runner.settings.clear()
            pipe.send(counted())
    except EOFError:
        page.close()
        session.close()


def lower_bounds() -> None:
    """What the program keeps up to a bound is at it after a round or two."""
    from medusa_chat.ui.access import once, own_states
    from medusa_chat.ui.chat import session_store

    own_states.CLOSED_SECONDS = 1.0
    once.MAX_TABS = session_store.MAX_SESSIONS = 10
    session_store.MAX_STEPS_KEPT = 200


def counted() -> tuple[float, int, int]:
    """(MB of main memory, open files, threads), when what has ended is gone."""
    time.sleep(1.0)
    gc.collect()
    me = psutil.Process()
    files = me.num_handles() if sys.platform == "win32" else me.num_fds()
    return me.memory_info().rss / 1e6, files, me.num_threads()


if __name__ == "__main__":
    sys.exit(main())
