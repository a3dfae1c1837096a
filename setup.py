"""Installs, beside the package, the line with which ``THALWEG_AS_DEEPSPEED=1`` reaches every Python process.

Python reads the ``.pth`` files of site-packages at its start.  Where the variable is not set the line looks it up and
does no more; nothing of Thalweg is imported.  All else about the package is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LINE = 'import os; os.environ.get("THALWEG_AS_DEEPSPEED") == "1" and __import__("thalweg.compat.opt_in")\n'


class BuildWithPth(build_py):
    """Puts the file where site-packages begins, of an editable install too."""

    def run(self) -> None:
        """Build as ever, then write it; setuptools takes from a file that ends in .py the right to run it."""
        super().run()
        for program in Path(self.build_lib, "thalweg/cli/bin").glob("*"):
            program.chmod(0o755)
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(folder, "thalweg-as-deepspeed.pth").write_text(LINE)


setup(cmdclass={"build_py": BuildWithPth})
