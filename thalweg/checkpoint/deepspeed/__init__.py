"""Checkpoints that DeepSpeed wrote: recognised, read without its classes, loaded into any layout.

``unpickle`` interprets a pickle as data; ``torch_file`` finds the tensors of a file; ``flat_tensors`` cuts the flat
vectors of ZeRO into boxes; ``checkpoint_folder`` knows the folders; ``checkpoint`` gives them the face of ours.
"""

from __future__ import annotations

from thalweg.checkpoint.deepspeed.checkpoint import ForeignCheckpoint, find_foreign

__all__ = ["ForeignCheckpoint", "find_foreign"]
