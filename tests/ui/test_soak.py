"""Under use the page's process stays as it is (soak_page.py, which also runs for longer)."""

import os

from soak_page import rising, soak

MINUTES = float(os.environ.get("MEDUSA_CHAT_SOAK_MINUTES", "0"))  # 0: some rounds, 20 seconds


def test_memory_files_and_threads_are_flat_while_tabs_come_and_go():
    samples = list(soak(MINUTES, clients=4))
    assert rising(samples) == [], "\n".join(map(str, samples))
