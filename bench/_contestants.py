"""The contestants of the training benchmarks: one builder for each name.

A builder gets the job, the model and the number of ranks, and returns ``step(tokens_BT, labels_BT) -> loss``
(detached), one whole optimiser step on this rank's micro-batch.  All of them train the same model from
the same seed with the same AdamW; each is written as its own documentation writes it.  They run inside
`_piecewise.py`, which has initialised the process group.

    ddp_fused, ddp          DistributedDataParallel, torch.optim.AdamW(fused=True) or its default
    ddp_zero_redundancy     DDP with ZeroRedundancyOptimizer around fused AdamW
    fsdp2_2, fsdp2_3        fully_shard on each block and the root, fused AdamW; reshard_after_forward
                            off (the traffic of stage 2) or on (stage 3)
    fsdp2_16_3              the same with gradients reduced in 16 bits too
    fsdp2_comm_2, _3        the same loop with Thalweg's collective objects and its setting of malloc: what
                            is left between it and Thalweg is the engine
    deepspeed_0 .. _3       DeepSpeed's engine with its own default AdamW on CPU
    thalweg_0 .. _3         Thalweg's engine, `cpu_kernels` auto; thalweg_torch_0 .. _3 with "torch";
                            "+16" reduces gradients in bf16, "+qwz", "+hpz", "+qgz", "+loco" and "+mics"
                            are what ZeRO++ and MiCS add, for two ranks a host
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], Tensor]

ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
SEED = 20


@dataclass(frozen=True)
class Job:
    """One training benchmark: the shape of the model and of its batch on each rank.

    `family` is "gpt" (the reference GPT), "llama" (`_llama.py`, which has `kv_heads` and `hidden`) or "gpt2" (Hugging
    Face's `GPT2LMHeadModel`, without dropout).
    """

    name: str
    layers: int
    heads: int
    width: int
    vocabulary: int
    sequence: int
    micro_batch: int
    tied: bool
    dtype: str = "fp32"
    device: str = "cpu"
    family: str = "gpt"
    kv_heads: int = 0
    hidden: int = 0
    compiled: bool = False

    def llama_config(self) -> dict[str, int]:
        """Return what `_llama.Llama` and its arithmetic take."""
        names = ("layers", "heads", "kv_heads", "width", "hidden", "vocabulary")
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready scalars."""
        return asdict(self)


JOBS = {
    "tiny": Job("tiny", 2, 2, 64, 512, 32, 2, tied=True),
    "small": Job("small", 4, 4, 256, 8192, 128, 4, tied=True),
    "69m": Job("69m", 8, 12, 768, 8192, 64, 1, tied=False),
    "hf-tiny": Job("hf-tiny", 2, 2, 64, 512, 32, 2, tied=True, family="gpt2"),
    "hf-small": Job("hf-small", 4, 4, 256, 8192, 128, 4, tied=True, family="gpt2"),
    "hf-69m": Job("hf-69m", 8, 12, 768, 8192, 64, 1, tied=False, family="gpt2"),
}


def build_model(job: Job) -> nn.Module:
    """Return the job's model, in fp32, on its device, the same on every rank."""
    torch.manual_seed(SEED)
    if job.family == "llama":
        from _llama import Llama

        with torch.device(job.device):
            return Llama(**job.llama_config())
    if job.family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=job.vocabulary,
                n_layer=job.layers,
                n_head=job.heads,
                n_embd=job.width,
                n_positions=job.sequence,
                tie_word_embeddings=job.tied,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    from thalweg.nn.transformer import GPT, GPTConfig

    return GPT(
        GPTConfig(
            vocab_size=job.vocabulary,
            n_layer=job.layers,
            n_head=job.heads,
            n_embd=job.width,
            block_size=job.sequence,
            tied=job.tied,
        )
    )


def make_batch(job: Job, index: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return (tokens_BT, labels_BT) of one rank: random tokens, from a pool of eight global batches.

    The pool comes back, so that the losses fall and a contestant that computes something else shows.
    """
    generator = torch.Generator().manual_seed(1000 + index % 8)
    shape = (world * job.micro_batch, job.sequence + 1)
    tokens = torch.randint(0, job.vocabulary, shape, generator=generator)
    local_rows = tokens[rank * job.micro_batch : (rank + 1) * job.micro_batch]
    return local_rows[:, :-1].contiguous(), local_rows[:, 1:].contiguous()


def _adamw(parameters: Iterable[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **ADAMW) if fused else torch.optim.AdamW(parameters, **ADAMW)


def _compute_loss(job: Job, model: Any, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the loss of a model or engine; Hugging Face's shifts the labels itself."""
    if job.family == "gpt2":
        return model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    return model(tokens_BT, labels_BT)


def _plain_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool) -> Step:
    def step(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _compute_loss(job, model, tokens_BT, labels_BT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def build_ddp(job: Job, model: nn.Module, world: int, variant: str) -> Step:
    """Plain data parallelism; variant "fused", "plain" or "zero_redundancy" names the optimiser."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model)
    if variant == "zero_redundancy":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **ADAMW
        )
    else:
        optimizer = _adamw(model.parameters(), fused=variant == "fused")
    return _plain_step(job, model, optimizer, autocast=job.dtype == "bf16")


def build_fsdp2(job: Job, model: nn.Module, world: int, variant: str) -> Step:
    """Raw FSDP2; variant is the stage whose traffic it has, with "comm_" before it for our collectives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(job.device, (world,))
    low = torch.bfloat16 if job.dtype == "bf16" else None
    wire = torch.bfloat16 if variant.startswith("16_") else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wire)
    reshard = variant.endswith("3")
    units = [*model.get_submodule("transformer.h" if job.family == "gpt2" else "blocks").children(), model]
    for unit in units:
        if job.compiled and unit is not model:
            unit.compile()
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if variant.startswith("comm_"):
        _use_thalweg_collectives(units, mesh.get_group())
    return _plain_step(job, model, _adamw(model.parameters(), fused=True), autocast=False)


def _use_thalweg_collectives(units: list[Any], group: Any) -> None:
    """Give raw FSDP2 units the collective objects of `thalweg.comm`: shared memory, or the wire's."""
    from thalweg.comm.collectives import shared_memory, wire
    from thalweg.device import retain_freed_memory

    retain_freed_memory()
    world = group.size()
    unit_bytes: list[int] = []
    seen: set[int] = set()
    for unit in units:  # the root comes last: what no block has is its own
        parameters = {id(p): p for p in unit.parameters() if id(p) not in seen}
        seen |= parameters.keys()
        unit_bytes.append(sum(4 * -(-p.shape[0] // world) * world * p.shape[1:].numel() for p in parameters.values()))
    buffer_bytes, rings = max(unit_bytes), []
    for depth in (4, 2):  # a gather keeps two slots while FSDP2 copies out; each ring has its arena
        arena = shared_memory.SharedMemoryArena.create(
            group, shared_memory.SharedMemoryRing.num_bytes(world, buffer_bytes, depth)
        )
        rings.append(None if arena is None else shared_memory.SharedMemoryRing(arena, buffer_bytes, depth))
    gather, reduce = rings
    for index, unit in enumerate(units):
        name = f"unit {index}"
        unit.set_custom_all_gather(_RingAllGather(gather, name) if gather else wire.WireAllGather(name))
        in_memory = shared_memory.SharedMemoryReduceScatter
        reducer = in_memory(reduce, name) if reduce else wire.AllToAllReduceScatter(wire.AllToAllReduce(group), name)
        unit.set_custom_reduce_scatter(reducer)


class _RingAllGather:
    """All-gather through a ring of shared memory: FSDP2's copy-in writes this rank's row in place."""

    def __init__(self, ring: Any, name: str) -> None:
        self._ring, self._name = ring, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2's hook; the output is one slot for all ranks, each of which fills its row."""
        return self._ring.acquire_shared_output(size, dtype, f"the gather of {self._name!r}")

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._ring.publish_shared_output(self._name)


def build_deepspeed(job: Job, model: nn.Module, world: int, variant: str) -> Step:
    """Real DeepSpeed at the stage that the variant names, clipping off, everything else its default."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": int(variant)},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if job.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return _EngineStep(job, engine)


def build_thalweg(job: Job, model: nn.Module, world: int, variant: str) -> Step:
    """Thalweg's engine: variant "0" to "3" is the stage, with "torch_" before it for torch's own kernels."""
    import thalweg

    variant, *features = variant.split("+")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "zero_optimization": {"stage": int(variant[-1])},
        "gradient_clipping": 0.0,
        "cpu_kernels": "torch" if variant.startswith("torch_") else "auto",
    }
    if job.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if job.compiled:
        config["compile"] = {"enabled": True}
    for feature in features:
        if feature == "16":
            config["communication_data_type"] = "bf16"
        else:
            config["zero_optimization"] |= _FEATURES[feature]
    engine, _, _, _ = thalweg.initialize(model=model, config=config)
    return _EngineStep(job, engine)


class _EngineStep:
    """A step of an engine; ``inter_bytes`` is what it counted between hosts so far, None if it does not."""

    def __init__(self, job: Job, engine: Any) -> None:
        self._job, self._engine = job, engine

    def __call__(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        loss = _compute_loss(self._job, self._engine, tokens_BT, labels_BT)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    @property
    def inter_bytes(self) -> int | None:
        ledger = getattr(self._engine, "ledger", None)
        return None if ledger is None else ledger.total().inter_bytes


_FEATURES: dict[str, dict[str, Any]] = {
    "qwz": {"zero_quantized_weights": True},
    "hpz": {"zero_hpz_partition_size": 2},
    "qgz": {"zero_quantized_gradients": True},
    "loco": {"zeropp_loco_param": {}},
    "mics": {"mics_shard_size": 2},
}
_BUILDERS: tuple[tuple[str, Callable[[Job, nn.Module, int, str], Step]], ...] = (
    ("ddp", build_ddp),
    ("fsdp2", build_fsdp2),
    ("deepspeed", build_deepspeed),
    ("thalweg", build_thalweg),
)


def build_contestant(name: str, job: Job, model: nn.Module, world: int) -> Step:
    """Set a contestant up by name around this rank's model; ValueError for a name that is none."""
    for family, builder in _BUILDERS:
        if name == family or name.startswith(f"{family}_"):
            return builder(job, model, world, name[len(family) + 1 :] or "plain")
    raise ValueError(f"no contestant {name!r}; the families are {', '.join(f for f, _ in _BUILDERS)}")


def preload(name: str, job: Job) -> str:
    """Import what the contestant and the model stand on and return what has been imported, for the memory table."""
    if job.family == "gpt2":
        from transformers import GPT2LMHeadModel, __version__

        _ = GPT2LMHeadModel  # which the package imports when it is asked for
        return f"{_preload_contestant(name)}, transformers {__version__}"
    return _preload_contestant(name)


def _preload_contestant(name: str) -> str:
    if name.startswith("deepspeed"):
        import deepspeed  # pyright: ignore[reportMissingImports]

        return f"torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    if name.startswith("thalweg"):
        import thalweg

        _ = thalweg.initialize  # the package resolves its names on first use
        return f"torch {torch.__version__}, thalweg {thalweg.__version__}"
    return f"torch {torch.__version__}"
