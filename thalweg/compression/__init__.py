"""Compression in training: quantisation-aware training, pruning, fewer layers, and the smaller model that comes of it.

    init_compression     reads ``compression_training``: layers become ones that compute with compressed weights
    training             ``initialize`` adds the schedule, which is told of every step; ``quantize_training`` (MoQ) too
    redundancy_clean     rounds, removes and unwraps: a plain model, smaller where its own config can say so

The names are DeepSpeed's.  What ranks hold is what they hold of any model: parameters, buffers and a little extra
state, so that ZeRO, checkpoints and resumes know nothing of it.
"""

from thalweg.compression.clean import redundancy_clean
from thalweg.compression.compress import init_compression
from thalweg.compression.distill import distillation_loss, init_student

__all__ = ["distillation_loss", "init_compression", "init_student", "redundancy_clean"]
