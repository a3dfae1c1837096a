"""``python -m thalweg`` is the same program as ``thalweg``."""

from thalweg.cli import main

raise SystemExit(main())
