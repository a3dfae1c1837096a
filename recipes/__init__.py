"""Whole configurations as functions: docs, examples, tests and benchmarks run these same ones.

Each returns a plain dictionary of the keys of a ``ds_config.json``; pass it to
``thalweg.initialize(config=...)``, or write it out as JSON and edit it.
"""

from recipes.language_model import demo, zero, zero3_bf16

__all__ = ["demo", "zero", "zero3_bf16"]
