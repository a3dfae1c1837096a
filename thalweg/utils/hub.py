"""Whether a model's name can lead anywhere, said at once.

Left to itself, the hub's client asks for a folder that was misspelt as for a model on the hub: without a
network five times, for half a minute.
"""

import os
import socket
import urllib.parse
import urllib.request
from pathlib import Path


def check_model_path(model: str | Path) -> None:
    """Raise FileNotFoundError or ValueError with the cure where ``model`` is no Hugging Face model.

    A name that may be one on the hub passes where it is in the cache, or where the hub's address is known.
    """
    path, name = Path(model), str(model)
    if path.is_dir():
        if not any((path / file).is_file() for file in ("config.json", "model_index.json")):
            raise ValueError(f"{model} holds no config.json: {_describe_other_dir(path)}")
    elif path.exists():
        raise ValueError(f"{model} is a file: give the directory of a Hugging Face model")
    elif name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"there is no folder {model}: give the directory of a Hugging Face model")
    elif not _is_cached(name) and not _hub_reachable():
        raise FileNotFoundError(
            f"there is no folder {model} here, and no hub can be reached that may have a model of that name: "
            "give the directory of a Hugging Face model"
        )


def _describe_other_dir(path: Path) -> str:
    """Say what a directory that is no model is, as far as that can be seen, and what to do."""
    if (path / "adapter_config.json").is_file():
        return "it is an adapter, which needs its base model (`thalweg serve BASE --adapter NAME=DIR`)"
    if (path / "manifest.json").is_file() or (path / "latest").exists():
        return "it is a checkpoint, which `thalweg ckpt export` writes as a model"
    return "give the directory of a Hugging Face model"


def _is_cached(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    return (Path(cache) / f"models--{name.replace('/', '--')}").is_dir()


def _hub_reachable() -> bool:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    if urllib.request.getproxies():
        return True  # it is the proxy that knows
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True
