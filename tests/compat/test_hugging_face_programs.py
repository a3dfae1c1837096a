"""Programs as Hugging Face's documentation shows them, started from the command line, as they are.

The reference is the same program on two ranks of plain DistributedDataParallel.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.compat.hf_support import OPTIMIZER, ds_config
from tests.repo.source import ROOT
from thalweg.compat.startup import deepspeed_environ

pytestmark = [
    pytest.mark.skipif(
        not all(map(find_spec, ("accelerate", "datasets"))), reason="needs transformers, accelerate and datasets"
    ),
    pytest.mark.nightly,  # each program loads its libraries on four ranks
]
PROGRAMS = Path(__file__).parent / "programs"
TOLERANCE = 1e-4
ANIMALS = ("cat", "dog", "cow", "fox", "owl", "hen", "ant", "bee")
VERBS = ("sees", "hears", "likes", "finds")
WORDS = ["<pad>", "</s>", "<unk>", "summarize", ":", "the", "and", "then", ".", "a", *ANIMALS, *VERBS]


def _sentences(number: int, seed: int) -> list[tuple[str, str]]:
    """Texts with their summaries: who does what, and the verb."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        who, verb, whom = draw.choice(ANIMALS), draw.choice(VERBS), draw.choice(ANIMALS)
        text = f"the {who} {verb} the {whom} ."
        found.append((text if draw.random() < 0.5 else f"{text} then the {whom} {verb} a {who} .", f"{who} {verb}"))
    return found


def _write_data(folder: Path) -> None:
    for name, number, seed in (("train", 160, 1), ("valid", 40, 2)):
        rows = _sentences(number, seed)
        (folder / f"{name}.txt").write_text("\n".join(text for text, _ in rows))
        dialogues = [json.dumps({"dialogue": text, "summary": summary}) for text, summary in rows]
        (folder / f"{name}.json").write_text("\n".join(dialogues))
        labelled = [json.dumps({"text": text, "label": int("then" in text)}) for text, _ in rows]
        (folder / f"{name}_labelled.json").write_text("\n".join(labelled))


def _save_model(folder: str, kind: str) -> None:
    """A folder with a small model of random weights and its tokenizer."""
    import torch
    import transformers as library
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    transformers: Any = library
    tokenizer: Any = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens).save_pretrained(folder)
    torch.manual_seed(0)
    common = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, **common, bos_token_id=1))
    elif kind == "bert":
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.BertConfig(**sizes, **none, vocab_size=len(WORDS), pad_token_id=0, num_labels=2)
        model = transformers.BertForSequenceClassification(config)
    else:  # FLAN-T5 is T5 1.1: gated, with a head of its own
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        flan = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, **flan, **common, dropout_rate=0.0)
        )
    model.save_pretrained(folder)


def _environ(folder: Path, **others: str) -> dict[str, str]:
    """Variables of a program that must not know of the suite's."""
    known = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**known, **common, "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false", **others}


