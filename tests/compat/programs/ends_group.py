"""`ends_group.py PROGRAM ...` runs a program as it is, and ends its process group behind it.

Without that torch aborts now and then at the interpreter's end ("terminate called without an active exception").
"""

import runpy
import sys

import torch.distributed as dist

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
if dist.is_initialized():
    dist.destroy_process_group()
