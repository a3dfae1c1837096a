"""How many cores a thread's tensor operations use."""

from __future__ import annotations

import threading

import torch


def set_single_threaded() -> None:
    """Let torch's operations of this thread run on it alone, and leave all others as they are.

    torch keeps the number of threads twice: for each thread (OpenMP's own), and as a default for threads that
    are yet to compute.  ``set_num_threads`` sets both; a short-lived thread sets the default back.
    """
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
    restorer.start()
    restorer.join()
