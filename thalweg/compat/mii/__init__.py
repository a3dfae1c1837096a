"""Programs that say ``import mii`` run on Thalweg's inference engine and server.

``import thalweg.compat.mii`` opts in, as does all that opts in to ``deepspeed`` for a process and its children
(:mod:`thalweg.compat.startup`).  :mod:`.surface` is the table of names, :mod:`.deployments` the calls of today,
:mod:`.legacy` those of before: both translate arguments and answers, and leave the work to ``thalweg.serve.mii``.
"""

from thalweg.compat.finder import install
from thalweg.compat.mii.surface import PACKAGE

install(PACKAGE)
