"""end_with_parent(): a worker process does not outlive the app, whatever either is doing."""

import ctypes
import os
import signal
import sys
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End this process when the one that started it ends, also where that was killed. Linux does
    so by itself, in the middle of any call; elsewhere a thread must get its turn."""
    parent = parent_process()
    if parent is None:
        return  # no process of multiprocessing
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
