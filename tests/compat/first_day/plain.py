"""What each program of ``programs/`` reports, computed by plain PyTorch in one process (or known from the papers).

A function has the name of its program.  ``losses...`` of a program are those of one rank; their mean over the ranks is
what stands here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy, l1_loss, linear, mse_loss

from tests.compat.first_day.programs.user_model import ROWS, STEPS, WIDTH, Net, batches, make_net

Report = dict[str, Any]
LR = 1e-2


def _train(
    net: nn.Module | None = None,
    make: Callable[..., Any] = torch.optim.AdamW,
    rows: Iterable[Any] | None = None,
    accumulation: int = 1,
    clip: float = 0.0,
    loss_of: Callable[[nn.Module, Any, Any], Tensor] | None = None,
    on_step: Callable[[nn.Module, Any, int], None] | None = None,
    lrs: list[float] | None = None,
    params: Any = None,
    **hyper: Any,
) -> list[float]:
    net = net or make_net()
    hyper = {"lr": LR, "weight_decay": 0.0} | hyper
    optimizer = make(params or [p for p in net.parameters() if p.requires_grad], **hyper)
    losses = []
    for step, (x, y) in enumerate(rows or batches()):
        if lrs:
            optimizer.param_groups[0]["lr"] = lrs[step]
        loss = (loss_of or (lambda net, x, y: mse_loss(net(x), y)))(net, x, y)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            if on_step:
                on_step(net, optimizer, step)
            optimizer.zero_grad()
    return losses


def plain_loop() -> Report:
    return {"losses": _train(), "steps": STEPS}


def command_line() -> Report:
    return {"losses": _train(), "flag": True}


def config_forms() -> Report:
    return {"losses": _train(), "same": True}


def batch_keys() -> Report:
    return {"sizes": [(8, 4, 1), (8, 2, 2), (8, 1, 4), (12, 3, 2)]}


def _half(dtype: torch.dtype) -> tuple[nn.Module, Callable[..., Tensor]]:
    """Masters in fp32, a copy of them that computes, gradients back."""

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        names = {name: value.to(dtype) for name, value in net.named_parameters()}
        return mse_loss(torch.func.functional_call(net, names, (x.to(dtype),)).float(), y)

    return make_net(), loss_of


def bf16() -> Report:
    net, loss_of = _half(torch.bfloat16)
    return {"losses": _train(net, loss_of=loss_of), "bf16": True, "fp16": False}


def fp16() -> Report:
    net, loss_of = _half(torch.float16)
    rows = list(batches())
    del rows[2]  # whose update is skipped
    return {"losses": _train(net, loss_of=loss_of, rows=rows), "fp16": True, "skipped": 1, "scale": 2.0**9}


def clipping() -> Report:
    norms: list[float] = []
    net, losses = make_net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for x, y in batches():
        loss = mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "clipping": 0.1}


def own_windows() -> Report:
    net, losses, rows = make_net(), [], batches()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for size in (2, 3, 1):
        for _ in range(size):
            x, y = next(iter(rows))
            loss = mse_loss(net(x), y)
            (loss / size).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    report = {"losses": losses, "applied": [True] * 3, "samples": [2 * ROWS, 5 * ROWS, 6 * ROWS], "managed": False}
    return {**report, "steps": 3, "micro": 6, "refused": True}


def accumulation() -> Report:
    return {
        "losses": _train(accumulation=2),
        "boundaries": [False, True] * (STEPS // 2),
        "steps": STEPS // 2,
        "micro": STEPS,
    }


def schedules() -> Report:
    """The rate of update n is that of iteration n - 1; the first uses iteration 0 as well."""
    iterations = [0, *range(STEPS - 1)]
    rates = {
        "WarmupLR": [0.01 * min(1.0, n / 4) for n in iterations],
        "WarmupDecayLR": [0.01 * (n / 2 if n < 2 else (8 - n) / 6) for n in iterations],
        "WarmupCosineLR": [],
        "OneCycle": [0.001 + 0.009 * (n + 1 if n < 3 else 6 - n - 1) / 3 for n in [-1, *range(STEPS - 1)]],
        "LRRangeTest": [0.001 * (1 + (n + 1) / 2) for n in [-1, *range(STEPS - 1)]],
    }
    for n in iterations:
        ratio = 0.0 + 1.0 * (math.log(n + 1) / math.log(2) if n < 2 else 0.0)
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (n - 2 + 1) / 6)) / 2
        rates["WarmupCosineLR"].append(LR * (ratio if n < 2 else cosine))
    report: Report = {}
    for name, values in rates.items():
        report |= {f"losses of {name}": _train(lrs=values), f"rates of {name}": values}
    return report


def client_optimizer() -> Report:
    losses = _train(lr=0.02, weight_decay=0.1)
    return {"losses": losses, "losses of the made": losses}


def client_scheduler() -> Report:
    rates = [LR * 0.5 ** (step // 2) for step in range(STEPS)]
    return {"losses": _train(lrs=rates), "rates": rates, "again": True}


def param_groups() -> Report:
    net = make_net()
    named = list(net.blocks.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
        {"params": list(net.head.parameters()), "lr": 0.05, "weight_decay": 0.0},
    ]
    return {
        "losses": _train(net, params=groups, betas=(0.8, 0.95), eps=1e-7),
        "rates": [0.01, 0.01, 0.05],
        "groups": 3,
    }


def training_data() -> Report:
    return {"seen": 4 * STEPS * ROWS // 2, "length": STEPS, "learns": True, "steps": 4 * STEPS}


def repeating_loader() -> Report:
    rows = list(batches(count=3))
    return {"losses": _train(rows=(rows * 3)[:8])}


def checkpoints() -> Report:
    losses = _train(lrs=_warmup_log(STEPS, 4))
    return {"losses": losses, "losses from two": losses[2:4], "latest": "four"}


def _warmup_log(count: int, steps: int) -> list[float]:
    return [LR * min(1.0, math.log(n + 1) / math.log(steps)) for n in [0, *range(count - 1)]]


def zero_to_fp32() -> Report:
    net = make_net()
    _train(net)
    return {
        "norms": {name: value.norm().item() for name, value in net.state_dict().items()},
        "loss": [mse_loss(net(x), y).item() for x, y in batches(seed=2)],
        "losses": [mse_loss(net(x), y).item() for x, y in batches(seed=2)],
    }


def save_16bit_model() -> Report:
    net, loss_of = _half(torch.bfloat16)
    _train(net, loss_of=loss_of)
    norms = {name: value.bfloat16().float().norm().item() for name, value in sorted(net.state_dict().items())}
    return {"dtypes": ["torch.bfloat16"], "norms": norms}


def zero_init() -> Report:
    return {"losses": _train()}


def gathered_parameters() -> Report:
    net = make_net()
    nn.init.constant_(net.head.weight, 0.25)
    losses = _train(net)
    norms = [p.norm().item() for p in net.parameters()]
    return {"losses": losses, "norms": norms, "shapes": [list(p.shape) for p in net.parameters()]}


def zero_init_weights() -> Report:
    net = make_net()
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)
            nn.init.zeros_(module.bias)
    return {"losses": _train(net)}


def safe_access() -> Report:
    net: Any = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    report: dict[str, list[Any]] = {name: [] for name in ("losses", "grads", "moments", "weights", "squares")}
    head, first = net.head.weight, net.blocks[0].weight

    def square(tensor: Tensor) -> float:
        return (tensor.double() ** 2).sum().item()

    for step, (x, y) in enumerate(batches()):
        loss = mse_loss(net(x), y)
        loss.backward()
        report["grads"].append([p.grad.norm().item() for p in net.parameters()])
        report["squares"].append(square(first.grad))
        if step == 1:
            first.grad.mul_(0.25)
            net.blocks[1].weight.grad.mul_(3.0)
            for param in net.head.parameters():
                param.grad.copy_(param.grad.sign() * 0.5)
        optimizer.step()
        optimizer.zero_grad()
        report["losses"].append(loss.item())
        report["moments"].append(optimizer.state[head]["exp_avg"].norm().item())
        report["weights"].append(head.norm().item())
        report["squares"] += [square(first), square(optimizer.state[first]["exp_avg"])]
        if step == 2:
            head.data.mul_(0.5)
            optimizer.state[head]["exp_avg"].zero_()
        if step == 3:
            first.data.mul_(-1.5)
            optimizer.state[first]["exp_avg"].add_(0.01)
    return {"refused": True, **report}


class _Chain(nn.Module):
    """Layers in a row, of which some are called by a function."""

    def __init__(self, layers: Callable[[], list[nn.Module]], forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self._forward = nn.ModuleList(layers()), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self.layers, x).squeeze(-1)


def external_parameter() -> Report:
    def forward(layers: Any, x: Tensor) -> Tensor:
        x = torch.tanh(layers[0](x))
        return layers[1](torch.tanh(linear(x, layers[0].weight.t())))

    return {"losses": _train(_Chain(lambda: [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)], forward))}


def leaf_modules() -> Report:
    """Each rank's rows choose for themselves, so the batch is worked on in its two halves."""

    def forward(layers: Any, x: Tensor) -> Tensor:
        halves = []
        for half in x.chunk(2):
            for first in (0, 3):
                best = int(half.detach().abs().sum() * 10) % 2
                half = torch.tanh(layers[first + best](half))
            halves.append(layers[6](half))
        return torch.cat(halves)

    layers = lambda: [*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 1)]
    return {"losses": _train(_Chain(layers, forward)), "leaves": 2, "flag": True}


