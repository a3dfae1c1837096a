"""``deepspeed.initialize`` under the alias: how it reads a config."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.utils.data import DataLoader

import thalweg
import thalweg.compat.deepspeed.engine as engine_module
import thalweg.data.loader as loader_module
from tests.harness import run_ranks
from tests.marks import nightly
from tests.unit.infer_models import tiny_decoder
from thalweg.compat.deepspeed.config import translate_config
from thalweg.compat.deepspeed.initialization import initialize
from thalweg.compat.deepspeed.moe import DeepSpeedMoE
from thalweg.compat.deepspeed.pipeline import DeepSpeedPipelineModule
from thalweg.config import ConfigError
from thalweg.data.repeating_loader import RepeatingLoader
from thalweg.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from thalweg.zero.whole_tensors import gather_state_dict


def test_a_wrong_config_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    """Also where DeepSpeed's defaults are filled in."""
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 4,\n "zero_optimization": {"stage": 9}}')
    with pytest.raises(ConfigError) as caught:
        initialize(model=nn.Linear(2, 2), config=str(path))
    assert str(path) in str(caught.value) and "zero_optimization.stage (line 2) = 9" in str(caught.value)


def _clipping(rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for given in ({}, {"gradient_clipping": 0.0}, {"gradient_clipping": 0.25}):
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, **given}
        engine = initialize(model=nn.Linear(2, 2, bias=False), config=config)[0]
        before = engine.state_dict()["weight"]
        engine.backward(100 * engine(torch.ones(1, 2)).sum())
        engine.step()
        found.append((engine.gradient_clipping(), float((engine.state_dict()["weight"] - before).norm())))
        assert engine.config == config, "the user's own, without what was filled in"
        engine.close()
    return found


def test_a_config_that_says_nothing_clips_as_deepspeed_does() -> None:
    (found,) = run_ranks(_clipping, 1)
    assert [limit for limit, _ in found] == [1.0, 0.0, 0.25]
    assert [moved for _, moved in found] == pytest.approx([1.0, 200.0, 0.25], rel=1e-3)


def test_an_offload_that_nobody_asked_for_is_passed_over_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    def read(**offload_param: str) -> dict[str, Any]:
        return translate_config({"zero_optimization": {"stage": 2, "offload_param": offload_param}})

    assert read() == read(device="none") == {"zero_optimization": {"stage": 2}} and not caplog.messages
    assert read(device="cpu") == read()
    assert caplog.messages == ["zero_optimization.offload_param does nothing at stage 2"]


def _refused_by_two_keys(rank: int, world: int) -> list[str]:
    from thalweg.compat.deepspeed.optimizers import DeepSpeedCPUAdam

    def build(make: Any, stage: int = 1, **keys: Any) -> str:
        net = nn.Linear(2, 2)
        zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if make else {"overlap_comm": True})}
        optimizer = {"type": "SGD", "params": {"lr": 1.0}}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **keys}
        try:
            engine: Any = initialize(
                model=net,
                config=config if make else {**config, "optimizer": optimizer},
                **({"optimizer": make(net.parameters())} if make else {}),
            )[0]
        except Exception as error:
            return type(error).__name__
        engine.close()
        return "taken"

    force, own_windows = {"zero_force_ds_cpu_optimizer": True}, {"managed_gradient_accumulation": False}
    return [
        build(torch.optim.Adam, **force),
        build(torch.optim.Adam),
        build(torch.optim.Adam, **dict.fromkeys(force, False)),
        build(DeepSpeedCPUAdam, **force),
        build(None, **own_windows),
        build(None),
        build(None, stage=2, **own_windows),
    ]


def test_what_two_keys_of_a_config_refuse_is_refused() -> None:
    """Thalweg could do both; a config that sets both keys has asked for DeepSpeed's rule."""
    (found,) = run_ranks(_refused_by_two_keys, 1)
    assert found == ["ZeRORuntimeException", *["taken"] * 3, "DeepSpeedUsageError", "taken", "taken"]


