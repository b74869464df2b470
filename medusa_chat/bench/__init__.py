"""bench: how much faster Medusa is on this machine, as ratios within one run."""

from medusa_chat.bench.peers import run_peers
from medusa_chat.bench.rows import table
from medusa_chat.bench.run import ALONE, NAMED, STUDIES, run, run_shape
