"""``thalweg serve MODEL``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thalweg.cli.console import log_stderr
from thalweg.utils.hub import check_model_path

_EPILOG = """examples:
  thalweg serve ./my-model
  thalweg serve ./my-model --port 9000 --replicas 2 --quantize int8
  thalweg serve ./my-model --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile c.pem --ssl-keyfile k.pem
  thalweg serve ./my-model --replica http://host1:8000 --replica http://host2:8000 --replica-key KEY

Then: curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "The river", "max_tokens": 32}'
or open http://127.0.0.1:8000/ in a browser.  SIGTERM or Ctrl-C finishes what runs; a second one ends at once.
Keys may also be in the environment variable THALWEG_API_KEY.
"""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP (OpenAI's API and a chat page)",
        description="Serve a model over HTTP: OpenAI's API, /health, /metrics, and a chat page at /.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    add("--replicas", "--replica-num", type=int, default=1, metavar="N",
        help="engines, a process each (default: 1)")
    add("--threads", type=int, metavar="T", help="threads of each (default: its share of the cores)")
    add("--max-queue", type=int, default=128, metavar="N",
        help="sequences that may wait beside those that run; beyond: 429 (default: 128)")
    add("--body-bytes", type=int, default=2**20, metavar="N", help="largest body (default: 1 MiB)")
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


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engine."""
    add = parser.add_argument_group("the engine").add_argument
    # fmt: off
    add("--dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"))
    add("--quantize", choices=("int8", "int4"), help="quantise the weights at load")
    add("--max-length", type=int, metavar="N", help="prompt and answer together, in tokens")
    add("--max-batch", type=int, default=64, metavar="N", help="sequences that run together (default: 64)")
    add("--max-step-tokens", type=int, default=512, metavar="N", help="tokens of one step (default: 512)")
    add("--kv-memory", metavar="SIZE", help="memory of the KV cache, as in 4GiB")
    add("--kv-cache-dtype", default="auto", choices=("auto", "fp32", "bf16", "int8", "fp8"))
    add("--batch-invariant", action="store_true",
        help="the same bits whatever runs beside (the native kernels always do)")
    add("--speculate", type=int, default=0, metavar="N",
        help="guess up to N tokens a step from what was said before; the same output in fewer steps")
    add("--no-prefix-cache", action="store_true", help="do not keep the KV of prompts' beginnings")
    add("--device", default="cpu")
    add("--stream", choices=("cpu", "nvme"),
        help="weights stay in a file: cpu reads the page cache, nvme the disk, layer by layer")
    add("--stream-folder", metavar="DIR", help="where the packed weights are kept")
    add("--stream-memory", metavar="SIZE", help="weights in memory at a time with nvme")
    add("--tensor-parallel", "--tp", type=int, default=1, metavar="N",
        help="processes of this host that share each layer's work, for each replica (default: 1)")
    add("--pipeline-parallel", "--pp", type=int, default=1, metavar="N",
        help="stages of layers, each on processes of its own (default: 1)")
    add("--expert-parallel", "--ep", type=int, default=1, metavar="N",
        help="processes among which a layer's experts are dealt out whole (default: 1)")
    add("--draft", metavar="DIR", help="a smaller model with the same vocabulary that guesses tokens")
    add("--adapter", metavar="NAME=DIR", action="append", default=[],
        help="a LoRA adapter (peft's format) that requests name as their model; may be repeated")
    add("--pooling", choices=("auto", "mean", "cls"), default="auto", help="how an encoder pools its states")
    add("--trust-remote-code", action="store_true", help="run the model's own code")
    add("--loader", help=argparse.SUPPRESS)  # module:function that makes the engine; tests
    # fmt: on


def build_engine_spec(args: argparse.Namespace) -> Any:
    """Return what the engine's options ask for."""
    from thalweg.infer.types import EngineConfig
    from thalweg.serve.replicas.launcher import LOADER, EngineSpec

    if args.loader is None and importlib.util.find_spec("transformers") is None:
        raise ImportError("transformers is not installed: pip install 'thalweg[serve]'")
    for model in [args.model, args.draft] if args.loader is None else []:
        if model is not None:
            check_model_path(model)
    options = EngineConfig(
        dtype=args.dtype,
        quantize=args.quantize,
        max_length=args.max_length,
        kv_memory=parse_size(args.kv_memory) if args.kv_memory else None,
        kv_cache_dtype=args.kv_cache_dtype,
        batch_invariant=args.batch_invariant,
        speculate=args.speculate,
        max_batch=args.max_batch,
        max_step_tokens=args.max_step_tokens,
        prefix_cache=not args.no_prefix_cache,
        device=args.device,
        stream=args.stream,
        stream_folder=args.stream_folder,
        stream_memory=parse_size(args.stream_memory) if args.stream_memory else None,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        expert_parallel=args.expert_parallel,
        draft=args.draft,
        adapters=_parse_adapters(args.adapter),
        pooling=args.pooling,
        trust_remote_code=args.trust_remote_code,
    )
    return EngineSpec(args.model, options, args.loader or LOADER)