def _as_deepspeed_reads(rank: int, world: int) -> dict[str, object]:
    from thalweg.compat.deepspeed.config import (
        DeepSpeedConfig,
        DeepSpeedConfigError,
        DeepSpeedZeroConfig,
        DeepSpeedZeroOffloadOptimizerConfig,
    )

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": 1,
        "zero_optimization.reduce_bucket_size": 921.6,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "elastic_checkpoint": 1},
    }
    engine: Any = initialize(model=nn.Linear(2, 2), config=config)[0]
    zero = engine.resolved_config.zero_optimization
    found = {"offload": zero.offload_param.device, "untested": engine.resolved_config.zero_allow_untested_optimizer}
    found["the user's own"] = engine.config == config
    makers = (
        lambda keys: initialize(model=nn.Linear(2, 2), config={"zero_optimization": keys}),
        lambda keys: DeepSpeedConfig({"zero_optimization": keys}),
        lambda keys: DeepSpeedZeroConfig(**keys),
    )
    for wrong in ({"stage": 9}, {"stage": 2, "offload_param": {"device": "cpu"}, "no_such_key": 1}):
        for make in makers:
            with pytest.raises(AssertionError) as caught:
                make(wrong)
            assert isinstance(caught.value, DeepSpeedConfigError) and len(caught.value.problems) == 1
    shown = DeepSpeedZeroConfig(leaf_module={"classes": "my.Class"}, offload_param={})
    found["leaf"], found["offload_param"] = shown.leaf_module.classes, shown.offload_param.device
    found["optimizer"] = shown.offload_optimizer
    older = DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer
    assert older.device == "cpu" and isinstance(older, DeepSpeedZeroOffloadOptimizerConfig), "the older spelling"
    for read, write in ((False, False), (True, False), (False, True)):
        offload = DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=read, pipeline_write=write)
        assert offload.pipeline == (read or write)
    with pytest.raises(ValueError, match='Invalid gradient_allreduce_op = "max"'):
        DeepSpeedConfig({"train_batch_size": 2, "gradient_allreduce_op": "max"})
    with engine.coalesce_grad_reduction():
        for factor in (1.0, 2.0):
            engine.backward(factor * (rank + 1) * engine(torch.ones(1, 2)).sum())
    grads = engine.optimizer.averaged_gradients[0]
    found["sum of two, mean over ranks"] = {float(value) for grad in grads for value in grad.flatten()}
    engine.close()
    return found


def test_a_config_is_read_as_deepspeed_reads_it() -> None:
    """1 is true, what a stage has no use for is passed over, and problems are DeepSpeed's error."""
    for found in run_ranks(_as_deepspeed_reads, 2):
        assert found == {
            "offload": "none", "untested": True, "the user's own": True, "leaf": ["my.Class"],
            "offload_param": "none", "optimizer": None, "sum of two, mean over ranks": {4.5},
        }  # fmt: skip


def _no_sync(rank: int, world: int) -> dict[str, Any]:
    from thalweg.compat.deepspeed.tensor_access import safe_get_full_grad

    found: dict[str, Any] = {}
    for stage, dtype in ((0, None), (1, "fp16")):
        sections = {dtype: {"enabled": True, "initial_scale_power": 4}} if dtype else {}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
        }
        engine = initialize(model=nn.Linear(2, 2), config=config | sections)[0]
        weight = engine.module.weight
        batch = torch.ones(1, 2, dtype=engine.get_data_types()[0])
        with engine.no_sync():
            engine.backward((rank + 1) * engine(batch).sum())
            with pytest.raises(AssertionError, match="inside no_sync"):
                engine.step()
            with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
                pass
            found[stage, "own"] = safe_get_full_grad(weight).unique().tolist()
        engine.backward((rank + 1) * engine(batch).sum())
        found[stage, "reduced"] = safe_get_full_grad(weight).unique().tolist()
        engine.step()
        found[stage, "after"] = safe_get_full_grad(weight)
        engine.close()
    return found


def test_within_no_sync_a_gradient_is_this_ranks_and_no_step_is_taken() -> None:
    for rank, found in enumerate(run_ranks(_no_sync, 2)):
        assert found == {
            (stage, key): value
            for stage in (0, 1)
            for key, value in {"own": [rank + 1.0], "reduced": [3.0], "after": None}.items()
        }


def _without_group(rank: int, world: int) -> None:
    from thalweg.compat.deepspeed.arguments import init_distributed

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    for call in (init_distributed, lambda **kw: initialize(model=nn.Linear(2, 2), config=config, **kw)):
        with pytest.raises(ValueError, match="there is no process group"):
            call(dist_init_required=False)
    init_distributed()
    engine = initialize(model=nn.Linear(2, 2), config=config, dist_init_required=False)[0]
    engine.close()


def test_a_process_group_that_the_program_says_it_made_must_be_there() -> None:
    run_ranks(_without_group, 1, init=False)


