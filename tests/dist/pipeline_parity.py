"""One process against an engine that drives a pipeline, on the same global batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import inspect
from tests.dist.models import VOCAB_SIZE, make_batch, tiny_gpt
from tests.dist.parity import full_named
from tests.dist.sequence_parity import make_hf_batch
from tests.dist.tensor_models import build_model
from thalweg.moe import MoE
from thalweg.nn.transformer import Block, GPTConfig
from thalweg.parallel.pipeline.module import LayerSpec, LocalLayers, PipelineModule, TiedLayerSpec
from thalweg.utils.trees import call_model, get_loss

WIDTH = 16
LR = 0.2


class Embed(nn.Module):
    """Token embedding; as a tied layer its weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB_SIZE, WIDTH) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class ResidualBlock(nn.Module):
    """A residual block that passes on a tensor and a count."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, times = value if isinstance(value, tuple) else (value, 1)
        x = x + self.down(torch.tanh(self.up(x))) / times
        return x, times + 1


def tied_head(embed: nn.Module, value: Any) -> Tensor:
    """The tied head."""
    return F.linear(value[0], embed.weight)


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def tied_layers(num: int = 4, **kwargs: Any) -> PipelineModule:
    """Embedding, blocks, and the embedding again as head."""
    layers = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(ResidualBlock, i) for i in range(num)),
        TiedLayerSpec("embed", Embed, forward_fn=tied_head),
    ]
    return PipelineModule(layers, loss_fn=token_loss, base_seed=1234, **kwargs)


def untied_layers() -> PipelineModule:
    """An embedding and a head of torch's, each on a stage of its own."""
    blocks = (LayerSpec(ResidualBlock, i) for i in range(4))
    ends = LayerSpec(nn.Embedding, VOCAB_SIZE, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB_SIZE)
    return PipelineModule([ends[0], *blocks, lambda value: value[0], ends[1]], loss_fn=token_loss)


class MoEBlock(nn.Module):
    """A residual layer of experts, spread over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.moe = MoE(WIDTH, expert, 4, 2, k=1, drop_tokens=False)
        with torch.no_grad():
            for parameter in self.moe.experts.stack.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, value: Any) -> Any:
        x, times = value if isinstance(value, tuple) else (value, 1)
        return x + self.moe(x)[0], times


def expert_layers() -> PipelineModule:
    """An embedding, experts on one stage and on the other, a head."""
    layers = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(kind) for kind in (ResidualBlock, MoEBlock, ResidualBlock, MoEBlock)),
        TiedLayerSpec("embed", Embed, forward_fn=tied_head),
    ]
    return PipelineModule(layers, loss_fn=token_loss, base_seed=1234, partition_method="uniform")


def merge_stages(model: PipelineModule) -> nn.Module:
    """All layers on one process."""
    return LocalLayers(model.specs, model.build_layers(range(len(model.specs))))


class InPlace(nn.Module):
    """A block that begins by writing to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return self.linear(F.relu(x, inplace=True)) * 0.5


def in_place_layers() -> PipelineModule:
    """Blocks that write to their inputs, the first of a stage too."""
    layers = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(InPlace) for _ in range(5)),
        lambda x: (x, 0),
        TiedLayerSpec("embed", Embed, forward_fn=tied_head),
    ]
    return PipelineModule(layers, loss_fn=token_loss, base_seed=1234, partition_method="type:InPlace|Embed")


def half_frozen() -> nn.Module:
    """A Llama of which the first stage of two trains nothing."""
    model = build_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "norm" in name or "head" in name)
    model.model.layers[0].requires_grad_(False)
    return model