def _parse_adapters(values: list[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for text in values:
        name, _, folder = text.partition("=")
        if not name or not folder or name in adapters:
            raise ValueError(f"--adapter {text}: write NAME=DIR, each name once")
        adapters[name] = folder
    return adapters


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    require_packages()
    from thalweg.serve.http.guard import BodyLimits
    from thalweg.serve.openai.tokenizer import ChatTokenizer, load_chat_tokenizer
    from thalweg.serve.replicas.launcher import ProcessLauncher
    from thalweg.serve.replicas.pool import PoolLimits
    from thalweg.serve.server import ServeOptions, run, run_router

    if args.max_queue < 0 or args.body_bytes < 1 or not (args.stall_seconds > 0 and args.start_seconds > 0):
        raise ValueError("--max-queue, --body-bytes, --stall-seconds and --start-seconds must be positive numbers")
    if args.replica:
        _check_router_arguments(args)
    engine_spec = None if args.replica else build_engine_spec(args)
    template = args.chat_template.read_text(encoding="utf-8") if args.chat_template else None
    options = ServeOptions(
        model=args.name or _default_model_name(args.model),
        aliases=() if args.name else (args.model,),
        host=args.host,
        port=args.port,
        api_keys=read_api_keys(args),
        num_replicas=args.replicas,
        deployment_name=args.deployment,
        tls_cert=args.ssl_certfile,
        tls_key=args.ssl_keyfile,
        drain_seconds=args.drain_seconds,
        request_seconds=args.request_seconds,
        pool_limits=PoolLimits(
            max_outstanding=max(args.replicas, len(args.replica)) * args.max_batch + args.max_queue,
            stall_seconds=args.stall_seconds,
            start_seconds=args.start_seconds,
        ),
        body_limits=BodyLimits(max_bytes=args.body_bytes),
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that leaves
    with contextlib.ExitStack() as stack:

        def on_ready(url: str) -> None:
            if args.json:
                print(json.dumps({"url": url, "model": options.model, "pid": os.getpid()}), flush=True)
            else:
                log_stderr(f"serving {options.model} at {url} (chat page: {url}/)")
            if args.deployment:
                stack.enter_context(_registered_deployment(args.deployment, url, options.api_keys))

        if engine_spec is None:
            run_router(options, args.replica, args.replica_key, on_ready)
            return 0

        def make_tokenizer() -> ChatTokenizer:
            return load_chat_tokenizer(args.model, engine_spec.loader, template, args.trust_remote_code)

        run(options, ProcessLauncher(engine_spec, _make_placements(args)), make_tokenizer, on_ready)
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


def _default_model_name(model: str) -> str:
    """The name of a folder or of a model on a hub: ``org/name`` is asked for as ``name``, too."""
    return (Path(model).resolve() if Path(model).is_dir() else Path(model.rstrip("/"))).name or model


def require_packages() -> None:
    """Raise ImportError that names the cure where the server's packages are missing."""
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import jinja2  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
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


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 4GiB, 512M or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write it as 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def _make_placements(args: argparse.Namespace) -> tuple[Any, ...]:
    """Deal the cores to the replicas as `thalweg run` deals them to ranks; one replica is not bound."""
    from thalweg.launch.cpu_affinity import assign_cores, cpu_quota, physical_cores, usable_cpus
    from thalweg.serve.replicas.launcher import ReplicaResources

    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads} must be at least 1")
    if args.replicas < 1:
        raise ValueError(f"--replicas {args.replicas} must be at least 1")
    plan = assign_cores(args.replicas, physical_cores(usable_cpus()), quota=cpu_quota(), bind=args.replicas > 1)
    threads = str(args.threads or os.environ.get("OMP_NUM_THREADS") or plan.num_threads)
    environ = {"OMP_NUM_THREADS": threads}
    if sys.platform.startswith("linux"):
        environ["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    cpus = plan.cpus or ((),) * args.replicas
    return tuple(ReplicaResources(share, environ) for share in cpus)


@contextlib.contextmanager
def _registered_deployment(name: str, url: str, keys: tuple[str, ...]) -> Iterator[None]:
    from thalweg.serve.mii.deployment import register_deployment, unregister_deployment

    register_deployment(name, url, keys[0] if keys else None)
    try:
        yield
    finally:
        unregister_deployment(name, os.getpid())
