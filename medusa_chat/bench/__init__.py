"""bench: what Medusa brings on this machine, as ratios from one run, and what was not measured."""

from medusa_chat.bench.rows import table
from medusa_chat.bench.run import NAMED, STUDIES, run, run_shape
