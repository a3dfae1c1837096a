"""Put on PYTHONPATH by tests/faults.py: every Python process of the run, forked or spawned, gets the fault."""

import os

if os.environ.get("THALWEG_FAULT"):
    from tests.faults import install

    install(os.environ["THALWEG_FAULT"])
