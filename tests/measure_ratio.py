"""How far the page's "vs plain" and Compare's speedup are apart, prompt by prompt. Run by hand:

    python tests/measure_ratio.py [ANSWERS] [NODES]

It answers prompts with the demo as the page does, reads the ratio that the page shows, and
compares the same prompt with the same settings directly after. NODES: of every step; without it
the tree is automatic.
"""

import sys
from contextlib import closing
from statistics import median

from support.races import race

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.compare import Comparison
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import WorkerProcess
from medusa_chat.runtime.session import Session

PROMPTS = (
    *("Tell me a story about a cat", "Tell me a story about the sea", "Tell me a story"),
    *("Tell me a story about a robot", "Tell me a story about a dragon"),
    *("Tell me a story about a fox", "Tell me a story about a lamp"),
)


def measure(session: Session, answers: int, nodes: int | None) -> None:
    session.submit(LoadRequest()).done.wait()
    apart: list[float] = []
    for turn in range(answers):
        conversation = [{"role": "user", "content": PROMPTS[turn % len(PROMPTS)]}]
        settings = GenerationSettings(temperature=0.7, seed=turn, nodes=nodes)
        ticket = session.submit(Reply(conversation, settings))
        ticket.done.wait()
        stats = ticket.trace[-1].stats
        *_, found = race(session, conversation, settings, plain_first=turn % 2 == 0)
        assert isinstance(found, Comparison)
        if not stats.plain_step_seconds or not found.speedup:
            print(f"{turn + 1:3}  no figure")
            continue
        ratio = stats.tokens_per_second * stats.plain_step_seconds
        apart.append(ratio / found.speedup - 1)
        print(f"{turn + 1:3}  page {ratio:.2f}  compare {found.speedup:.2f}  {apart[-1]:+.1%}")
    size, bias = median(abs(value) for value in apart), median(apart)
    print(f"{len(apart)} answers: apart by {size:.1%} in the median, {bias:+.1%} with sign")


if __name__ == "__main__":
    asked = [int(value) for value in sys.argv[1:]]
    with closing(Session(WorkerProcess())) as session:
        measure(session, asked[0] if asked else 30, asked[1] if asked[1:] else None)
