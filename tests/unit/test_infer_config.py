"""The engine's options are declared once: every spelling of each gives the same config, and each is read."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch

import thalweg
from tests.unit.infer_models import tiny_decoder, tiny_encoder
from thalweg.cli.engine_args import add_engine_arguments, build_engine_config, option_flags
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.infer.config import (
    ALIASES,
    DEEPSPEED_IGNORED_KEYS,
    EngineOption,
    engine_options,
    from_deepspeed_config,
)
from thalweg.ops import cpu_kernels

OPTIONS = {option.name: option for option in engine_options()}
NEEDS = {"expert_parallel_size": {"tensor_parallel_size": 6}}
DOCS = Path(__file__).parents[2] / "docs" / "inference.md"


def other_value(option: EngineOption) -> Any:
    """A value that is not the default."""
    if option.choices is not None:
        return next(choice for choice in option.choices if choice not in (None, option.default))
    if option.value_type is bool:
        return not option.default
    if option.value_type is dict:
        return {"a": "folder/a", "b": "folder/b"}
    return 6 if option.value_type is int else "text"


def cli_text(option: EngineOption, flag: str, value: Any) -> list[str]:
    if option.value_type is bool:
        return [flag]
    if option.value_type is dict:
        return [text for item in value.items() for text in (flag, "=".join(item))]
    return [flag, "1.5k" if option.is_size else str(value)]


def parsed(arguments: list[str]) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_arguments(parser)
    return build_engine_config(parser.parse_args(arguments))


def test_the_defaults_are_the_same_everywhere() -> None:
    assert parsed([]) == EngineConfig() == EngineConfig(**from_deepspeed_config({}))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_spelling_of_an_option_gives_the_same_config(name: str) -> None:
    option, more = OPTIONS[name], NEEDS.get(name, {})
    value = 1536 if option.is_size else other_value(option)
    want = EngineConfig(**{name: value}, **more)
    assert getattr(want, name) == value != getattr(EngineConfig(), name)
    for spelling in (name, *option.aliases):
        assert EngineConfig(**{spelling: value}, **more) == want
        settings = json.loads(json.dumps({spelling: value, **more}))
        assert EngineConfig(**from_deepspeed_config(settings)) == want
    for flag in option_flags(option):
        extra = [text for key, x in more.items() for text in (option_flags(OPTIONS[key])[0], str(x))]
        assert parsed([*cli_text(option, flag, value), *extra]) == want


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"tensor_parallel": {"tp_size": 2}}, {"tensor_parallel_size": 2}),
        ({"tensor_parallel": {"enabled": False, "tp_size": 2}}, {}),
        ({"tp": {"tp_size": 2}, "mp_size": 4}, {"tensor_parallel_size": 4}),
        ({"moe": {"enabled": True, "ep_size": 2}}, {"expert_parallel_size": 2}),
        ({"ep_size": [1, 2]}, {"expert_parallel_size": 2}),
        ({"moe": True}, {}),
        ({"dtype": torch.int8}, {"quantization": "int8"}),
        ({"dtype": "torch.int4"}, {"quantization": "int4"}),
        ({"quant": {"weight": {"num_bits": 4}}}, {"quantization": "int4"}),
        ({"quant": {"enabled": False}}, {}),
        ({"max_out_tokens": 99}, {"max_model_len": 99}),
        ({"zero": {"stage": 3, "offload_param": {"device": "cpu"}}}, {"weight_offload": "cpu"}),
        ({"zero": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}),
        (
            {"zero": {"stage": 3, "offload_param": {
                "device": "nvme", "nvme_path": "/d", "buffer_count": 2, "buffer_size": 50}}},
            {"weight_offload": "nvme", "weight_offload_dir": "/d", "weight_offload_bytes": 100},
        ),
        ({"mpu": None, "checkpoint": None, "dtype": None}, {}),
    ],
)  # fmt: skip
def test_deepspeed_keys(settings: dict[str, Any], options: dict[str, Any]) -> None:
    assert EngineConfig(**from_deepspeed_config(settings)) == EngineConfig(**options)


def test_what_cannot_be_is_named() -> None:
    for name, option in OPTIONS.items():
        if option.choices is not None:
            with pytest.raises(ValueError, match=f"{name} is 'nothing'; it must be"):
                EngineConfig(**{name: "nothing"})
        if option.minimum is not None:
            for wrong in (option.minimum - 1, 1.5, True):
                with pytest.raises(ValueError, match=f"{name} is {wrong}; it must be a whole number of at least"):
                    EngineConfig(**{name: wrong})
    for quant in (True, "int8", {"weight": 4}):
        with pytest.raises(ValueError, match=r"quant is .*; it must be a section with enabled, and weight"):
            from_deepspeed_config({"quant": quant})
    with pytest.raises(ValueError, match=r"quant.weight.num_bits is 8 bits; it must be 4 or 8"):
        from_deepspeed_config({"quant": {"weight": {"num_bits": "8 bits"}}})
    with pytest.raises(ValueError, match="give max_num_seqs once"):
        EngineConfig(max_num_seqs=4, max_batch=5)
    with pytest.raises(ValueError, match="give max_model_len once"):
        from_deepspeed_config({"max_length": 5, "max_model_len": 6})
    with pytest.raises(TypeError, match="block_size"):
        EngineConfig(block_size=16)
    with pytest.raises(ValueError, match="does not know block_size"):
        thalweg.init_inference(tiny_decoder("llama"), block_size=16)
    assert EngineConfig(max_num_seqs=0, weight_offload="cpu").max_num_seqs == 0
    assert not DEEPSPEED_IGNORED_KEYS & {*OPTIONS, *ALIASES}


def test_the_page_has_every_option() -> None:
    """docs/inference.md has the declaration's own words."""
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    want = []
    for option in engine_options():
        names = ", ".join(f"`{alias}`" for alias in option.aliases)
        want.append(f"| `{option.name}` | {names} | {option.help} |")
    assert rows[: len(want)] == want, "\n".join(want)


