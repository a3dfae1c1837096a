#!/usr/bin/env python3
"""DeepSpeed's program of this name, by Thalweg."""

import sys
from pathlib import Path

from thalweg.cli.other_programs import run

if __name__ == "__main__":
    raise SystemExit(run(Path(__file__).name, sys.argv[1:]))
