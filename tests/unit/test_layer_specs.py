"""``tensor_parallel.partition_config.layer_specs`` against the plan that a family has: the same cuts, to the row."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

import thalweg
from tests.dist.tensor_models import build_model
from thalweg.config import load
from thalweg.config.schema.parallel import TPLayerSpec
from thalweg.parallel.tensor.plan import TpPlan, UnshardableModelError, apply_layer_specs, build_tp_plan
from thalweg.plan.spec.cluster import Cluster
from thalweg.plan.spec.devices import get_device

ROW, COLUMN = {"partition_type": "row"}, {"partition_type": "column"}
_LLAMA = [
    {"patterns": [r".*\.self_attn\.o_proj\.weight$", r".*\.mlp\.down_proj\.weight$"], **ROW},
    {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$", r".*\.mlp\.(up|gate)_proj\.weight$"]},
]
SPECS: dict[str, list[dict[str, Any]]] = {
    "llama, 4 heads on 1": _LLAMA,
    "llama, 6 heads on 3, tied": _LLAMA,
    "qwen3": [*_LLAMA, {"patterns": r".*\.[qk]_norm\.weight", "partition_type": "skip", "grad_allreduce": True}],
    "phi3, 6 heads on 2": [
        {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], **ROW},
        {"patterns": [r".*\.qkv_proj\.weight$"], **COLUMN, "shape": [[48, 16, 16], -1], "partition_dim": 0},
        {"patterns": [r".*\.gate_up_proj\.weight$"], **COLUMN, "shape": [2, -1], "partition_dim": 0},
    ],
    "gpt2": [
        {"patterns": [r".*\.c_attn\.weight$"], **COLUMN, "shape": [3, -1]},
        {"patterns": [r".*\.c_fc\.weight$"]},
        {"patterns": [r".*\.c_proj\.weight$"], **ROW},
    ],
    "bloom": [
        {"patterns": [r".*\.query_key_value\.weight", r".*dense_h_to_4h\.weight"]},
        {"patterns": [r".*\.dense\.weight", r".*dense_4h_to_h\.weight"], **ROW},
    ],
}


def _specs(specs: list[dict[str, Any]]) -> tuple[TPLayerSpec, ...]:
    section = load({"tensor_parallel": {"partition_config": {"layer_specs": specs}}}).tensor_parallel.partition_config
    assert section is not None
    return section.layer_specs


def _both(model: nn.Module, specs: list[dict[str, Any]], rank: int, world: int = 2) -> tuple[TpPlan, TpPlan]:
    known = build_tp_plan(model, world, rank)
    assert known is not None
    return known, apply_layer_specs(TpPlan("specs"), model, _specs(specs), world, rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SPECS)
def test_specs_cut_as_the_family_does(name: str, rank: int) -> None:
    known, given = _both(build_model(name), SPECS[name], rank)
    assert given.layers == {n: one for n, one in known.layers.items() if one.kind not in ("embedding", "head")}
    assert len(given.layers) >= 8
    assert given.local_attributes == known.local_attributes and given.local_attributes
    assert given.per_head_args == known.per_head_args


def test_other_specs_cut_otherwise() -> None:
    """The control: inputs in place of outputs, or one section in place of two, is another plan."""
    swapped = [{**SPECS["gpt2"][0], "shape": [3, -1]}, {"patterns": [r".*\.c_(fc|proj)\.weight$"], **ROW}]
    known, given = _both(build_model("gpt2"), swapped, 0)
    assert given.layers["transformer.h.0.mlp.c_fc"] != known.layers["transformer.h.0.mlp.c_fc"]
    model = build_model("phi3, 6 heads on 2")
    whole = [{**SPECS["phi3, 6 heads on 2"][2], "shape": [1, -1]}]
    known, given = _both(model, whole, 0)
    assert given.layers["model.layers.0.mlp.gate_up_proj"] != known.layers["model.layers.0.mlp.gate_up_proj"]


def test_specs_go_before_the_plan_that_is_known() -> None:
    model = build_model("llama, 6 heads on 3, tied")
    known = build_tp_plan(model, 2, 0)
    assert known is not None and "lm_head" in known.layers
    names = set(known.layers)
    skip = {"partition_type": "skip"}
    first, head, other = "model.layers.0.self_attn", r"lm_head\.weight", r"model\.embed_tokens"
    specs = [{"patterns": [r"model\.layers\.0\.self_attn\.", head], **skip}, {"patterns": [r".*self_attn"], **ROW}]
    given = apply_layer_specs(
        known, model, _specs([specs[0], {"patterns": [other], **skip, "model_types": "gpt2"}]), 2, 0
    )
    # What is skipped is whole, with what shares its weight; the second spec is of another family.
    gone = {f"{first}.{key}_proj" for key in "qkvo"} | {"lm_head", "model.embed_tokens"}
    assert names - set(given.layers) == gone
    assert first not in given.local_attributes and "model.layers.1.self_attn" in given.local_attributes
    # The first that fits counts.
    again = apply_layer_specs(TpPlan("specs"), model, _specs(specs), 2, 0)
    assert {name for name in again.layers if first in name} == set()
    assert again.layers["model.layers.1.self_attn.o_proj"].kind == "row"


def test_a_head_that_gathers_its_output_is_cut_by_vocabulary() -> None:
    model = build_model("llama, 4 heads on 1")
    specs = [{"patterns": r".*lm_head\.weight$", "gather_output": True}]
    given = apply_layer_specs(TpPlan("specs"), model, _specs(specs), 2, 0)
    assert given.layers["lm_head"].kind == "head"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"patterns": "nothing"}, "no weight of LlamaForCausalLM"),
        ({"patterns": r".*up_proj", "shape": [4, -1, 32], "partition_dim": 1}, r"up_proj: .* shape \(4, -1, 32\)"),
        ({"patterns": r".*up_proj", "partition_type": "row", "shape": [2, -1]}, "up_proj: "),
    ],
)
def test_a_spec_that_cannot_be_followed_says_why(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(UnshardableModelError, match=words):
        apply_layer_specs(TpPlan("specs"), build_model("llama"), _specs([spec]), 2, 0)


def test_the_plan_reads_them():
    """With the MLPs' splits alone, a rank keeps the rest whole: what the plan counts is what the cut leaves."""
    model, mlp = build_model("llama, 4 heads on 1"), _LLAMA[0]["patterns"][1:] + _LLAMA[1]["patterns"][1:]
    specs = [{"patterns": mlp[:1], **ROW}, {"patterns": mlp[1:]}]

    def planned(**section: Any) -> int:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "tensor_parallel": {"autotp_size": 2, **section},
        }
        found = thalweg.plan(
            build_model("llama, 4 heads on 1"),
            config,
            cluster=Cluster(1, 2, device_memory=80 << 30, flops=get_device("h100").flops),
            sequence_length=8,
            suggest=False,
        )
        assert "tensor_parallel.autotp_size" not in found.not_counted
        return found.per_rank.parameters

    whole = sum(p.numel() for p in model.parameters())
    of_mlp = sum(p.numel() for name, p in model.named_parameters() if re.search(r"\.mlp\..*weight", name))
    own = planned(partition_config={"layer_specs": specs, "use_default_specs": False})
    assert own == 4 * (whole - of_mlp // 2)
    assert planned() < own  # negative control: the family's own plan cuts attention too