class RecordingConfig(EngineConfig):
    """Notes which options the program reads, outside of the config's own checks, comparisons and copies."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_code
        own = caller.co_name == "__post_init__" or caller.co_filename.endswith(("dataclasses.py", "<string>"))
        if name in OPTIONS and not own:
            RecordingConfig.read.add(name)
        return super().__getattribute__(name)


def used(**options: Any) -> RecordingConfig:
    return RecordingConfig(dtype="fp32", max_num_seqs=2, max_model_len=64, **options)


def run(engine: Any, **fields: Any) -> None:
    engine.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=2, temperature=0), **fields))
    while engine.has_work():
        engine.step()
    engine.close()


def test_every_option_is_read(tmp_path: Path) -> None:
    """Loading models in all the ways there are reads every option, outside of its own checks."""
    model = tiny_decoder("llama")
    adapted = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "model")
    RecordingConfig.read.clear()
    assert EngineConfig(device="auto") == EngineConfig() and not RecordingConfig.read
    run(load_engine(tmp_path / "model", used(draft_model=str(tmp_path / "model"))))
    run(load_engine(model, used(lora_adapters={"a": str(tmp_path / "adapter")})), adapter="a")
    offload = {"weight_offload": "nvme", "weight_offload_dir": str(tmp_path), "weight_offload_bytes": 1 << 22}
    if reason := cpu_kernels.unsupported_reason():  # the options of the kernels' file are refused, not ignored
        for name in ("weight_offload_dir", "weight_offload_bytes"):
            with pytest.raises(ValueError, match=rf"{name} is for the CPU kernels.*{reason}.*leave it out"):
                load_engine(model, used(weight_offload="nvme", **{name: offload[name]}))
        offload = {"weight_offload": "nvme"}
    run(load_engine(model, used(**offload)))
    load_engine(tiny_encoder("bert"), used()).close()
    run(load_engine(model, used(), runner="torch"))
    run(load_engine(model, used(tensor_parallel_size=2)))
    assert set(OPTIONS) == RecordingConfig.read
