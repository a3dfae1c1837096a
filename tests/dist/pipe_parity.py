"""One process against an engine that drives a pipeline, on the same global batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.models import VOCABULARY, batch, tiny_gpt
from tests.dist.parity import full
from tests.dist.sequence_parity import batch_of
from tests.dist.tensor_models import build
from thalweg.moe import MoE
from thalweg.nn.transformer import Block, GPTConfig
from thalweg.parallel.pipeline.module import LayerSpec, PipelineModule, LocalLayers, TiedLayerSpec
from thalweg.utils.trees import call_model, get_loss

WIDTH = 16
LR = 0.2


class Embed(nn.Module):
    """Token embedding; as a tied layer its weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Mixer(nn.Module):
    """A residual block that passes on a tensor and a count."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        x, times = value if isinstance(value, tuple) else (value, 1)
        x = x + self.down(torch.tanh(self.up(x))) / times
        return x, times + 1


def logits(embed: nn.Module, value: Any) -> Tensor:
    """The tied head."""
    return F.linear(value[0], embed.weight)


def token_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def tied_layers(num: int = 4, **kwargs: Any) -> PipelineModule:
    """Embedding, blocks, and the embedding again as head."""
    layers = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(Mixer, i) for i in range(num)),
        TiedLayerSpec("embed", Embed, forward_fn=logits),
    ]
    return PipelineModule(layers, loss_fn=token_loss, **kwargs)


class Experts(nn.Module):
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
        *(LayerSpec(kind) for kind in (Mixer, Experts, Mixer, Experts)),
        TiedLayerSpec("embed", Embed, forward_fn=logits),
    ]
    return PipelineModule(layers, loss_fn=token_loss, partition_method="uniform")


def whole(model: PipelineModule) -> nn.Module:
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
        TiedLayerSpec("embed", Embed, forward_fn=logits),
    ]
    return PipelineModule(layers, loss_fn=token_loss, partition_method="type:InPlace|Embed")


def half_frozen() -> nn.Module:
    """A Llama of which the first stage of two trains nothing."""
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name or "norm" in name or "head" in name)
    model.model.layers[0].requires_grad_(False)
    return model


class EmbedAt(Embed):
    """Token embedding with learned positions, which the inputs name."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(32, WIDTH) * 0.5)

    def forward(self, inputs: Any) -> Tensor:
        return F.embedding(inputs["input_ids"], self.weight) + self.places[inputs["position_ids"]]


def attention_layers(**kwargs: Any) -> PipelineModule:
    """Layers of causal attention between a tied embedding and head."""
    shape = GPTConfig(n_head=4, n_embd=WIDTH)
    layers = [
        TiedLayerSpec("embed", EmbedAt),
        *(LayerSpec(Block, shape) for _ in range(4)),
        lambda x: (x, 0),
        TiedLayerSpec("embed", Embed, forward_fn=logits),
    ]
    return PipelineModule(layers, loss_fn=token_loss, **kwargs)


