"""Pipelines of diffusers: the plain pipeline's images, with weights that pass by, are packed or compiled."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import thalweg

diffusers = pytest.importorskip("diffusers", reason="needs diffusers (the extra `diffusion`)")
pytestmark = pytest.mark.usefixtures("one_thread")


def tokenizer(folder: Path) -> Any:
    from transformers import CLIPTokenizer

    ends = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase), "ab", *ends]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)


def save_tiny_pipeline(path: Path, words_folder: Path, num_train_timesteps: int = 20) -> None:
    """Save a Stable-Diffusion pipeline with tiny random components; its tokenizer's files lie in ``words_folder``."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=16,
    )  # fmt: skip
    words = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16,
        )
    )  # fmt: skip
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=words, tokenizer=tokenizer(words_folder), unet=unet,
        scheduler=diffusers.DDIMScheduler(num_train_timesteps=num_train_timesteps, steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one."""
    path = tmp_path_factory.mktemp("pipe")
    save_tiny_pipeline(path, tmp_path_factory.mktemp("words"))
    return path


@pytest.fixture
def pipe(folder: Path) -> Any:
    loaded = diffusers.StableDiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def image(pipe: Any, seed: int = 3) -> np.ndarray:
    return pipe(
        "a cat", num_inference_steps=3, generator=torch.Generator().manual_seed(seed), output_type="np",
        height=16, width=16,
    ).images  # fmt: skip


def weights(pipe: Any) -> int:
    """Bytes of parameters that are in memory."""
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(p.untyped_storage().nbytes() for part in parts for p in part.parameters())


def test_it_is_called_like_the_pipeline_and_gives_its_images(pipe: Any) -> None:
    want = image(pipe)
    engine = thalweg.init_inference(pipe, dtype=torch.float32, replace_with_kernel_inject=True)
    assert np.array_equal(image(engine), want) and engine.unet is pipe.unet
    assert not np.array_equal(image(engine, seed=4), want)  # negative control


def test_weights_from_a_disk_within_the_memory_asked_for(pipe: Any, tmp_path: Path) -> None:
    want, whole = image(pipe), weights(pipe)
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4, "buffer_size": whole // 16}
    engine = thalweg.init_inference(pipe, {"zero": {"stage": 3, "offload_param": disk}})
    assert weights(pipe) < whole / 8 and not list(tmp_path.iterdir())
    assert np.array_equal(image(engine), want) and np.array_equal(image(engine), want)
    offloader = engine.offloader
    largest = max(unit.nbytes for unit in offloader.units)
    assert offloader.resident_bytes <= offloader.max_bytes  # what is on its way for the next image
    assert 0 < offloader.peak_resident_bytes <= offloader.max_bytes + largest
    engine.close()
    assert weights(pipe) >= whole and np.array_equal(image(pipe), want)


def test_weights_in_a_mapped_file(pipe: Any, tmp_path: Path) -> None:
    want = image(pipe)
    engine = thalweg.init_inference(pipe, stream="cpu", stream_folder=str(tmp_path))
    assert np.array_equal(image(engine), want)
    engine.close()
    assert np.array_equal(image(pipe), want)


def test_a_component_that_fails_leaves_no_weights_behind(pipe: Any, tmp_path: Path) -> None:
    engine = thalweg.init_inference(pipe, stream="nvme", stream_folder=str(tmp_path), stream_memory=1 << 18)
    with pytest.raises(RuntimeError):
        pipe.unet(torch.randn(1, 4, 8, 8), 1, torch.randn(1, 3, 7))  # a text of another width
    assert all(unit.num_active_calls == 0 for unit in engine.offloader.units)
    assert image(engine).shape == (1, 16, 16, 3)


def test_packed_linear_layers_stay_close(pipe: Any) -> None:
    want = image(pipe)
    engine = thalweg.init_inference(pipe, dtype=torch.int8)
    got = image(engine)
    assert 0 < np.abs(got - want).mean() < 0.02
    engine.close()
    assert np.array_equal(image(pipe), want)


@pytest.mark.nightly
def test_compiled_and_cast(pipe: Any) -> None:
    want = image(pipe)
    engine = thalweg.init_inference(pipe, compile={"backend": "eager"})
    assert pipe.unet._compiled_call_impl is not None
    np.testing.assert_allclose(image(engine), want, atol=1e-5)
    engine.close()
    assert pipe.unet._compiled_call_impl is None
    assert np.abs(image(thalweg.init_inference(pipe, dtype="bf16")) - want).mean() < 0.05
    assert pipe.unet.dtype == torch.bfloat16


def test_other_pipelines_and_directories(folder: Path, pipe: Any, tmp_path: Path) -> None:
    made = thalweg.pipeline(str(folder), stream="cpu", stream_folder=str(tmp_path))
    assert np.array_equal(image(made), image(pipe))
    made.destroy()
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    plain = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10))
    plain.set_progress_bar_config(disable=True)

    def draw() -> np.ndarray:
        made = torch.Generator().manual_seed(1)
        return plain(num_inference_steps=2, output_type="np", generator=made).images

    want = draw()
    engine = thalweg.init_inference(plain, stream="nvme", stream_folder=str(tmp_path), stream_memory=1 << 16)
    assert np.array_equal(draw(), want)
    engine.close()


def test_what_cannot_be_is_one_clear_error(pipe: Any) -> None:
    for fields, said in (
        ({"max_length": 5}, "does not know max_model_len"),
        ({"stream": "cpu", "compile": True}, "weight_offload and compile .* choose one"),
        ({"stream": "tape"}, "weight_offload is .* must be cpu, nvme"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            thalweg.init_inference(pipe, **fields)
