"""DeepSpeed's and MII's programs by their own names, over the subcommands here.

``python -m mii.entrypoints.openai_api_server ...`` runs this file where ``mii`` is Thalweg's, and sees the module's
name in ``__spec__``.  Each program is a function of its arguments that returns those of ``thalweg``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from thalweg.cli import main


def _openai_server(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser("mii.entrypoints.openai_api_server", description="runs `thalweg serve`")
    add = parser.add_argument
    add("--model", required=True)
    add("--deployment-name", default="deepspeed-mii")
    add("--host", help="another than this host's own needs --api-keys (default: 0.0.0.0 with them)")
    add("--port", default="8000")
    add("--max-length", "--max_length", dest="max_model_len")
    add("--tensor-parallel", dest="tensor_parallel_size")
    add("--replica-num")
    add("--chat-template")
    add("--api-keys", type=lambda text: text.split(","), default=[])
    add("--ssl", action="store_true", help="with the files that SSL_KEYFILE and SSL_CERTFILE name")
    given, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"{rest[0]} is not offered by Thalweg: `thalweg serve --help` lists what there is")
    options = {**vars(given), **dict.fromkeys(("model", "api_keys", "ssl"))}
    if given.api_keys and given.host is None:
        options["host"] = "0.0.0.0"
    if given.ssl:
        options |= {"ssl_keyfile": os.environ["SSL_KEYFILE"], "ssl_certfile": os.environ["SSL_CERTFILE"]}
    words = ["serve", given.model]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", value] if value is not None else []
    return [*words, *(word for key in given.api_keys for word in ("--api-key", key))]


_PROGRAMS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "mii.entrypoints.api_server": _openai_server,
    "mii.entrypoints.openai_api_server": _openai_server,
}


if __name__ == "__main__":
    name = (__spec__.name if __spec__ else "").removesuffix(".__main__")
    program, given = (name, sys.argv[1:]) if name in _PROGRAMS else (sys.argv[1], sys.argv[2:])
    raise SystemExit(main(_PROGRAMS[program](given)))
