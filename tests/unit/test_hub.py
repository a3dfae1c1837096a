"""A model that is misspelt is said at once, with the cure."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from thalweg.utils.hub import check_model_path


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "empty", "adapter", "checkpoint"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "checkpoint" / "manifest.json").write_text("{}")
    (tmp_path / "file").write_text("")
    check_model_path("model")
    check_model_path(tmp_path / "model")
    for name, said in (
        ("empty", "config.json"),
        ("adapter", "--adapter"),
        ("checkpoint", "ckpt export"),
        ("file", "is a file"),
    ):
        with pytest.raises(ValueError, match=said):
            check_model_path(name)
    for name in ("./absent", "absent/", "a/b/c", str(tmp_path / "absent")):
        with pytest.raises(FileNotFoundError, match="no folder"):
            check_model_path(name)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unknown(host: str, *_: object) -> list[object]:
        asked.append(host)
        raise socket.gaierror("no such name")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(FileNotFoundError, match="no hub can be reached"):
        check_model_path("org/model")
    assert asked == ["huggingface.co"]
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    check_model_path("org/model")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443/hub")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_: asked.append(host) or [])
    check_model_path("org/other")
    assert asked[1:] == ["mirror.example"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError):
        check_model_path("org/other")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    check_model_path("org/third")
    assert len(asked) == 2, "a proxy knows names that this host does not"
