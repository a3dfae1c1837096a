"""The Python of the pages runs as it stands there, on ranks; the options' page is the schema's.

Where a page's blocks speak of a model, a folder or data of the user's, :data:`PREPARED` makes them first; what comes
after the blocks there says what they must have led to.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.repo.source import ROOT
from thalweg.config.reference import config_reference

REUSE_RANKS = True


@dataclass(frozen=True)
class Prepared:
    """``before`` and ``after`` are run around the blocks of a page, but for those that import a package which is not
    installed; ``tools`` are what the rest cannot do without."""

    ranks: int
    num_blocks: int
    before: str
    after: str = ""
    tools: tuple[str, ...] = ()
    nightly: bool = False


PREPARED = {
    "hugging_face.md": Prepared(
        1,
        1,
        """
from tests.compat.hf_support import import_alias, reset_accelerate, make_dataset, make_model
import_alias()
reset_accelerate()
""",
        """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    output_dir="out", deepspeed="block0.json", accelerator_config={"use_configured_state": True}, max_steps=2,
    report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
)
trainer = Trainer(model=make_model(), args=arguments, train_dataset=make_dataset())
trainer.train()
assert type(trainer.deepspeed).__module__.startswith("thalweg.") and trainer.deepspeed.zero_optimization_stage() == 3
""",
        ("accelerate", "transformers"),
    ),
    "deepspeed.md": Prepared(
        1,
        1,
        "import sys\nassert 'deepspeed' not in sys.modules",
        "import deepspeed\nassert deepspeed.__version__ == '0.19.8'",
    ),
    "inference.md": Prepared(
        1,
        4,
        """
import pathlib, torch, thalweg
from diffusers import StableDiffusionPipeline
from tests.compat.test_mii import _make_model
from tests.unit.test_infer_diffusion import save_tiny_pipeline
for name in ("my-model", "large"):
    _make_model(0, 1, name)
for name in ("words", "sd", "disk"):
    pathlib.Path(name).mkdir()
save_tiny_pipeline(pathlib.Path("sd"), pathlib.Path("words"), num_train_timesteps=100)
tokens = torch.tensor([[5, 6, 7]])
""",
        """
assert engine.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 7) and image.size == (16, 16)
engine.close()
assert any(pathlib.Path("disk").rglob("*.safetensors"))
""",
        ("diffusers", "tokenizers"),
        nightly=True,
    ),
    "serve.md": Prepared(
        1,
        1,
        """
import os
from tests.compat.test_mii import _make_model
_make_model(0, 1, "my-model")
os.environ["XDG_RUNTIME_DIR"] = os.getcwd()
""",
        """
try:
    thalweg.client("river")
except ValueError:
    pass
else:
    raise AssertionError("the server was ended")
""",
        ("fastapi", "tokenizers", "transformers"),
        nightly=True,
    ),
    "pipeline.md": Prepared(
        4,
        1,
        """
import itertools, torch
from torch.nn import Embedding, Linear
from torch.nn.functional import mse_loss as loss_fn, linear
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=4, n_head=2, bos_token_id=0,
                                   eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
rows = torch.randint(0, 40, (4, 12))
data_iter = itertools.repeat({"input_ids": rows, "labels": rows})
as_head = lambda embedding, x: linear(x, embedding.weight)
class Block(Linear):
    pass
""",
        """
assert loss.item() > engine.train_batch(data_iter).item()
assert model.num_stages == 4 and len(model.specs) == 26
""",
        ("transformers",),
        nightly=True,
    ),
}


def _run_page(rank: int, world: int, page: str, folder: str) -> int:
    text = (ROOT / "docs" / page).read_text().replace('"/disk"', repr(f"{folder}/disk"))
    for number, block in enumerate(re.findall(r"^```json\n([\s\S]*?)^```", text, re.MULTILINE)):
        Path(folder, f"block{number}.json").write_text(block)
    blocks = re.findall(r"^```python\n([\s\S]*?)^```", text, re.MULTILINE)
    prepared = PREPARED.get(page)
    if prepared is not None:
        blocks = [block for block in blocks if not _needs_what_is_missing(block)]
        assert len(blocks) >= prepared.num_blocks
        blocks = [prepared.before, *blocks, prepared.after]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks), page, "exec"), {"__name__": "page"})
    return len(blocks)


def _needs_what_is_missing(block: str) -> bool:
    named = re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)
    return any(name in ("lightning", "ray") and find_spec(name) is None for name in named)


@pytest.mark.parametrize(
    "page", [pytest.param(n, marks=pytest.mark.nightly if p.nightly else ()) for n, p in PREPARED.items()]
)
def test_a_page_that_speaks_of_the_users_own_runs(page: str, tmp_path: Path) -> None:
    for tool in PREPARED[page].tools:
        pytest.importorskip(tool, reason=f"the page needs {tool}")
    run_ranks(_run_page, PREPARED[page].ranks, page, str(tmp_path), reuse=False)


@pytest.mark.parametrize(
    ("page", "at_least"),
    [
        *(("engine.md", 1), ("parameters.md", 7), ("checkpoints.md", 4), ("rlhf.md", 4)),
        *(("attention.md", 3), ("data.md", 5), ("compression.md", 2)),
    ],
)
def test_the_python_of_a_page_runs(page: str, at_least: int, tmp_path: Path) -> None:
    assert min(run_ranks(_run_page, 2, page, str(tmp_path))) >= at_least


def test_the_options_page_is_made_from_the_schema() -> None:
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == config_reference(), "make it anew: thalweg config --reference > docs/config.md"