class PositionalEmbed(Embed):
    """Token embedding with learned positions, which the inputs name."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(32, WIDTH) * 0.5)

    def forward(self, inputs: Any) -> Tensor:
        return F.embedding(inputs["input_ids"], self.weight) + self.positions[inputs["position_ids"]]


def attention_layers(**kwargs: Any) -> PipelineModule:
    """Layers of causal attention between a tied embedding and head."""
    shape = GPTConfig(n_head=4, n_embd=WIDTH)
    layers = [
        TiedLayerSpec("embed", PositionalEmbed),
        *(LayerSpec(Block, shape) for _ in range(4)),
        lambda x: (x, 0),
        TiedLayerSpec("embed", Embed, forward_fn=tied_head),
    ]
    return PipelineModule(layers, loss_fn=token_loss, base_seed=1234, **kwargs)


@dataclass(frozen=True)
class PipelineCase:
    """One pipeline run: ``kind`` of model, its axes and config, ``sizes`` of the micro-batches in turn.

    ``lengths``: of the sequences, in turn, of the kinds ``batch_kinds`` (sequence_parity.batch_of).
    """

    kind: str
    pp: int
    tp: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    num_micro_batches: int = 4
    sizes: tuple[int, ...] = (4,)
    extra: dict[str, Any] = field(default_factory=dict)
    sp: int = 1
    cp: int = 1
    lengths: tuple[int, ...] = ()
    batch_kinds: tuple[str, ...] = ("plain",)

    def config(self, world: int) -> dict[str, Any]:
        """The ds_config on so many ranks."""
        ranks = world // (self.pp * self.tp * self.sp * self.cp)
        return {
            "train_micro_batch_size_per_gpu": max(1, self.sizes[0] // ranks),
            "gradient_accumulation_steps": self.num_micro_batches,
            "gradient_clipping": 1.0,
            "cpu_kernels": "torch",
            "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
            "zero_optimization": {"stage": self.stage},
            "pipeline": {"stages": self.pp, "schedule": self.schedule},
            "tensor_parallel": {"autotp_size": self.tp},
            "sequence_parallel_size": self.sp,
            "context_parallel_size": self.cp,
            "log_level": "warning",
            **self.extra,
        }

    def model(self) -> nn.Module:
        """As a user makes it; a :class:`PipelineModule` or any other model."""
        if self.kind == "layers of experts":
            return expert_layers()
        if self.kind == "layers in place":
            return in_place_layers()
        if self.kind == "layers untied":
            return untied_layers()
        if self.kind == "half frozen":
            return half_frozen()
        if self.kind == "layers with attention":
            return attention_layers()
        if self.kind.startswith("layers"):
            return tied_layers(int(self.kind.removeprefix("layers") or 4))
        return tiny_gpt() if self.kind == "gpt" else build_model(self.kind)

    def micro_batches(self, rank: int = 0, data_ranks: int = 1) -> Iterator[Any]:
        """The micro-batches of one data-parallel rank, without end."""
        for step in count() if self.lengths else ():
            rows, length = self.sizes[step % len(self.sizes)], self.lengths[step % len(self.lengths)]
            batch_kind = self.batch_kinds[step % len(self.batch_kinds)]
            item = {k: v[rank::data_ranks] for k, v in make_hf_batch(batch_kind, step, rows, length).items()}
            if self.kind == "gpt" or self.kind.startswith("layers"):
                item |= {key: item[key].clamp(max=VOCAB_SIZE - 1) for key in ("input_ids", "labels")}
            if self.kind.startswith("layers"):
                position_ids = item.get("position_ids", torch.arange(length)[None].expand(len(item["labels"]), -1))
                labels = F.pad(item["labels"][:, 1:], (0, 1), value=-100)
                yield {"input_ids": item["input_ids"], "position_ids": position_ids}, labels
            elif self.kind == "gpt":
                yield item["input_ids"], F.pad(item["labels"][:, 1:], (0, 1), value=-100)
            else:
                yield {**item, "use_cache": False}  # with a cache documents are not looked for
        for step in count():
            tokens, labels = make_batch(step, self.sizes[step % len(self.sizes)])
            tokens, labels = tokens[rank::data_ranks], labels[rank::data_ranks]
            hugging_face = self.kind not in ("gpt",) and not self.kind.startswith("layers")
            yield {"input_ids": tokens, "labels": tokens} if hugging_face else (tokens, labels)

    def loss_weights(self, window: list[Any]) -> list[float]:
        """What each micro-batch counts: all the same, or by its targets."""
        if not self.extra.get("token_weighted_loss"):
            return [1 / len(window)] * len(window)
        labels = [i["labels"][:, 1:] if isinstance(i, dict) else i[1] for i in window]
        counts = [int((one != -100).sum()) for one in labels]
        return [one / sum(counts) for one in counts]

    def compute_loss(self, model: nn.Module, item: Any) -> Tensor:
        """What the engine trains on, in plain PyTorch."""
        if self.kind.startswith("layers"):
            return token_loss(model(item[0]), item[1])
        return get_loss(call_model(model, item))


@dataclass(frozen=True)
class PipelineResult:
    """``losses`` and gradient ``norms`` of each step, ``parameters`` at the end (nested lists, by name)."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, Any]

    def max_differences(self, other: PipelineResult) -> dict[str, float]:
        """The largest relative differences from ``other``, which has all parameters."""

        def max_relative_difference(actual: list[float], expected: list[float]) -> float:
            return max((abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)), default=0.0)

        parameters = 0.0
        for name, value in self.parameters.items():
            reference = torch.tensor(other.parameters[name])
            scale = max(float(reference.abs().max()), 1e-3)
            parameters = max(parameters, float((torch.tensor(value) - reference).abs().max()) / scale)
        return {
            "loss": max_relative_difference(self.losses, other.losses),
            "norm": max_relative_difference(self.grad_norms, other.grad_norms),
            "parameter": parameters,
        }


def run_plain(case: PipelineCase, steps: int, lr: float = LR) -> PipelineResult:
    """One process, micro-batch by micro-batch, plain PyTorch."""
    model = case.model()
    model = merge_stages(model) if isinstance(model, PipelineModule) else model
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms, data = [], [], case.micro_batches()
    for _ in range(steps):
        total = 0.0
        window = [next(data) for _ in range(case.num_micro_batches)]
        for item, weight in zip(window, case.loss_weights(window), strict=True):
            loss = case.compute_loss(model, item)
            if weight:
                (loss * weight).backward()
                total += loss.item() * weight
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    named = model.named_parameters(remove_duplicate=False)
    return PipelineResult(losses, norms, {name: p.detach().tolist() for name, p in named})


def run_engine(case: PipelineCase, world: int, steps: int) -> PipelineResult:
    """The engine on this rank."""
    import thalweg

    engine, *_ = thalweg.initialize(model=case.model(), config=case.config(world))
    mesh = inspect.data_mesh(engine)
    data = case.micro_batches(mesh.get_local_rank(), mesh.size())
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    hidden = inspect.excluded_names(engine)
    named = engine.module.named_parameters(remove_duplicate=False)
    found = full_named((name, p) for name, p in named if name not in hidden)
    parameters = {name: value.tolist() for name, value in found.items()}
    engine.close()
    return PipelineResult(losses, norms, parameters)