@dataclass(frozen=True)
class Case:
    """One pipeline run: ``kind`` of model, its axes and config, ``sizes`` of the micro-batches in turn.

    ``lengths``: of the sequences, in turn, of the kinds ``textures`` (sequence_parity.batch_of).
    """

    kind: str
    pp: int
    tp: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    micros: int = 4
    sizes: tuple[int, ...] = (4,)
    extra: dict[str, Any] = field(default_factory=dict)
    sp: int = 1
    cp: int = 1
    lengths: tuple[int, ...] = ()
    textures: tuple[str, ...] = ("plain",)

    def config(self, world: int) -> dict[str, Any]:
        """The ds_config on so many ranks."""
        ranks = world // (self.pp * self.tp * self.sp * self.cp)
        return {
            "train_micro_batch_size_per_gpu": max(1, self.sizes[0] // ranks),
            "gradient_accumulation_steps": self.micros,
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
        if self.kind == "half frozen":
            return half_frozen()
        if self.kind == "layers with attention":
            return attention_layers()
        if self.kind.startswith("layers"):
            return tied_layers(int(self.kind.removeprefix("layers") or 4))
        return tiny_gpt() if self.kind == "gpt" else build(self.kind)

    def data(self, rank: int = 0, ranks: int = 1) -> Iterator[Any]:
        """The micro-batches of one data-parallel rank, without end."""
        for step in count() if self.lengths else ():
            rows, length = self.sizes[step % len(self.sizes)], self.lengths[step % len(self.lengths)]
            texture = self.textures[step % len(self.textures)]
            item = {k: v[rank::ranks] for k, v in batch_of(texture, step, rows, length).items()}
            if self.kind == "gpt" or self.kind.startswith("layers"):
                item |= {key: item[key].clamp(max=VOCABULARY - 1) for key in ("input_ids", "labels")}
            if self.kind.startswith("layers"):
                places = item.get("position_ids", torch.arange(length)[None].expand(len(item["labels"]), -1))
                labels = F.pad(item["labels"][:, 1:], (0, 1), value=-100)
                yield {"input_ids": item["input_ids"], "position_ids": places}, labels
            elif self.kind == "gpt":
                yield item["input_ids"], F.pad(item["labels"][:, 1:], (0, 1), value=-100)
            else:
                yield {**item, "use_cache": False}  # with a cache documents are not looked for
        for step in count():
            tokens, labels = batch(step, self.sizes[step % len(self.sizes)])
            tokens, labels = tokens[rank::ranks], labels[rank::ranks]
            hugging_face = self.kind not in ("gpt",) and not self.kind.startswith("layers")
            yield {"input_ids": tokens, "labels": tokens} if hugging_face else (tokens, labels)

    def weights(self, window: list[Any]) -> list[float]:
        """What each micro-batch counts: all the same, or by its targets."""
        if not self.extra.get("token_weighted_loss"):
            return [1 / len(window)] * len(window)
        labels = [i["labels"][:, 1:] if isinstance(i, dict) else i[1] for i in window]
        counts = [int((one != -100).sum()) for one in labels]
        return [one / sum(counts) for one in counts]

    def loss(self, model: nn.Module, item: Any) -> Tensor:
        """What the engine trains on, in plain PyTorch."""
        if self.kind.startswith("layers"):
            return token_loss(model(item[0]), item[1])
        return get_loss(call_model(model, item))


@dataclass(frozen=True)
class Run:
    """``losses`` and gradient ``norms`` of each step, ``parameters`` at the end (nested lists, by name)."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Any]

    def differences(self, other: Run) -> dict[str, float]:
        """The largest relative differences from ``other``, which has all parameters."""

        def worst(found: list[float], wanted: list[float]) -> float:
            return max((abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)), default=0.0)

        parameters = 0.0
        for name, value in self.parameters.items():
            wanted = torch.tensor(other.parameters[name])
            scale = max(float(wanted.abs().max()), 1e-3)
            parameters = max(parameters, float((torch.tensor(value) - wanted).abs().max()) / scale)
        return {
            "loss": worst(self.losses, other.losses),
            "norm": worst(self.norms, other.norms),
            "parameter": parameters,
        }


def run_plain(case: Case, steps: int, lr: float = LR) -> Run:
    """One process, micro-batch by micro-batch, plain PyTorch."""
    model = case.model()
    model = whole(model) if isinstance(model, PipelineModule) else model
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms, data = [], [], case.data()
    for _ in range(steps):
        total = 0.0
        window = [next(data) for _ in range(case.micros)]
        for item, weight in zip(window, case.weights(window), strict=True):
            loss = case.loss(model, item)
            if weight:
                (loss * weight).backward()
                total += loss.item() * weight
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    named = model.named_parameters(remove_duplicate=False)
    return Run(losses, norms, {name: p.detach().tolist() for name, p in named})


def run_engine(case: Case, world: int, steps: int) -> Run:
    """The engine on this rank."""
    import thalweg

    engine, *_ = thalweg.initialize(model=case.model(), config=case.config(world))
    mesh = engine._parts.axes.batch
    data = case.data(mesh.get_local_rank(), mesh.size())
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    hidden = engine._parts.naming.hidden
    named = engine.module.named_parameters(remove_duplicate=False)
    found = {name: full(p).tolist() for name, p in named if name not in hidden}
    engine.close()
    return Run(losses, norms, found)
