"""Serve a model over HTTP: OpenAI's API, /health, /metrics, and a chat page at /.

examples:
  thalweg serve ./my-model
  thalweg serve ./my-model --port 9000 --replicas 2 --quantization int8
  thalweg serve ./my-model --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile c.pem --ssl-keyfile k.pem
  thalweg serve ./my-model --replica http://host1:8000 --replica http://host2:8000 --replica-key KEY

Then: curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "The river", "max_tokens": 32}'
or open http://127.0.0.1:8000/ in a browser.  SIGTERM or Ctrl-C finishes what runs; a second one ends at once.
Keys may also be in the environment variable THALWEG_API_KEY.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.cli.arguments import int_at_least, log_stderr
from thalweg.cli.engine_args import add_engine_arguments, build_engine_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    # fmt: off
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model's directory or name")
    add = parser.add_argument_group("the address").add_argument
    add("--host", default="127.0.0.1", help="another than this host's own needs a key")
    add("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    add("--api-key", "--api-keys", action="append", default=[], metavar="KEY", help="may come several times")
    add("--api-key-file", type=Path, metavar="FILE", help="one key a line")
    add("--ssl-certfile", "--ssl-certificate", metavar="FILE", help="serve HTTPS with this certificate")
    add("--ssl-keyfile", "--ssl-key", metavar="FILE")
    add("--name", "--served-model-name", metavar="NAME",
        help="what clients call the model (default: MODEL, or its last part)")
    add("--deployment", "--deployment-name", metavar="NAME", help="for thalweg.client(NAME), /mii/NAME")
    add("--chat-template", type=Path, metavar="FILE", help="Jinja template in place of the tokenizer's")
    add_engine_arguments(parser)
    add = parser.add_argument_group("replicas and limits").add_argument
    add("--replicas", "--replica-num", type=int_at_least(1), default=1, metavar="N",
        help="engines, a process each (default: 1)")
    add("--threads", type=int_at_least(1), metavar="T", help="threads of each (default: its share of the cores)")
    add("--max-queue", type=int_at_least(0), default=128, metavar="N",
        help="sequences that may wait beside those that run; beyond: 429 (default: 128)")
    add("--body-bytes", type=int_at_least(1), default=2**23, metavar="N", help="largest body (default: 8 MiB)")
    add("--request-seconds", type=float, default=600.0, metavar="S", help="for one request (default: 600)")
    add("--stall-seconds", type=float, default=60.0, metavar="S",
        help="work, but no step for so long: /health fails; twice so long: a new replica (default: 60)")
    add("--start-seconds", type=float, default=1800.0, metavar="S", help="for a replica to be ready (default: 1800)")
    add("--drain-seconds", type=float, default=30.0, metavar="S", help="to finish at SIGTERM (default: 30)")
    add = parser.add_argument_group("several hosts").add_argument
    add("--replica", action="append", default=[], metavar="URL",
        help="forward requests to the server of this model at URL, and load no model here; once for each")
    add("--replica-key", metavar="KEY", default=os.environ.get("THALWEG_REPLICA_KEY"),
        help="the API key of those servers (or the variable THALWEG_REPLICA_KEY)")
    parser.add_argument("--json", action="store_true", help="print the address as one JSON object when ready")
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    require_packages()
    from thalweg.serve.http.guard import BodyLimits
    from thalweg.serve.mii.deployment import register_deployment, unregister_deployment
    from thalweg.serve.openai.requests import ChatTokenizer, load_chat_tokenizer
    from thalweg.serve.replicas.launcher import ProcessLauncher
    from thalweg.serve.replicas.pool import PoolLimits
    from thalweg.serve.server import ServeOptions, serve, serve_router

    if not (args.stall_seconds > 0 and args.start_seconds > 0):
        raise ValueError("--stall-seconds and --start-seconds must be positive numbers")
    if args.replica:
        _check_router_arguments(args)
    engine_spec = None if args.replica else build_engine_spec(args)
    template = args.chat_template.read_text(encoding="utf-8") if args.chat_template else None
    # Of a model on a hub, ``org/name`` is asked for as ``name``, too.
    folder = Path(args.model).resolve() if Path(args.model).is_dir() else Path(args.model.rstrip("/"))
    options = ServeOptions(
        model=args.name or folder.name or args.model,
        aliases=() if args.name else (args.model,),
        api_keys=read_api_keys(args),
        num_replicas=args.replicas,
        deployment_name=args.deployment,
        tls_cert=args.ssl_certfile,
        tls_key=args.ssl_keyfile,
        pool_limits=PoolLimits(
            max_outstanding=max(args.replicas, len(args.replica)) * args.max_num_seqs + args.max_queue,
            stall_seconds=args.stall_seconds,
            start_seconds=args.start_seconds,
        ),
        body_limits=BodyLimits(max_bytes=args.body_bytes),
        **{name: getattr(args, name) for name in ("host", "port", "drain_seconds", "request_seconds")},
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that leaves
    with contextlib.ExitStack() as stack:

        def on_ready(url: str) -> None:
            if args.json:
                print(json.dumps({"url": url, "model": options.model, "pid": os.getpid()}), flush=True)
            else:
                log_stderr(f"serving {options.model} at {url} (chat page: {url}/)")
            if args.deployment:
                register_deployment(args.deployment, url, next(iter(options.api_keys), None))
                stack.callback(unregister_deployment, args.deployment, os.getpid())

        if engine_spec is None:
            asyncio.run(serve_router(options, args.replica, args.replica_key, on_ready))
            return 0

        def make_tokenizer() -> ChatTokenizer:
            return load_chat_tokenizer(args.model, engine_spec.loader, template, args.trust_remote_code)

        cpu_shares, environ = _place_replicas(args)
        launcher = ProcessLauncher(engine_spec, cpu_shares, **environ)
        asyncio.run(serve(options, launcher, make_tokenizer, on_ready))
    return 0


def _check_router_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for options of an engine: a server that forwards has none."""
    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    own = {"replicas": 1, "threads": None, "chat_template": None, **vars(parser.parse_args([]))}
    given = [name for name, default in own.items() if getattr(args, name) != default and name != "loader"]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"--replica loads no model here: give {names} to the servers that do")


def require_packages() -> None:
    """Raise ImportError that names the cure where the server's packages are missing."""
    try:
        for name in ("fastapi", "httptools", "jinja2", "prometheus_client", "uvicorn"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed: pip install 'thalweg[serve]'") from None


def read_api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the keys of the arguments, the file and the environment."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
        keys += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{args.api_key_file} holds no key: write one a line")
    if key := os.environ.get("THALWEG_API_KEY"):
        keys.append(key)
    return tuple(keys)


def _place_replicas(args: argparse.Namespace) -> tuple[Sequence[Sequence[int]], dict[str, str]]:
    """Deal the cores to the replicas as `thalweg run` deals them to ranks; one replica is not bound."""
    from thalweg.launch.cpu_affinity import assign_cores, cpu_quota, physical_cores, usable_cpus

    plan = assign_cores(args.replicas, physical_cores(usable_cpus()), quota=cpu_quota(), bind=args.replicas > 1)
    threads = str(args.threads or os.environ.get("OMP_NUM_THREADS") or plan.num_threads)
    environ = {"OMP_NUM_THREADS": threads}
    if sys.platform.startswith("linux"):
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    return plan.cpus or ((),) * args.replicas, environ
