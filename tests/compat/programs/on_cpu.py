"""`on_cpu.py PROGRAM ...` runs a program as it is on processors, where Hugging Face asks for gloo before all else."""

import runpy
import sys

from accelerate import PartialState

PartialState(backend="gloo")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
