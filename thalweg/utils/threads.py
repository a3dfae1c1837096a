"""How many cores a thread's tensor operations use."""

from __future__ import annotations

import threading

import torch


def set_own_threads(count: int | None) -> None:
    """Let torch's operations of this thread run on ``count`` threads (None: as many as another new thread's), and leave
    those of all others as they are.

    torch keeps the number of threads twice: for each thread (OpenMP's own), and as a default for threads that
    are yet to compute.  ``set_num_threads`` sets both; a short-lived thread sets the default back.
    """
    defaults: list[int] = []
    reader = threading.Thread(target=lambda: defaults.append(torch.get_num_threads()))
    restorer = threading.Thread(target=lambda: torch.set_num_threads(defaults[0]))
    reader.start()
    reader.join()
    torch.get_num_threads()  # a thread that first asks later would take the default then
    torch.set_num_threads(count or defaults[0])
    restorer.start()
    restorer.join()
