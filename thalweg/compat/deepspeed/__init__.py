"""Programs that say ``import deepspeed`` run on Thalweg.

    import thalweg.compat.deepspeed          before transformers, accelerate and the like are imported
    THALWEG_AS_DEEPSPEED=1 thalweg run ...   or `thalweg run --as-deepspeed script.py`: children too

The picture: a finder in ``sys.meta_path`` (:mod:`thalweg.compat.finder`) answers ``deepspeed``, its submodules and its
distribution's metadata.  The modules it makes are empty; :mod:`.surface` says for each of their names where in Thalweg
it lives, and what is to be used in place of a name that is not offered.  The other files here translate: arguments,
results and the words of DeepSpeed's engine.

Invariants: opting in changes nothing else of the process and loads neither torch nor a room; one process has one
``deepspeed``, this or a real one, and where a real one is installed a line says which.
"""

from thalweg.compat.deepspeed.surface import PACKAGE
from thalweg.compat.finder import install

install(PACKAGE)