def _without_permissions(rank: int, world: int, folder: str) -> tuple[bool, bool]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = initialize(model=nn.Linear(2, 2), config=config)[0]
    engine.save_checkpoint(f"{folder}/plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "chmod", lambda *_: (_ for _ in ()).throw(PermissionError("not supported")))
        patch.setattr("os.chmod", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not supported")))
        engine.save_checkpoint(f"{folder}/share")
    engine.close()
    scripts = [Path(folder) / name / "zero_to_fp32.py" for name in ("plain", "share")]
    return scripts[0].stat().st_mode & 0o100 != 0, scripts[1].is_file()


def _model_states(rank: int, world: int, folder: str) -> tuple[list[str], list[str], bool]:
    from thalweg.compat.deepspeed.fp32_weights import get_model_ckpt_name_for_rank

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(False)
    engine = initialize(model=model, config=config | {"zero_optimization": {"stage": 2}})[0]
    found = []
    for tag, excludes in (("all", False), ("trained", True)):
        engine.save_checkpoint(folder, tag, exclude_frozen_parameters=excludes)
        states = torch.load(get_model_ckpt_name_for_rank(f"{folder}/{tag}", "00"))["module"]
        assert torch.equal(states["1.weight"], engine.state_dict()["1.weight"])
        found.append(sorted(states))
    assert not Path(get_model_ckpt_name_for_rank(f"{folder}/all", "01")).exists(), "the first has the whole"
    assert not Path(get_model_ckpt_name_for_rank(folder, "00")).exists(), "no checkpoint of one tag"
    torch.distributed.barrier()
    loads = engine.load_checkpoint(folder, "all")[0] is not None  # with that file in its folder
    engine.close()
    return found[0], found[1], loads


def test_a_file_of_the_models_states_is_made_when_its_name_is_asked_for(tmp_path: Path) -> None:
    whole = ["0.bias", "0.weight", "1.weight"]
    assert run_ranks(_model_states, 2, str(tmp_path)) == [(whole, ["1.weight"], True)] * 2


def _tied(rank: int, world: int, folder: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.Linear(300, 300))
    model[1].weight = model[0].weight
    engine = initialize(model=model, config=config | {"zero_optimization": {"stage": 3}})[0]
    engine.save_checkpoint(folder, "one")
    engine.close()


def test_a_checkpoint_becomes_files_as_transformers_has_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from thalweg.compat.deepspeed import fp32_weights

    run_ranks(_tied, 2, str(tmp_path / "run"))
    convert = partial(fp32_weights.convert_zero_checkpoint_to_fp32_state_dict, tmp_path / "run")
    convert(tmp_path / "whole")
    convert(tmp_path / "old" / "weights.bin")  # before DeepSpeed 0.15 the name of a file
    convert(tmp_path / "shards", max_shard_size="361KB", tag="one")
    convert(tmp_path / "safe", safe_serialization=True)
    whole = torch.load(tmp_path / "whole" / "pytorch_model.bin")
    assert whole["0.weight"].data_ptr() == whole["1.weight"].data_ptr() and "1.bias" in whole
    for found in (torch.load(tmp_path / "old" / "weights.bin"), load_file(tmp_path / "safe" / "model.safetensors")):
        assert all(torch.equal(found[name], whole[name]) for name in found) and len(found) >= 2
    shards = [torch.load(file) for file in (tmp_path / "shards").glob("*.bin")]
    assert len(shards) == 2 and (tmp_path / "shards" / "pytorch_model.bin.index.json").is_file()
    assert {name for shard in shards for name in shard} == whole.keys()
    with pytest.raises(ValueError, match="does not say which parameters were frozen"):
        convert(tmp_path / "trained", exclude_frozen_parameters=True)


def _state_of_one_rank(rank: int, world: int, folder: str) -> None:
    """Right after an update, as where the first rank writes a file; with tags that are numbers, 0 among them."""
    sections = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "log_level": "error"}
    sections["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    for stage, moe in ((0, False), (1, False), (2, False), (3, False), (0, True), (1, True)):
        torch.manual_seed(0)
        layer: Any = DeepSpeedMoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2, k=1) if moe else nn.Linear(4, 4)
        frozen = nn.Linear(4, 4).requires_grad_(False)
        config = {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            **sections,
        }
        engine = initialize(model=nn.Sequential(frozen, layer), config=config)[0]
        for _ in range(2):
            hidden = engine(torch.randn(1, 4).bfloat16())
            engine.backward((hidden[0] if moe else hidden).sum())
            engine.step()
        state, trained = None, None
        if stage == 3 or moe or rank == 0:
            state = engine.module_state_dict(prefix="net.")
            trained = engine.module_state_dict(exclude_frozen_parameters=True)
        torch.distributed.barrier()
        expected = engine.state_dict()
        if state is not None:
            assert trained is not None and trained.keys() == {name for name in expected if not name.startswith("0.")}
            assert state.keys() == {f"net.{name}" for name in expected}
            for name, value in expected.items():
                shown = state[f"net.{name}"]
                assert shown.dtype == (value.dtype if stage == 3 or moe else torch.bfloat16)
                assert torch.equal(shown.to(value.dtype), value.to(shown.dtype).to(value.dtype)), (stage, name)
        saved = engine.save_checkpoint(f"{folder}/{stage}{moe}", tag=0)
        assert saved.name == "0" and engine.load_checkpoint(f"{folder}/{stage}{moe}", tag=0)[0] == str(saved)
        with pytest.raises(ValueError, match="tag"):
            engine.save_checkpoint(f"{folder}/{stage}{moe}", tag="")
        engine.close()


def test_one_rank_may_read_what_it_has_of_the_model(tmp_path: Path) -> None:
    """``module_state_dict()`` is collective only where ranks hold parts of tensors."""
    run_ranks(_state_of_one_rank, 2, str(tmp_path))


def _save_under_own_tag(rank: int, world: int, folder: str) -> list[str]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    found = []
    for mode in ("Warn", "Ignore", "Fail"):
        engine = initialize(model=nn.Linear(2, 2), config=config | {"checkpoint": {"tag_validation": mode}})[0]
        if mode == "Fail":
            with pytest.raises(AssertionError, match="different tags"):
                engine.save_checkpoint(folder, f"{mode}-{rank}")
        else:
            found.append(engine.save_checkpoint(folder, f"{mode}-{rank}").name)
            found.append(Path(engine.load_checkpoint(folder)[0]).name)
        engine.close()
    return found


def test_the_first_ranks_tag_counts_where_tags_differ(tmp_path: Path) -> None:
    """As where each rank makes its own of the time of day."""
    expected = ["Warn-0", "Warn-0", "Ignore-0", "Ignore-0"]
    assert run_ranks(_save_under_own_tag, 2, str(tmp_path)) == [expected] * 2


def test_the_launcher_is_called_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    from thalweg.cli.other_programs import run_deepspeed as main

    for counted in (["--num_nodes", "1"], ["--num_gpus", "1"]):
        with pytest.raises(ValueError, match="name hosts or count them"):
            main([*counted, "-i", "localhost", "train.py", "--include", "x"])
    with pytest.raises(SystemExit) as ended:
        main(["--num_gpus", "1", "--no_python", "echo", "-i", "x"])
    assert ended.value.code == 0 and "-i x" in capfd.readouterr().out, "what follows the script is the script's"


def test_a_checkpoint_is_written_where_files_have_no_permissions(tmp_path: Path) -> None:
    """As on Azure's file shares, which refuse chmod."""
    assert run_ranks(_without_permissions, 1, str(tmp_path)) == [(True, True)]


def test_batch_sizes_that_are_set_to_none_are_derived() -> None:
    from thalweg.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError

    config: Any = DeepSpeedConfig({"train_batch_size": 4})
    for given, expected in (((32, 16, None), (32, 16, 2)), ((None, 8, 2), (16, 8, 2)), ((None, 8, None), (8, 8, 1)),
                            ((32, 18, None), None), ((None, None, 2), None)):  # fmt: skip
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = given
        if expected is None:
            with pytest.raises(DeepSpeedConfigError):
                config._configure_train_batch_size()
            continue
        config._configure_train_batch_size()
        sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        assert sizes == expected


def _loss_scales(rank: int, world: int, stage: int) -> list[tuple[float, int, int]]:
    """Factor, iteration and last overflow after each of seven steps, of which the third and fourth overflow."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    config = {
        "train_micro_batch_size_per_gpu": 1, "fp16": fp16, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "log_level": "error",
    }  # fmt: skip
    engine, optimizer, _, _ = initialize(model=nn.Linear(4, 1, bias=False), config=config)
    scaler = optimizer.loss_scaler  # asked once, and live
    assert optimizer.dynamic_loss_scale and scaler.dynamic and scaler.scale_window == 2 and scaler.scale_factor == 2.0
    found = []
    for step in range(7):
        factor = float("inf") if step in (2, 3) else 1e-3
        engine.backward((engine(torch.ones(1, 4).half()) * factor).sum())
        engine.step()
        assert scaler.cur_scale == optimizer.cur_scale == optimizer.loss_scale_config.loss_scale
        found.append((scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter))
    with pytest.raises(AttributeError):
        _ = scaler.no_such_name
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_the_loss_scale_moves_as_deepspeeds(stage: int) -> None:
    """Its optimizer of stage 0 halves at each overflow, those of ZeRO at the second in a row."""
    (found,) = run_ranks(_loss_scales, 1, stage)
    third, fourth, later = (128.0, 64.0, 128.0) if stage == 0 else (256.0, 128.0, 256.0)
    overflow = [(third, 3, 2), (fourth, 4, 3), (fourth, 5, 3), (fourth, 6, 3), (later, 7, 3)]
    assert found == [(256.0, 1, -1), (256.0, 2, -1), *overflow]


def _pipeline_iterator(rank: int, world: int) -> tuple[float, list[float], list[float]]:
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "log_level": "error",
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "progressive_layer_drop": {"enabled": True, "theta": 0.5},
    }  # fmt: skip

    class Scale(nn.Module):
        """Reads theta where a program of DeepSpeed's may: among any keywords."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.told = nn.Parameter(torch.ones(1)), []

        def forward(self, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
            self.told.append(keywords["pld_theta"])
            return (self.weight * x).square().mean()

    engine = initialize(model=Scale(), config=config)[0]
    engine.set_dataloader([torch.full((1,), 0.5)])
    first = float(engine.train_batch())
    engine.set_dataiterator(iter([torch.full((1,), 0.25)] * 2))
    engine.train_batch()
    rates = [group["lr"] for group in engine.basic_optimizer.param_groups]
    thetas = [*engine.module.told[::2], engine.get_pld_theta()]
    engine.close()
    return first, rates, thetas


def test_a_window_of_a_set_iterator_and_layer_drop_by_keywords() -> None:
    ((first, rates, thetas),) = run_ranks(_pipeline_iterator, 1)
    second = 0.5 * torch.tensor(-0.001).exp().item() + 0.5
    assert first == 0.25 and rates == [0.5] and thetas == pytest.approx([1.0, second, second])


class _OwnRates(torch.optim.Optimizer):
    """One whose groups have no "lr", around another."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def _sparse(rank: int, world: int, stage: int) -> tuple[list[Any], list[Any]]:
    config = {"train_micro_batch_size_per_gpu": 2, "sparse_gradients": True, "gradient_clipping": 0.0}
    tokens, offsets = torch.tensor([1, 2, 4, 5, 4, 3]) + rank, torch.tensor([0, 3])
    moved = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=sparse))
        model.forward = lambda tokens, offsets, bag=model[0]: bag(tokens, offsets)  # type: ignore[method-assign]
        optimizer = _OwnRates(model.parameters()) if stage == 0 else torch.optim.SGD(model.parameters(), lr=0.5)
        config["zero_optimization"] = {"stage": stage}
        engine = initialize(model=model, config=config, optimizer=optimizer)[0]
        assert engine.get_lr() == ([0.0] if stage == 0 else [0.5])
        engine.backward(engine(tokens, offsets).square().sum())
        engine.step()
        moved.append(gather_state_dict(engine.state_dict())["0.weight"].tolist())
        engine.close()
    return moved[0], moved[1]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_embeddings_with_sparse_gradients_train_as_dense_ones(stage: int) -> None:
    for sparse, dense in run_ranks(_sparse, 2, stage):
        torch.manual_seed(0)
        assert sparse == dense != nn.EmbeddingBag(10, 4).weight.tolist()


def _transforms(rank: int, world: int, stage: int) -> tuple[list[float], list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine = initialize(model=model, config=config)[0]
    x = torch.randn(4)
    found = [torch.func.grad(lambda x, net=net: net(x).sum())(x).tolist() for net in (engine, plain)]
    leaf = x.clone().requires_grad_()
    engine(leaf).sum().backward()  # the control: a plain backward pass is divided by the accumulation steps
    assert leaf.grad is not None
    engine.close()
    return found[0], found[1], leaf.grad.tolist()


@pytest.mark.skipif(
    not RegisterPostBackwardFunction.generate_vmap_rule,
    reason="FSDP2 of torch 2.11 has an autograd function that no transform of torch.func goes through",
)
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_torch_func_are_the_callers_own(stage: int) -> None:
    ((through_engine, plain, divided),) = run_ranks(_transforms, 1, stage)
    assert through_engine == pytest.approx(plain, rel=1e-5)
    assert divided == pytest.approx([value / 4 for value in plain], rel=1e-5)


def test_moments_in_16_bits_where_they_are_asked_for() -> None:
    from thalweg.compat.deepspeed.optimizers import DeepSpeedCPUAdam, DeepSpeedCPULion

    for make, name in ((DeepSpeedCPUAdam, "exp_avg_sq"), (DeepSpeedCPULion, "exp_avg")):
        for in_fp32, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            param = nn.Parameter(torch.randn(128, 128))
            optimizer = make([param], fp32_optimizer_states=in_fp32)
            param.grad = torch.randn_like(param)
            optimizer.step()
            assert optimizer.state[param][name].dtype == dtype


def _hybrid(rank: int, world: int, stage: int, degree: int) -> list[tuple[list[list[int]], list[list[int]], str]]:
    """Before and after two large steps: what the engine generates, and the plain model of the same weights."""
    model = tiny_decoder("llama")
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
        "hybrid_engine": {"enabled": True, "inference_tp_size": degree, "release_inference_cache": True},
    }  # fmt: skip
    engine = initialize(model=model, config=config)[0]
    tokens = torch.tensor([[5, 9, 2, 7], [3, 3, rank + 1, 8]])
    found = []
    for beams in (1, 1, 2):
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
        here = engine.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), synced_gpus=True, **options)
        plain.load_state_dict(gather_state_dict(engine.module.state_dict()))
        there = plain.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)
        found.append((here.tolist(), there.tolist(), type(engine).__name__))
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    engine.close()
    return found


@pytest.mark.parametrize(("stage", "degree"), [(3, 1), nightly(2, 2), nightly(3, 2)])
def test_a_hybrid_engine_generates_with_the_weights_of_the_moment(stage: int, degree: int) -> None:
    """The last of the three calls is beams, which the module's own method searches."""
    of_ranks = run_ranks(_hybrid, 2, stage, degree)
    for found in of_ranks:
        assert all(here == there for here, there, _ in found), found
        assert found[0][2] == "DeepSpeedHybridEngine" and found[0][0] != found[1][0], "the steps change the text"
    assert of_ranks[0][0][0][1] != of_ranks[1][0][0][1], "each rank has prompts of its own"


def test_a_timer_leaves_out_the_first_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of 3 s and 1 s to an update of 8 samples, the second of two updates timed."""
    from thalweg.compat.deepspeed import timers

    clock = iter([100.0, 103.0, 200.0, 201.0])
    monkeypatch.setattr(timers, "time", lambda: next(clock))
    timer = timers.ThroughputTimer(None, 8, start_step=1)
    timer.stop(global_step=True)
    assert not timer.initialized and timer.global_step_count == 0 and timer.avg_samples_per_sec() == float("-inf")
    for ends in (False, True, False, True):
        timer.start()
        timer.stop(global_step=ends)
    assert (timer.micro_step_count, timer.global_step_count, timer.total_elapsed_time) == (4, 2, 4.0)
    assert timer.avg_samples_per_sec() == 2.0 and timer.step_elapsed_time == 0.0


def _pipeline(rank: int, world: int) -> dict[str, Any]:
    def build(**options: Any) -> Any:
        layers = [LayerSpec(nn.Linear, 2, 2, bias=False), LayerSpec(nn.Linear, 2, 4), nn.Linear(4, 2), torch.sum]
        return DeepSpeedPipelineModule(layers, num_stages=2, partition_method="uniform", base_seed=1234, **options)

    config = {"train_batch_size": 1, "gradient_clipping": 0.0}
    net = build()
    found: dict[str, Any] = {"local": [name for name, _ in net.named_parameters()]}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine = initialize(model=net, optimizer=optimizer, config=config)[0]
    before = engine.state_dict()
    engine.train_batch(iter([(torch.ones(1, 2), torch.zeros(1))]))
    found["moved"] = [name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])]
    found["values"] = before["layers.0.weight"].tolist()
    engine.close()
    with pytest.raises(ValueError, match=r"puts the layers \[.*leave those keys out"):
        initialize(model=build(), config={**config, "pipeline": {"partition": "type:Linear"}})
    with pytest.raises(ValueError, match="does not divide"):
        DeepSpeedPipelineModule([nn.Linear(2, 2)] * 3, num_stages=3)
    return found


def test_a_pipeline_is_cut_as_its_module_is_made() -> None:
    """An optimizer can be made of a rank's layers before ``initialize()``, and trains them."""
    torch.manual_seed(1234)  # of layer 0
    first = nn.Linear(2, 2, bias=False).weight.tolist()
    names = ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
    for found, local in zip(run_ranks(_pipeline, 2), (names[:3], names[3:]), strict=True):
        assert found == {"local": local, "moved": names, "values": first}


def _pass_over(loader: Any, num_batches: int) -> Iterator[Any]:
    """The rest of the first epoch that has more batches than are to be passed over, counted from the first pass on."""
    passed = 0
    while passed <= num_batches:
        for batch in loader:
            passed += 1
            if passed > num_batches:
                yield batch


# How a program comes to the batches that it has not seen, of which an epoch has ``size``.
WAYS_ON: dict[str, Any] = {
    "as the loader stands": lambda loader, size, epochs, seen: loader,
    "passes over in the epoch": lambda loader, size, epochs, seen: _pass_over(loader, seen),
    "passes over all": lambda loader, size, epochs, seen: _pass_over(loader, size * epochs + seen),
    "repeats": lambda loader, size, epochs, seen: islice(
        RepeatingLoader(loader), size * epochs + seen, size * (epochs + 1 + seen // size)
    ),
}


def _resumed_data(rank: int, world: int, folder: str) -> tuple[dict[Any, list[int]], list[str], list[int]]:
    """What is trained on from the epoch of the save on, by how the program goes on; warnings; and of other data."""

    def build(data: Any, **keys: Any) -> tuple[Any, Any]:
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, **keys}
        engine, _, loader, _ = initialize(model=nn.Linear(1, 1), config=config, training_data=data)
        return engine, loader

    def train(engine: Any, batches: Any) -> list[int]:
        seen = []
        for batch in batches:
            engine.backward(engine(batch).sum())
            engine.step()
            seen += batch.flatten().int().tolist()
        return seen

    data, size = [torch.full((1,), float(i)) for i in range(12)], 6 // world
    kinds = {"dataset": data} if world > 1 else {"dataset": data, "own loader": DataLoader(data, 2, shuffle=True)}
    found, warnings = {}, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module._log, "warning", lambda text, *_: warnings.append(text))
        patch.setattr(engine_module.logger, "warning", lambda text, *_: warnings.append(text))
        for (kind, given), epochs, seen in product(kinds.items(), (0, 1), (1, 2, size)):
            engine, loader = build(given)
            for _ in range(epochs):
                train(engine, loader)
            before = train(engine, islice(loader, seen))
            engine.save_checkpoint(folder, f"{kind}-{epochs}-{seen}")
            for way, take in WAYS_ON.items():
                torch.manual_seed(seen)
                engine, loader = build(given)
                engine.load_checkpoint(folder, f"{kind}-{epochs}-{seen}")
                warnings.clear()
                after = train(engine, take(loader, size, epochs, seen))
                found[kind, epochs, seen, way] = after if seen == size else before + after
                assert len(warnings) == (seen < size and way != "as the loader stands")
                engine.close()
        engine, loader = build(data)
        engine.load_checkpoint(folder, "dataset-0-1")
        ahead = train(engine, list(loader))
        engine, loader = build(data + data)
        warnings.clear()
        engine.load_checkpoint(folder, "dataset-1-2")
        other = train(engine, loader)
    return {**found, "ahead": ahead}, warnings, other


def _resumed_pipeline(rank: int, world: int, folder: str) -> list[list[float]]:
    """Inputs of the two windows after a save behind the first, and with it passed over; micro-batches come in twos."""
    taken: list[float] = []

    def build() -> tuple[Any, Any]:
        model = DeepSpeedPipelineModule([LayerSpec(nn.Linear, 1, 1)], num_stages=1, loss_fn=nn.functional.mse_loss)
        optimizer = {"type": "SGD", "params": {"lr": 1e-3}}
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "optimizer": optimizer}
        data = [(torch.full((1,), float(i)), torch.zeros(1)) for i in range(6)]
        engine, _, loader, _ = initialize(model=model, config=config, training_data=data)
        engine.set_batch_fn(lambda batch: taken.append(batch[0].item()) or batch)
        return engine, iter(RepeatingLoader(loader))

    engine, batches = build()
    for _ in range(3):
        engine.train_batch(batches)
        if not Path(folder, "latest").exists():
            engine.save_checkpoint(folder)
    found = [taken[2:]]
    for num_passed in (0, 2):
        engine, batches = build()
        engine.load_checkpoint(folder)
        for _ in range(num_passed):
            next(batches)
        taken.clear()
        engine.train_batch(batches)
        engine.train_batch(batches)
        found.append([*taken])
        engine.close()
    return found


