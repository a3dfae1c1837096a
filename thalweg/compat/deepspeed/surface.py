"""DeepSpeed's names: ``surface.ini`` has each module that ``import deepspeed`` can reach."""

from thalweg.compat.finder import Package, read_surface

DEEPSPEED_VERSION = "0.19.8"
SURFACE = read_surface("deepspeed")
PACKAGE = Package(
    "deepspeed",
    "DeepSpeed",
    "deepspeed",
    DEEPSPEED_VERSION,
    SURFACE,
    ("accelerate.utils", "transformers.integrations.deepspeed", "lightning.pytorch", "pytorch_lightning"),
)
