"""The engine on a GPU: every family on torch's operators, models that listen, adapters, diffusion pipelines.

The tokens must be those that the model's own ``generate`` gives on the same device, in fp32 without TF32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thalweg
from tests.unit.infer_models import (
    DECODER_CONFIGS,
    SEQ2SEQ_CONFIGS,
    greedy_generate,
    in_generate,
    tiny_decoder,
    tiny_encoder,
)
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
    pytest.mark.usefixtures("without_tf32"),
]
PROMPTS = [[1, 2, 3, 4, 5], list(range(40, 80)), [7] * 17]
OPTIONS = EngineConfig(dtype="fp32", device="cuda", max_num_seqs=4, max_model_len=96, max_num_batched_tokens=24)


def expected(model: Any, count: int = 8, skip: int | None = None) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        made = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=count, do_sample=False)
        found.append(made[0, len(prompt) if skip is None else skip :].tolist())
    return found


@pytest.mark.parametrize("kind", [in_generate(name) for name in sorted(DECODER_CONFIGS)])
def test_tokens_equal_hugging_face(kind: str) -> None:
    model = tiny_decoder(kind).cuda()
    engine = load_engine(model, OPTIONS)
    assert greedy_generate(engine, PROMPTS, 8) == expected(model)
    assert greedy_generate(engine, PROMPTS, 8) == expected(model)  # with prefixes found
    engine.close()


@pytest.mark.parametrize("kind", sorted(SEQ2SEQ_CONFIGS))
def test_models_that_listen(kind: str) -> None:
    model = tiny_encoder(kind).cuda()
    engine = load_engine(model, OPTIONS)
    assert greedy_generate(engine, PROMPTS, 8) == expected(model, skip=1)
    engine.close()


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_half_precision_stays_close(form: str) -> None:
    model = tiny_decoder("llama").cuda()
    ask = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for dtype in ("fp32", form):
        options = EngineConfig(dtype=dtype, device="cuda", max_num_seqs=2, max_model_len=96)
        engine = load_engine(model, options)
        engine.add(Request("r", PROMPTS[1], ask))
        (output,) = engine.step()
        found.append(torch.tensor([x.logprob for x in output.prompt_logprobs[1:]]))
        engine.close()
    assert 0 < (found[1] - found[0]).square().mean().sqrt() < 0.1 * found[0].std()


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_decoder("llama").cuda()
    config = peft.LoraConfig(r=5, lora_alpha=20, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(tiny_decoder("llama").cuda(), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(tmp_path)
    options = EngineConfig(
        dtype="fp32", device="cuda", max_num_seqs=4, max_model_len=96, lora_adapters={"a": str(tmp_path)}
    )
    engine = load_engine(model, options)
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=8), adapter="a"))
    got: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    want = [
        adapted.generate(input_ids=torch.tensor([p], device="cuda"), max_new_tokens=8, do_sample=False) for p in PROMPTS
    ]
    assert list(got.values()) == [row[0, len(p) :].tolist() for row, p in zip(want, PROMPTS, strict=True)]
    assert list(got.values()) != expected(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_pipeline_of_diffusers_with_weights_off_the_device(tier: str, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers (the extra `diffusion`)")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipe = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10)).to("cuda")

    def draw() -> Any:
        made = torch.Generator().manual_seed(1)
        return pipe(num_inference_steps=2, output_type="np", generator=made).images

    want = draw()
    engine = thalweg.init_inference(pipe, stream=tier, stream_folder=str(tmp_path), stream_memory=1 << 16)
    assert (draw() == want).all() and next(unet.parameters()).untyped_storage().nbytes() < 64
    engine.close()
    assert (draw() == want).all()