def test_a_resumed_pipeline_takes_its_window_from_where_the_data_stand(tmp_path: Path) -> None:
    ((uninterrupted, resumed, passed_over),) = run_ranks(_resumed_pipeline, 1, str(tmp_path))
    assert resumed == passed_over == uninterrupted and len({*resumed}) == 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_program_sees_each_sample_of_the_epoch_once(world: int, tmp_path: Path) -> None:
    """Whether it relies on the loader's place, or passes over what it has seen as DeepSpeed's programs must."""
    ranks = run_ranks(_resumed_data, world, str(tmp_path))
    found = {key: sorted(sample for rank in ranks for sample in rank[0][key]) for key in ranks[0][0]}
    ahead = found.pop("ahead")
    assert found == {key: list(range(12)) for key in found}
    assert len(ahead) == 12 and len({*ahead}) == 12 - 2 * world, "read ahead: all but the batch before the save"
    for _, warnings, _ in ranks:
        assert warnings == ["as with DeepSpeed the data begin at their start: %s"], "other data"
    assert sorted(sample for rank in ranks for sample in rank[2]) == sorted([*range(12)] * 2)


class _Timesteps(nn.Module):
    """Computes with times in fp32, as diffusion models do, and notes what came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), {}

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        self.seen = {times.dtype: times.tolist(), "x": x.dtype}
        return self.linear(times.float().sin()[:, None].to(self.linear.weight.dtype) + x.to(self.linear.weight.dtype))


_BF16, _FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
_CASTS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16": (_BF16, 0),
    "fp16": ({"fp16": {"enabled": True, "auto_cast": False}}, 1),
    "fp16, nothing said": (_FP16, 3),
    "auto_cast": ({"fp16": {"enabled": True, "auto_cast": True}}, 2),
    "Apex": ({"amp": {"enabled": True, "opt_level": "O2", "cast_model_type": "bf16"}}, 1),
}


def _given_in_fp32(rank: int, world: int) -> dict[tuple[str, bool], dict[Any, Any]]:
    found = {}
    for (name, (sections, stage)), start in product(_CASTS.items(), (initialize, thalweg.initialize)):
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage}, "log_level": "error", **sections,
        }  # fmt: skip
        engine: Any = start(model=_Timesteps(), config=config)[0]
        engine.backward(engine(torch.ones(2, 4), torch.tensor([613.5, 997.25])).float().sum())
        engine.step()
        found[name, start is initialize] = engine.module.seen
        engine.close()
    return found


def test_inputs_in_fp32_are_rounded_only_where_that_is_asked_for() -> None:
    """Thalweg's own engine casts them, and is the control; so did Apex."""
    (found,) = run_ranks(_given_in_fp32, 1)
    exact = {torch.float32: [613.5, 997.25], "x": torch.float32}
    brain = {torch.bfloat16: [612.0, 996.0], "x": torch.bfloat16}
    half = {torch.float16: [613.5, 997.0], "x": torch.float16}
    assert {name: seen for (name, alias), seen in found.items() if alias} == {
        "bf16": exact, "fp16": exact, "fp16, nothing said": exact, "auto_cast": half, "Apex": brain,
    }  # fmt: skip
    assert {name: seen for (name, alias), seen in found.items() if not alias} == {
        "bf16": brain, "fp16": half, "fp16, nothing said": half, "auto_cast": half, "Apex": brain,
    }  # fmt: skip


