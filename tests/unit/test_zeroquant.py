"""Post-training quantisation: groups, tokens, packed kernels, and folders that load again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thalweg.compression.quantize import fake_quantize
from thalweg.infer.quantization.modules import QuantizedLinear
from thalweg.infer.quantization.zeroquant import GroupwiseLinear, save_quantized, zeroquant


def _llama() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, max_position_embeddings=32, initializer_range=0.1, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


TOKENS = torch.arange(24).view(2, 12)


def _error(model: Any, want: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(TOKENS).logits - want).norm() / want.norm())


def test_finer_groups_and_more_bits_are_closer_and_the_kernels_serve() -> None:
    plain = _llama()
    want = plain(TOKENS).logits.detach()
    forms = {"8": (8, 0), "8 by 32": (8, 32), "4": (4, 0), "4 by 32": (4, 32), "4 by 8": (4, 8)}
    errors = {name: _error(zeroquant(copy.deepcopy(plain), *form), want) for name, form in forms.items()}
    assert errors["8"] < 0.05 and errors["4"] > 4 * errors["8"]
    assert errors["4 by 8"] < errors["4 by 32"] < errors["4"]
    model = zeroquant(copy.deepcopy(plain))
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear) and type(model.lm_head) is nn.Linear
    assert isinstance(zeroquant(copy.deepcopy(plain), 4, 8).model.layers[0].mlp.up_proj, GroupwiseLinear)
    weights_only = zeroquant(copy.deepcopy(plain), 4, 32, quantize_activations=False)
    assert isinstance(weights_only.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert _error(weights_only, want) < errors["4"]


def test_each_token_has_a_range_of_its_own() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    x[3] *= 1000
    for quantized in (GroupwiseLinear(layer, 8, 16, True), QuantizedLinear(layer, "int8")):
        errors = (quantized(x) - layer(x)).norm(dim=1) / layer(x).norm(dim=1)
        assert float(errors.max()) < 0.03, errors
    one_range = nn.functional.linear(fake_quantize(x, 8), layer.weight, layer.bias)
    assert float(((one_range - layer(x)).norm(dim=1) / layer(x).norm(dim=1)).max()) > 0.5  # the control


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (8, 32), (4, 32)])
def test_a_saved_model_is_smaller_and_loads_with_the_same_numbers(bits: int, group_size: int, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from thalweg.infer.quantization.checkpoints import load_quantized

    plain = _llama()
    folder = save_quantized(plain, tmp_path / "quantized", bits, group_size)
    plain.save_pretrained(tmp_path / "plain")
    loaded = load_quantized(AutoModelForCausalLM, folder, AutoConfig.from_pretrained(folder), torch.float32, False)
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear):
            stored = loaded.get_submodule(name).weight
            groups = module.weight.numel() // (group_size or module.in_features)
            want = module.weight if name == "lm_head" else fake_quantize(module.weight, bits, groups)
            torch.testing.assert_close(stored, want, atol=1e-6, rtol=1e-5)
            assert name == "lm_head" or not torch.equal(stored, module.weight)
    sizes = [(tmp_path / which / "model.safetensors").stat().st_size for which in ("quantized", "plain")]
    assert sizes[0] < (0.42 if bits == 8 else 0.33) * sizes[1]


def test_groups_that_do_not_divide_and_other_bits_are_errors() -> None:
    with pytest.raises(ValueError, match="divides the layer's 64 inputs"):
        zeroquant(_llama(), 8, 48)
    with pytest.raises(ValueError, match="8 or 4 bits"):
        zeroquant(_llama(), 3)
