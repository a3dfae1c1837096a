"""Lightning on Thalweg's engine: plain Lightning's losses, checkpoints at another stage, clipping, precision."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.marks import nightly

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
REUSE_RANKS = True
NUM_BATCHES, BATCH = 7, 8  # an odd number: the last window of an epoch is short
TOLERANCE = 1e-5


def _make_module() -> Any:
    import torch

    pl: Any = import_module("lightning.pytorch")

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            self.losses: list[float] = []

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.mse_loss(self(x), y)
            self.log("train_loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.mse_loss(self(x), y), sync_dist=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses.append(float(self.all_gather(outputs["loss"].detach()).mean()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return Regression()


def _loader(rank: int, world: int) -> Any:
    import torch

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_BATCHES * BATCH, 6, generator=draw)
    rows: Any = list(zip(x, x.sum(1, keepdim=True), strict=True))
    part = BATCH // world
    order = [i for at in range(0, len(rows), BATCH) for i in range(at + rank * part, at + (rank + 1) * part)]
    return torch.utils.data.DataLoader(rows, batch_size=part, sampler=order)


def _fit(
    rank: int, world: int, folder: str, stage: int | None, options: dict[str, Any], resume: str | None = None
) -> dict[str, Any]:
    """Two epochs; a checkpoint after the first."""
    import torch

    pl: Any = import_module("lightning.pytorch")
    environment = import_module("lightning.pytorch.plugins.environments").TorchElasticEnvironment()
    strategy: Any = "auto"
    callbacks = []
    if stage is not None:
        from thalweg.compat.lightning import ThalwegStrategy

        strategy = ThalwegStrategy(stage=stage, cluster_environment=environment)
        callbacks = [pl.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)]
    settings: dict[str, Any] = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "enable_checkpointing": stage is not None,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False),
    }
    trainer = pl.Trainer(accelerator="cpu", devices=world, strategy=strategy, callbacks=callbacks, **settings | options)
    module = _make_module()
    trainer.fit(module, _loader(rank, world), _loader(rank, world), ckpt_path=resume)
    evaluated = trainer.validate(module, _loader(rank, world), verbose=False)[0]["val_loss"]
    device = str(module.device)
    if torch.distributed.is_initialized() and stage is None:
        torch.distributed.destroy_process_group()
    return {"losses": module.losses, "val": evaluated, "steps": trainer.global_step, "device": device}


def _difference(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("stage", [nightly(0), nightly(1), nightly(2), 3])
def test_strategy_equals_plain_lightning(stage: int, tmp_path: Path) -> None:
    plain = run_ranks(_fit, 1, str(tmp_path / "plain"), None, {})[0]
    ours = run_ranks(_fit, 2, str(tmp_path / "ours"), stage, {})
    for result in ours:
        assert _difference(result["losses"], plain["losses"]) < TOLERANCE
        assert abs(result["val"] - plain["val"]) < TOLERANCE
        assert result["steps"] == plain["steps"] == 2 * (NUM_BATCHES // 2 + 1)
        assert result["device"] == "cpu"
    unclipped = run_ranks(_fit, 1, str(tmp_path / "other"), None, {"gradient_clip_val": None})[0]
    assert _difference(unclipped["losses"], plain["losses"]) > TOLERANCE
    # Resumed from the first epoch's checkpoint at another stage.
    again = run_ranks(_fit, 2, str(tmp_path / "again"), 5 - max(stage, 2), {}, str(tmp_path / "ours" / "epoch=0.ckpt"))
    assert _difference(again[0]["losses"], plain["losses"][NUM_BATCHES:]) < TOLERANCE


@pytest.mark.nightly
def test_precision_and_what_is_refused(tmp_path: Path) -> None:
    plain = run_ranks(_fit, 1, str(tmp_path / "plain"), None, {})[0]
    for result in run_ranks(_fit, 2, str(tmp_path / "bf16"), 2, {"precision": "bf16-mixed"}):
        apart = _difference(result["losses"], plain["losses"])
        assert TOLERANCE < apart < 0.05
    with pytest.raises(AssertionError, match="the engine clips the norm"):
        run_ranks(_fit, 2, str(tmp_path / "value"), 2, {"gradient_clip_algorithm": "value"})


LIMIT = 1e-6


def _clip(rank: int, world: int, folder: str, way: str, strategy: str, config: dict[str, Any]) -> float:
    """How far SGD at rate 0.1 moves the weights in one epoch where gradients are clipped to LIMIT in one way."""
    import torch

    pl: Any = import_module("lightning.pytorch")

    class Clipped(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(6, 1)
            self.automatic_optimization = way != "manual"

        def training_step(self, batch: Any, _: int) -> Any:
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if way == "manual":
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
                optimizer.step()
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=LIMIT if way == "hook" else None)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    chosen: Any = strategy
    if strategy == "thalweg":
        from thalweg.compat.lightning import ThalwegStrategy

        environment = import_module("lightning.pytorch.plugins.environments").TorchElasticEnvironment()
        chosen = ThalwegStrategy(config, cluster_environment=environment)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=chosen, max_epochs=1, default_root_dir=folder,
        **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False),
    )  # fmt: skip
    module = Clipped()
    before = module.net.weight.detach().clone()
    trainer.fit(module, _loader(0, 1))
    return float((module.net.weight.detach() - before).norm())


@pytest.mark.parametrize("way", ["manual", "hook"])
def test_clipping_that_the_engine_would_not_do_is_refused(way: str, tmp_path: Path) -> None:
    plain = run_ranks(_clip, 1, str(tmp_path), way, "auto", {}, reuse=False)[0]
    assert 0 < plain < 1e-5, "it clips nothing"
    with pytest.raises(AssertionError, match=r"gradient_clipping is 0\.5: set that to 1e-06"):
        run_ranks(_clip, 1, str(tmp_path), way, "thalweg", {"gradient_clipping": 0.5})
    ours = run_ranks(_clip, 1, str(tmp_path), way, "thalweg", {"gradient_clipping": LIMIT})[0]
    assert ours == pytest.approx(plain, rel=0.2)


def test_the_config_clips_where_trainer_does_not(tmp_path: Path) -> None:
    moved = [
        run_ranks(_clip, 1, str(tmp_path), "config", "thalweg", {"gradient_clipping": limit})[0]
        for limit in (LIMIT, 0.0)
    ]
    assert 0 < moved[0] < 1e-5 and moved[1] > 0.1


class _Killed(Exception):
    pass


def _saved_twice(rank: int, world: int, folder: str, dies: str) -> list[tuple[list[float], int]]:
    """(weights, what the loops' file says) of one name that is saved again, and again by who dies at one place."""
    import torch

    from thalweg.compat.lightning import ThalwegStrategy

    pl: Any = import_module("lightning.pytorch")
    environment = import_module("lightning.pytorch.plugins.environments").TorchElasticEnvironment()
    strategy = ThalwegStrategy(stage=3, cluster_environment=environment)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, use_distributed_sampler=False,
        default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, logger=False,
    )  # fmt: skip
    module = _make_module()
    trainer.fit(module, _loader(rank, world))
    assert strategy.engine is not None
    weights: Any = strategy.engine.module.get_parameter("net.0.weight")

    def fill(value: float) -> None:
        with torch.no_grad():
            weights.fill_(value)

    def look() -> tuple[list[float], int]:
        loaded = strategy.load_checkpoint(path, weights_only=False)
        return weights.full_tensor().flatten()[:2].tolist(), loaded["says"]

    path, found = Path(folder, "last.ckpt"), []
    for value in (1, 2):
        fill(value)
        strategy.save_checkpoint({"says": value}, path)
        found.append(look())
    assert len(list(path.glob("lightning*.ckpt"))) == 1

    def die(*_: Any, **__: Any) -> None:
        raise _Killed

    fill(3)
    owner: Any = strategy.checkpoint_io if dies == "loops" and rank == 0 else strategy.engine
    name = "wait_for_checkpoint" if dies == "after" else "save_checkpoint"
    whole = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **options: (whole(*args, **options) if dies == "after" else 0, die()))
        with pytest.raises(_Killed):
            strategy.save_checkpoint({"says": 3}, path)
    found.append(look())
    return found


@pytest.mark.parametrize("dies", ["loops", nightly("weights"), "after"])
def test_a_name_that_is_saved_again_has_weights_and_loops_of_one_save_whoever_dies(tmp_path: Path, dies: str) -> None:
    for found in run_ranks(_saved_twice, 2, str(tmp_path), dies):
        last = 3 if dies == "after" else 2
        assert found == [([1, 1], 1), ([2, 2], 2), ([last, last], last)]