def _cleared_in_each_micro_batch(rank: int, world: int) -> list[tuple[int, int, float]]:
    found = []
    for clears in (True, False):
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "gradient_clipping": 0.0,
        }  # fmt: skip
        engine = initialize(model=nn.Linear(1, 1, bias=False), config=config)[0]
        before = engine.state_dict()["weight"].item()
        for value in (1.0, 3.0, 5.0, 7.0):
            if clears:
                engine.zero_grad()
            engine.backward(engine(torch.full((1, 1), value)).sum())
            engine.step()
        found.append((engine.global_steps, engine.micro_steps, before - engine.state_dict()["weight"].item()))
        engine.close()
    return found


def test_gradients_may_be_cleared_in_each_micro_batch() -> None:
    """As a loop of plain PyTorch does: the count goes on, and what the last micro-batch adds is updated with."""
    for found in run_ranks(_cleared_in_each_micro_batch, 2):
        assert found == [(2, 4, pytest.approx((3 + 7) / 2)), (2, 4, pytest.approx((1 + 3 + 5 + 7) / 2))]


def _first_weights(rank: int, world: int) -> list[dict[str, list[float]]]:
    """Of each seed of the program, which ranks do not share: the weights before training."""
    found = []
    for make, start in ((PipelineModule, thalweg.initialize), (DeepSpeedPipelineModule, initialize)):
        for seed, stages in ((1, 2), (2, 2), (1, 1), (1, 2)):
            torch.manual_seed(seed + 100 * rank)
            layers = [*(LayerSpec(nn.Linear, 2, 2, bias=False) for _ in range(3))]
            tied = TiedLayerSpec("tied", nn.Linear, 2, 2, bias=False, tied_weight_attr="weight")
            model = make([tied, *layers, tied], num_stages=stages, loss_fn=nn.functional.mse_loss)
            config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
            engine = start(model=model, config=config)[0]
            here = {name: param.flatten().tolist() for name, param in engine.module.state_dict().items()}
            whole = {name: value.flatten().tolist() for name, value in engine.state_dict().items()}
            assert here.items() <= whole.items() and (stages > 1 or here == whole)
            found.append(whole)
            engine.close()
    return found


