"""bench: what Medusa brings on this machine, as ratios from one run, and what was not measured."""

from medusa_chat.bench.race import PROMPTS
from medusa_chat.bench.rows import table
from medusa_chat.bench.run import STUDIES, run, run_shape

__all__ = ["PROMPTS", "STUDIES", "run", "run_shape", "table"]
