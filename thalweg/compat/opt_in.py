"""Importing this opts the process in to every package that Thalweg stands for; what ``THALWEG_AS_DEEPSPEED=1`` does."""

import thalweg.compat.deepspeed
import thalweg.compat.mii  # noqa: F401