def test_the_layers_of_a_pipeline_follow_the_programs_seed() -> None:
    """That of the first rank: replicas and tied layers are alike.  No layer of one seed is another one of the next."""
    first, second = run_ranks(_first_weights, 2)
    assert first == second
    one, two, alone, again = first[:4]
    assert one == alone == again and first[4:] == first[:4]
    assert one["layers.0.weight"] == one["layers.4.weight"]
    values = [*one.values(), *two.values()]
    assert len({tuple(value) for value in values}) == 8 and len(values) == 10


def test_what_deepspeeds_programs_pass_along() -> None:
    """Arguments that mean nothing here, helpers of its compression, two configs, and methods that have another way."""
    from types import SimpleNamespace

    from thalweg.compat.deepspeed import collectives
    from thalweg.compat.deepspeed.surface import SURFACE
    from thalweg.compat.finder import NotOffered

    assert DeepSpeedPipelineModule([nn.Linear(2, 2)], dynamic_shape=True).num_parameters == 6
    assert DeepSpeedMoE(4, nn.Linear(4, 4), num_experts=2, use_tutel=True).num_experts == 2
    with pytest.raises(ValueError, match="leave it false"):
        DeepSpeedMoE(4, nn.Linear(4, 4), num_experts=2, enable_expert_tensor_parallelism=True)
    helper = SURFACE["deepspeed.compression.helper"]
    read, write = (pkgutil.resolve_name(str(helper[f"recursive_{verb}attr"])) for verb in ("get", "set"))
    net, layer = nn.Sequential(nn.Sequential(nn.Tanh()), nn.Tanh()), nn.Linear(2, 2)
    for name in ("0.0", "1"):
        write(net, name, layer)
        assert read(net, name) is layer
    with pytest.raises(AssertionError, match="and not both"):
        initialize(args=SimpleNamespace(deepspeed_config="/nowhere.json"), model=layer, config={"train_batch_size": 1})
    tracker = SURFACE["deepspeed.runtime.activation_checkpointing.checkpointing"]["get_cuda_rng_tracker"]
    assert isinstance(tracker, NotOffered) and "random states" in tracker.instead
    assert collectives.ReduceOp is torch.distributed.ReduceOp