def activation_checkpointing() -> Report:
    def forward(layers: Any, x: Tensor) -> Tensor:
        for block in layers[:3]:
            x = torch.tanh(block(x))
        return layers[3](x)

    layers = lambda: [*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, 1)]
    return {"losses": _train(_Chain(layers, forward)), "calls": 2 * 3 * STEPS}


def _language_rows(count: int, vocab: int, shape: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, vocab, shape, generator=draw) for _ in range(count)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def _token_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(net(x).flatten(0, 1), y.flatten())


def pipeline() -> Report:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.embedding = nn.Embedding(12, WIDTH)
            self.blocks = nn.ModuleList()
            for seed in (4, 5):
                torch.manual_seed(seed)
                self.blocks.append(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return x @ self.embedding.weight.t()

    net = Tied()
    losses = _train(net, rows=_language_rows(8, 12, (2, 5)), accumulation=2, loss_of=_token_loss)
    with torch.no_grad():
        evaluated = sum(_token_loss(net, x, y).item() for x, y in _language_rows(2, 12, (2, 5))) / 2
    means = [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    return {"losses": means, "evaluated": evaluated, "stages": 2, "ends": True}


def moe() -> Report:
    """One expert a token, weighted by its share; no token is dropped."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from thalweg.moe import MoE

            torch.manual_seed(0)
            self.first = nn.Linear(WIDTH, WIDTH)
            expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            layer = MoE(WIDTH, expert, num_experts=4, k=1)
            self.gate = nn.Parameter(dict(layer.named_parameters())["gate.weight"].detach().clone())
            stacks = {n: p.detach().clone() for n, p in layer.named_parameters() if "expert" in n}
            (weight,) = [p for p in stacks.values() if p.ndim == 3]
            (bias,) = [p for p in stacks.values() if p.ndim == 2]
            self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            gates = linear(x, self.gate).softmax(-1)
            share, best = gates.max(-1)
            rows = [
                torch.tanh(linear(row, self.weight[e], self.bias[e])) for row, e in zip(x, best.tolist(), strict=True)
            ]
            return self.head(torch.stack(rows) * share[:, None]).squeeze(-1)

    return {"losses": _train(Sparse()), "groups": 2, "experts": True}


def no_sync() -> Report:
    return {"losses": _train(accumulation=2), "steps": STEPS // 2}


def gan() -> Report:
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    discriminator = make_net()
    of_g = torch.optim.AdamW(generator.parameters(), lr=LR, weight_decay=0.0)
    of_d = torch.optim.AdamW(discriminator.parameters(), lr=LR, weight_decay=0.0)
    draw = torch.Generator().manual_seed(9)
    losses, losses_g = [], []
    for real, _ in batches():
        noise = torch.randn(ROWS, 4, generator=draw)
        on_real, on_fake = discriminator(real), discriminator(generator(noise).detach())
        loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        losses.append(loss.item())
        on_fake = discriminator(generator(noise))
        loss = bce(on_fake, torch.ones_like(on_fake))
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        losses_g.append(loss.item())
    return {"losses": losses, "losses of the generator": losses_g}


def collectives() -> Report:
    """Ranks hold (1, 1, 1, 1) and (2, 2, 2, 2)."""
    values = [12.0, 8.0, 8.0, 12.0, 6.0, 6.0, 12.0, 2.0, 4.0, 8.0]
    return {"values": values, "local": True, "global": [0, 1]}


def accelerator() -> Report:
    return dict.fromkeys(("same", "on", "memory", "dtypes", "backend", "available", "bf16"), True)


def logging_calls() -> Report:
    return {"own": True}


def monitors() -> Report:
    return {"losses": _train(), "written": True, "rows": True}


def flops_profiler() -> Report:
    macs = 2 * WIDTH * WIDTH + WIDTH
    params = sum(p.numel() for p in make_net().parameters())
    whole = [2 * ROWS * macs, ROWS * macs, params]
    return {"model": whole, "counts": [ROWS * macs, ROWS * macs // 2, params]}


def on_device() -> Report:
    plain = sorted({f"{p.device}{p.dtype}" for p in Net().parameters()})
    return {
        "meta": ["metatorch.float16"] * len(list(Net().parameters())),
        "half": ["cputorch.bfloat16"],
        "plain": plain,
        "default": "torch.float32",
    }


def tensor_parallel() -> Report:
    def forward(layers: Any, x: Tensor) -> Tensor:
        for up, down in ((0, 1), (2, 3)):
            x = x + layers[down](torch.tanh(layers[up](x)))
        return layers[4](x)

    def layers() -> list[nn.Module]:
        blocks = [nn.Linear(*size) for _ in range(2) for size in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))]
        return [*blocks, nn.Linear(WIDTH, 1)]

    return {"losses": _train(_Chain(layers, forward)), "batch": ROWS}


def inference() -> Report:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=39)
    model: Any = GPT2LMHeadModel(shape).eval()
    prompt = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = model(prompt).logits.norm().item()
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    return {"tokens": tokens[0].tolist(), "logits": logits, "module": True}


def inference_in_a_pipeline() -> Report:
    from tests.compat.first_day.programs.user_model import make_text_pipeline

    pipe: Any = make_text_pipeline()
    texts = [pipe(text, max_new_tokens=8, do_sample=False)[0]["generated_text"] for text in ("w5 w6 w7 w8", "w9 w3")]
    return {"texts": texts, "several": 2, "module": True}


def memory_estimates() -> Report:
    """Bytes a parameter: 2 + 2 for half weights and gradients, 4 + 4 + 4 for master and moments, 4 for gradients."""
    params, largest, gpus = int(3e9), int(1e8), 8
    stage_3 = [params * 18 // 8 * 8 * 1.5, 4 * largest, 4 * largest]
    return {"stage 3": stage_3, "stage 2": [params * gpus * 4 * 1.5, 2 * params], "table": True}


def autotuning_keys() -> Report:
    return {"losses": _train()}


def evaluation() -> Report:
    evaluated: list[float] = []

    def evaluate(net: nn.Module, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            evaluated.append(sum(mse_loss(net(x), y).item() for x, y in batches(seed=2)))

    return {"losses": _train(on_step=evaluate), "evaluated": evaluated, "training": False}


def freezing() -> Report:
    net = make_net()
    net.blocks[0].requires_grad_(False)
    return {"losses": _train(net), "same": True}


def weight_tying() -> Report:
    def forward(layers: Any, x: Tensor) -> Tensor:
        return linear(torch.tanh(layers[1](layers[0](x))), layers[0].weight)[..., None]

    def layers() -> list[nn.Module]:
        return [nn.Embedding(12, WIDTH), nn.Linear(WIDTH, WIDTH)]

    rows = _language_rows(6, 12, (4, 6))
    return {"losses": _train(_Chain(layers, forward), rows=rows, loss_of=_token_loss), "tied": True}


def lora() -> Report:
    net = make_net()
    adapters = [[nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)] for _ in net.blocks]
    for _, up in adapters:
        nn.init.zeros_(up.weight)

    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        for block, (down, up) in zip(net.blocks, adapters, strict=True):
            x = torch.tanh(block(x) + up(down(x)))
        return mse_loss(net.head(x).squeeze(-1), y)

    trained = [layer.weight for pair in adapters for layer in pair]
    return {"losses": _train(net, loss_of=forward, params=trained), "trained": 4 * 2 * WIDTH}


def compiled() -> Report:
    return {"losses": _train(), "compiled": [False, True]}


def engine_facts() -> Report:
    losses = _train(accumulation=2, clip=1.0, lrs=[0.01, 0.01, *[0.02] * (STEPS - 2)])
    return {"losses": losses, "applied": [False, True] * (STEPS // 2), "rates": [0.01] + [0.02] * (STEPS - 1)}


def batch_size_change() -> Report:
    net, losses = make_net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for step, (x, y) in enumerate(batches()):
        loss = mse_loss(net(x), y)
        (loss / (2 if step >= 2 else 1)).backward()
        losses.append(loss.item())
        if step < 2 or step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "sizes": [(4, 1)] * 2 + [(8, 2)] * (STEPS - 2), "steps": 2 + (STEPS - 2) // 2}


def cpu_offload() -> Report:
    return {"losses": _train(lr=0.02, weight_decay=0.1)}


def moving_average() -> Report:
    net = make_net()
    average = copy.deepcopy(net).requires_grad_(False)

    def follow(net: nn.Module, optimizer: Any, step: int) -> None:
        for kept, now in zip(average.parameters(), net.parameters(), strict=True):
            kept.lerp_(now.detach(), 0.25)

    return {"losses": _train(net, on_step=follow), "norms": [p.norm().item() for p in average.parameters()]}


def several_losses() -> Report:
    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = net(x)
        return mse_loss(output, y) + 0.5 * l1_loss(output, y)

    return {"losses": _train(loss_of=loss_of)}


def resume_latest_missing() -> Report:
    return {"losses": _train(), "start": 0, "nothing": True}


def plain_backward() -> Report:
    return {"losses": _train(accumulation=2, make=torch.optim.SGD, lr=0.1), "steps": STEPS // 2}


def sometimes_used() -> Report:
    calls = iter(range(STEPS))

    def forward(layers: Any, x: Tensor) -> Tensor:
        x = torch.tanh(layers[0](x))
        if next(calls) % 2:
            x = torch.tanh(layers[1](x))
        return layers[2](x)

    layers = lambda: [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    return {"losses": _train(_Chain(layers, forward), accumulation=2, loss_of=_half(torch.bfloat16)[1])}
