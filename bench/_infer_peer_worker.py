"""One engine of `_infer_peers.py`, run in that engine's own environment: convert a model, or take turns.

    _infer_peer_worker.py convert ENGINE FORM SOURCE TARGET
    _infer_peer_worker.py serve ENGINE FORM TARGET THREADS

A turn generates one token a prompt, then all of them, greedily and with no end token heeded.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TurnFn = Callable[[list[list[int]], int], tuple[float, float]]


def _make_turn(run: Callable[[list[list[int]], int], None]) -> TurnFn:
    """Return a turn that runs once for the first token and once for all."""

    def turn(prompts: list[list[int]], new: int) -> tuple[float, float]:
        times = []
        for count in (1, new):
            start = time.perf_counter()
            run(prompts, count)
            times.append(time.perf_counter() - start)
        return times[0], times[1]

    return turn


class CTranslate2:
    """fp32, int8."""

    compute_types = {"fp32": "float32", "int8": "int8"}  # noqa: RUF012

    def convert(self, weight_format: str, source: str, target: str) -> None:
        """Write its own format."""
        converters = importlib.import_module("ctranslate2").converters
        converters.TransformersConverter(source).convert(target, quantization=self.compute_types[weight_format])

    def load(self, weight_format: str, target: str, threads: int) -> TurnFn:
        """Return its turn."""
        library = importlib.import_module("ctranslate2")
        how: dict[str, Any] = {
            "device": "cpu",
            "compute_type": self.compute_types[weight_format],
            "intra_threads": threads,
        }
        if json.loads((Path(target) / "config.json").read_text()).get("decoder_start_token"):
            return self._load_translator(library.Translator(target, **how))
        generator = library.Generator(target, **how)

        def run(prompts: list[list[int]], count: int) -> None:
            named = [[f"t{token}" for token in prompt] for prompt in prompts]
            generator.generate_batch(
                named, max_length=count, min_length=count, beam_size=1, include_prompt_in_result=False
            )

        return _make_turn(run)

    def _load_translator(self, translator: Any) -> TurnFn:
        def run(prompts: list[list[int]], count: int) -> None:
            named = [[f"t{token}" for token in prompt] for prompt in prompts]
            translator.translate_batch(
                named, max_decoding_length=count, min_decoding_length=count, beam_size=1, max_input_length=0
            )

        return _make_turn(run)


class LlamaCpp:
    """f32, q8_0, q4_0: a GGUF file written from the checkpoint, quantised by llama.cpp itself."""

    def convert(self, weight_format: str, source: str, target: str) -> None:
        """Write a GGUF file; the query and key rows are interleaved as its rotation wants them."""
        import numpy as np

        gguf = importlib.import_module("gguf")
        safetensors = importlib.import_module("safetensors.numpy")
        config = json.loads((Path(source) / "config.json").read_text())
        heads, width = config["num_attention_heads"], config["hidden_size"]
        plain = f"{target}.f32.gguf"
        writer = gguf.GGUFWriter(plain, "llama")
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(width)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(width // heads)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_file_type(0)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
        writer.add_token_scores([0.0] * config["vocab_size"])
        writer.add_token_types([1] * config["vocab_size"])
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        for file in sorted(Path(source).glob("*.safetensors")):
            for name, value in safetensors.load_file(file).items():
                wide = value.astype(np.float32)
                if "q_proj" in name or "k_proj" in name:
                    count = heads if "q_proj" in name else config["num_key_value_heads"]
                    halves = wide.reshape(count, 2, -1, wide.shape[-1])
                    wide = halves.swapaxes(1, 2).reshape(wide.shape)
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(wide))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if weight_format != "f32":
            library = importlib.import_module("llama_cpp")
            settings = library.llama_model_quantize_default_params()
            settings.ftype = {"q8_0": 7, "q4_0": 2}[weight_format]
            paths = plain.encode(), f"{target}.{weight_format}.gguf".encode()
            if library.llama_model_quantize(*paths, ctypes.byref(settings)):
                raise SystemExit("llama_model_quantize failed")
            os.unlink(plain)

    def load(self, weight_format: str, target: str, threads: int) -> TurnFn:
        """Return its turn: one call for the prompts, one call a token for all sequences."""
        import numpy as np

        library = importlib.import_module("llama_cpp")
        library.llama_backend_init()
        model = library.llama_model_load_from_file(
            f"{target}.{weight_format}.gguf".encode(), library.llama_model_default_params()
        )
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = 8 * 256, 1024, 512, 8
        settings.n_threads = settings.n_threads_batch = threads
        context = library.llama_init_from_model(model, settings)
        size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        batch = library.llama_batch_init(1024, 0, 1)

        def decode(rows: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(rows)
            for at, (token, position, sequence, wanted) in enumerate(rows):
                batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            if library.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")

        def argmax_token(at: int) -> int:
            logits = library.llama_get_logits_ith(context, at)
            return int(np.ctypeslib.as_array(logits, shape=(size,)).argmax())

        def turn(prompts: list[list[int]], new: int) -> tuple[float, float]:
            start = time.perf_counter()
            library.llama_memory_clear(library.llama_get_memory(context), True)
            rows = [
                (token, position, number, position == len(prompt) - 1)
                for number, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
            decode(rows)
            tokens = [argmax_token(at) for at, row in enumerate(rows) if row[3]]
            first = time.perf_counter() - start
            for step in range(new - 1):
                decode([(t, len(prompts[n]) + step, n, True) for n, t in enumerate(tokens)])
                tokens = [argmax_token(at) for at in range(len(tokens))]
            return first, time.perf_counter() - start

        return turn


class OnnxRuntime:
    """fp32, int8, int4 by onnxruntime-genai's own builder and generation loop."""

    def convert(self, weight_format: str, source: str, target: str) -> None:
        """Write its ONNX graph."""
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
        subprocess.run([*command, "-p", weight_format, "-e", "cpu", "-c", f"{target}-cache"], check=True)

    def load(self, weight_format: str, target: str, threads: int) -> TurnFn:
        """Return its turn."""
        library = importlib.import_module("onnxruntime_genai")
        path = Path(target) / "genai_config.json"
        config = json.loads(path.read_text())
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        path.write_text(json.dumps(config))
        model = library.Model(target)

        def turn(prompts: list[list[int]], new: int) -> tuple[float, float]:
            start = time.perf_counter()
            length = len(prompts[0]) + new
            settings = library.GeneratorParams(model)
            settings.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
            generator = library.Generator(model, settings)
            generator.append_tokens(prompts)
            generator.generate_next_token()
            first = time.perf_counter() - start
            for _ in range(new - 1):
                generator.generate_next_token()
            return first, time.perf_counter() - start

        return turn


