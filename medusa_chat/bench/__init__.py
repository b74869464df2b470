"""bench: what Medusa brings on this machine, as ratios from one run, and what was not measured."""

from medusa_chat.bench.course import PROMPTS
from medusa_chat.bench.drawing import drawing
from medusa_chat.bench.page import page
from medusa_chat.bench.report import Report, model_answers
from medusa_chat.bench.rows import table
from medusa_chat.bench.run import FINDINGS, STUDIES, run, run_shape

__all__ = [
    "FINDINGS",
    "PROMPTS",
    "STUDIES",
    "Report",
    "drawing",
    "model_answers",
    "page",
    "run",
    "run_shape",
    "table",
]
