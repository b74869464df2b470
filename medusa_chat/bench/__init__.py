"""bench: what Medusa brings on this machine, as ratios from one run, and what was not measured."""

from medusa_chat.bench.drawing import drawing
from medusa_chat.bench.race import PROMPTS
from medusa_chat.bench.rows import table
from medusa_chat.bench.run import FINDINGS, STUDIES, run, run_shape

__all__ = ["FINDINGS", "PROMPTS", "STUDIES", "drawing", "run", "run_shape", "table"]