class Vllm:
    """bf16; its prefix cache is off, since a turn sends each prompt twice."""

    def convert(self, weight_format: str, source: str, target: str) -> None:
        """Nothing to convert: name the folder."""
        Path(target).symlink_to(source)

    def load(self, weight_format: str, target: str, threads: int) -> TurnFn:
        """Return its turn."""
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        library = importlib.import_module("vllm")
        model = library.LLM(target, dtype="bfloat16", max_model_len=512, max_num_seqs=8, enable_prefix_caching=False)

        def run(prompts: list[list[int]], count: int) -> None:
            settings = library.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            model.generate(asked, settings, use_tqdm=False)

        return _make_turn(run)


ENGINES: dict[str, Any] = {
    "ctranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
    "onnxruntime": OnnxRuntime,
    "vllm": Vllm,
}


def main() -> None:
    """Convert, or answer turns until standard input ends."""
    action, engine, weight_format, *words = sys.argv[1:]
    if action == "convert":
        ENGINES[engine]().convert(weight_format, *words)
        return
    turn = ENGINES[engine]().load(weight_format, words[0], int(words[1]))
    print(json.dumps({"first": 0.0, "whole": 0.0}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        first, whole = turn(job["prompts"], job["new"])
        print(json.dumps({"first": first, "whole": whole}), flush=True)


if __name__ == "__main__":
    main()