def _call(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, models and tokenizers."""
    folder = tmp_path_factory.mktemp("programs")
    _write_data(folder)
    for kind in ("gpt2", "t5", "bert"):
        code = f"import {__name__} as here; here._save_model({str(folder / kind)!r}, {kind!r})"
        _call([sys.executable, "-c", code], folder, _environ(folder))
    return folder


def _run_plain(program: str, folder: Path, *arguments: str, **environ: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    programs = [str(PROGRAMS / "ends_group.py"), str(PROGRAMS / program)]
    _call([*command, *programs, *arguments], folder, _environ(folder, **environ))


def _run_deepspeed(program: str, folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "thalweg", "run", "--as-deepspeed", "--nproc", "2", str(PROGRAMS / "on_cpu.py")]
    environ = _environ(folder, ACCELERATE_USE_DEEPSPEED="true")
    _call([*command, str(PROGRAMS / program), *arguments], folder, environ)


def _under_deepspeed(folder: Path, stage: int, **sections: Any) -> list[str]:
    config = folder / f"ds_config_{stage}.json"
    config.write_text(json.dumps(ds_config(stage, **sections)))
    return ["--deepspeed", str(config), "--accelerator_config", '{"use_configured_state": true}']


def _history(output: Path, key: str) -> list[float]:
    state = json.loads((output / "trainer_state.json").read_text())
    return [entry[key] for entry in state["log_history"] if key in entry]


def _evaluation(output: Path) -> dict[str, float]:
    return json.loads((output / "eval_results.json").read_text())


def _assert_close(ours: list[float], plain: list[float]) -> None:
    assert len(ours) == len(plain) > 1
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < TOLERANCE


def _clm_arguments(work: Path, output: Path) -> list[str]:
    files = ["--train_file", str(work / "train.txt"), "--validation_file", str(work / "valid.txt")]
    sizes = ["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--block_size", "16"]
    rate = ["--learning_rate", "5e-3", "--gradient_accumulation_steps", "2", "--logging_steps", "1"]
    what = ["--do_train", "--do_eval", "--num_train_epochs", "1", "--save_steps", "5", "--report_to", "none"]
    return ["--model_name_or_path", str(work / "gpt2"), "--output_dir", str(output), *files, *sizes, *rate, *what]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_run_clm(stage: int, work: Path, tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    _run_plain("run_clm.py", tmp_path, "--use_cpu", *_clm_arguments(work, plain))
    sections: dict[str, Any] = {"optimizer": OPTIMIZER} if stage == 3 else {}
    deepspeed = _under_deepspeed(tmp_path, stage, **sections)
    _run_deepspeed("run_clm.py", tmp_path, *_clm_arguments(work, ours), *deepspeed)
    _assert_close(_history(ours, "loss"), _history(plain, "loss"))
    evaluated = _evaluation(ours)
    for key in ("eval_loss", "eval_accuracy"):
        assert evaluated[key] == pytest.approx(_evaluation(plain)[key], abs=TOLERANCE)
    # The saved model is what was evaluated, and a run that is continued goes on where it was.
    again = tmp_path / "again"
    _run_plain("run_clm.py", tmp_path, *_clm_arguments(work, again), "--use_cpu", "--do_train", "false",
               "--model_name_or_path", str(ours))  # fmt: skip
    assert _evaluation(again)["eval_loss"] == pytest.approx(evaluated["eval_loss"], abs=TOLERANCE)
    losses = _history(ours, "loss")
    _run_deepspeed("run_clm.py", tmp_path, *_clm_arguments(work, ours), *deepspeed,
                   "--resume_from_checkpoint", str(ours / "checkpoint-5"))  # fmt: skip
    _assert_close(_history(ours, "loss"), losses)


def _seq2seq_arguments(work: Path, output: Path) -> list[str]:
    files = ["--train_file", str(work / "train.json"), "--validation_file", str(work / "valid.json")]
    return ["--model_id", str(work / "t5"), *files, "--output_dir", str(output), "--epochs", "2"]


@pytest.mark.parametrize(
    ("stage", "more"),
    [(1, []), (2, ["--gradient_checkpointing"]), (3, []), (3, ["--generation_num_beams", "2"])],
    ids=["1", "2 with recomputation", "3", "3 with beams"],
)
def test_flan_t5_generates_in_evaluation(stage: int, more: list[str], work: Path, tmp_path: Path) -> None:
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    _run_plain("run_seq2seq.py", tmp_path, "--use_cpu", *_seq2seq_arguments(work, plain), *more)
    deepspeed = _under_deepspeed(tmp_path, stage, **({"optimizer": OPTIMIZER} if stage == 3 else {}))
    _run_deepspeed("run_seq2seq.py", tmp_path, *_seq2seq_arguments(work, ours), *more, *deepspeed)
    _assert_close(_history(ours, "loss"), _history(plain, "loss"))
    for key in ("eval_recall", "eval_gen_len"):
        assert _history(ours, key) == pytest.approx(_history(plain, key), abs=0.02), key
    assert _evaluation(ours)["eval_loss"] == pytest.approx(_evaluation(plain)["eval_loss"], abs=TOLERANCE)
    assert _evaluation(ours)["eval_recall"] == pytest.approx(_evaluation(plain)["eval_recall"], abs=0.02)


LAUNCH = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {config}
  zero3_init_flag: false
machine_rank: 0
num_machines: 1
num_processes: 2
use_cpu: false
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_launch(stage: int, work: Path, tmp_path: Path) -> None:
    """`accelerate launch --config_file`, with a DeepSpeed config file; save_state, load_state."""
    config = ds_config(stage, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4, gradient_clipping=0.0)
    if stage == 2:
        constant = {"warmup_min_lr": 2e-3, "warmup_max_lr": 2e-3, "warmup_num_steps": 2}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
        config["scheduler"] = {"type": "WarmupLR", "params": constant}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "launch.yaml").write_text(LAUNCH.format(config=tmp_path / "ds_config.json"))
    arguments = ["--model_name_or_path", str(work / "bert"), "--train_file", str(work / "train_labelled.json")]
    _run_plain("complete_example.py", tmp_path, *arguments, "--output_dir", str(tmp_path / "plain"),
               ACCELERATE_USE_CPU="true")  # fmt: skip

    def launch(output: str, *more: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "launch.yaml")]
        command += [str(PROGRAMS / "on_cpu.py"), str(PROGRAMS / "complete_example.py"), *arguments]
        environ = deepspeed_environ(_environ(tmp_path))
        _call([*command, "--output_dir", str(tmp_path / output), *more], tmp_path, {**_environ(tmp_path), **environ})
        return json.loads((tmp_path / output / "report.json").read_text())

    plain = json.loads((tmp_path / "plain" / "report.json").read_text())
    ours = launch("ours")
    assert ours["distributed"] == "DistributedType.DEEPSPEED" != plain["distributed"]
    _assert_close(ours["losses"], plain["losses"])
    assert ours["accuracy"] == plain["accuracy"] > 0.9
    resumed = launch("resumed", "--resume_from_checkpoint", str(tmp_path / "ours" / "epoch_0"))
    _assert_close(resumed["losses"], ours["losses"][-len(resumed["losses"]) :])
    assert len(resumed["losses"]) * 3 == len(ours["losses"]) * 2