def _named_calls(rank: int, world: int) -> None:
    from thalweg.compat.deepspeed import collectives

    value = torch.full((2,), rank + 1.0)
    collectives.all_reduce(value, log_name="sum", prof=False, debug="here")
    assert value.tolist() == [3.0, 3.0] and collectives.all_reduce.__name__ == "all_reduce"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = initialize(model=nn.Linear(2, 2), config=config)[0]
    with pytest.raises(ValueError, match="give initialize\\(\\) a collate_fn"):
        engine.set_data_post_process_func(lambda data, state: data)
    engine.close()


def test_collectives_take_the_names_of_their_calls() -> None:
    run_ranks(_named_calls, 2)


def _updates_of_epochs(rank: int, world: int) -> dict[str, int]:
    found = {}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }  # fmt: skip
    for name, make in {"alias": initialize, "own": thalweg.initialize}.items():
        engine, _, loader, _ = make(model=nn.Linear(4, 1), config=config, training_data=list(torch.randn(10, 4)))
        for _ in range(3):
            for batch in loader:
                engine.backward(engine(batch).sum())
                engine.step()
        found[name] = engine.global_steps
        engine.close()
    return found


def test_a_window_goes_on_with_the_next_epoch_as_deepspeeds() -> None:
    """(micro_steps + 1) % gradient_accumulation_steps there; Thalweg's own engine ends a window with its epoch."""
    assert run_ranks(_updates_of_epochs, 1) == [{"alias": 7, "own": 9}]
