"""Tiny models with experts, of Hugging Face's families and with lists of experts as transformers 4 had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE, SEQ_LEN, NUM_EXPERTS = 61, 6, 5


def _hf_model(kind: str, **changes: Any) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "num_experts": NUM_EXPERTS,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    config = getattr(transformers, f"{kind}Config")(**shape)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


_DEEPSEEK = {
    "n_routed_experts": 6,
    "num_local_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}


class _GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(16, 12, bias=False), nn.Linear(16, 12, bias=False)
        self.w2 = nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class _ModuleListMoE(nn.Module):
    """A sparse block in transformers 4's way: hit experts alone are called, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(_GatedMlp() for _ in range(NUM_EXPERTS))
        self.shared_expert = _GatedMlp()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.view(-1, hidden.shape[-1])
        logits = self.gate(x)
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        mask = F.one_hot(chosen, NUM_EXPERTS).permute(2, 1, 0)
        for index in mask.sum((1, 2)).nonzero().flatten().tolist():
            choice, token = torch.where(mask[index])
            y.index_add_(0, token, self.experts[index](x[token]) * weights[token, choice, None])
        return (y + self.shared_expert(x)).view_as(hidden), logits


class ModuleListMoEModel(nn.Module):
    """An embedding, two sparse blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 16)
        self.layers = nn.ModuleList(_ModuleListMoE() for _ in range(2))
        self.head = nn.Linear(16, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


def _switch() -> nn.Module:
    import transformers

    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_sparse_encoder_layers=1,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_heads=2, num_experts=NUM_EXPERTS, dropout_rate=0.0,
        expert_capacity=64, decoder_start_token_id=0, router_jitter_noise=0.0,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: _hf_model("Mixtral", num_local_experts=NUM_EXPERTS),
    "mixtral, auxiliary loss": lambda: _hf_model(
        "Mixtral", num_local_experts=NUM_EXPERTS, output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "qwen2_moe": lambda: _hf_model("Qwen2Moe", shared_expert_intermediate_size=10),
    "qwen3_moe": lambda: _hf_model("Qwen3Moe"),
    "deepseek_v2": lambda: _hf_model("DeepseekV2", **_DEEPSEEK),
    "deepseek_v3": lambda: _hf_model("DeepseekV3", **_DEEPSEEK),
    "olmoe": lambda: _hf_model("Olmoe"),
    "gpt_oss": lambda: _hf_model("GptOss", num_local_experts=NUM_EXPERTS),
    "phimoe": lambda: _hf_model(
        "Phimoe", num_local_experts=NUM_EXPERTS, router_jitter_noise=0.0, input_jitter_noise=0.0
    ),
    "granitemoe": lambda: _hf_model("GraniteMoe", num_local_experts=NUM_EXPERTS),
    "glm4_moe": lambda: _hf_model("Glm4Moe", **_DEEPSEEK),
    "list": ModuleListMoEModel,
    "switch": _switch,
}


def build_model(name: str, seed: int = 0) -> nn.Module:
    """The named model with reproducible weights, large enough that a mistake shows."""
    torch.manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name == "switch" or isinstance(model, ModuleListMoEModel):
                parameter.mul_(1.5)
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def make_batch(step: int, rows: int) -> Tensor:
    """Token ids (rows, LENGTH) of a step, alike on every rank."""
    generator = torch.Generator().manual_seed(700 + step)
    return torch.randint(3, VOCAB_SIZE, (rows, SEQ_LEN), generator=generator)


def compute_loss(model: Any, tokens: Tensor) -> Tensor:
    """The model's own loss on a batch, its auxiliary loss included where it has one."""
    tokens = tokens.contiguous()
    inner = getattr(model, "module", model)
    if isinstance(inner, ModuleListMoEModel):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))
    return model(input_ids=tokens, labels=tokens).loss
