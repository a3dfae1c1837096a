"""The endpoints over models other than plain causal ones: those that listen, encoders, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import thalweg
from tests.serve_support import run_server
from tests.unit.infer_models import tiny_decoder, tiny_encoder
from thalweg.infer import EngineConfig, load_engine
from thalweg.serve.openai.requests import ChatTokenizer, CompletionRequest, completion_sampling_params, load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["w5 w77 w8", "w9", "w100 w3 w3 w3 w64 w90 w2"]


def saved(folder: Path, model: Any) -> str:
    """Save a model with a tokenizer that knows a word for each of its 131 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w130"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w130").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[int(word[1:]) for word in text.split()]])


def options(**fields: Any) -> EngineConfig:
    return EngineConfig(dtype="fp32", max_batch=4, max_length=96, kv_memory=2**21, **fields)


def test_a_model_that_listens(tmp_path: Path) -> None:
    model = tiny_encoder("flan_t5")
    folder = saved(tmp_path / "t5", model)
    with run_server(lambda: load_engine(folder, options()), lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        for text in TEXTS:
            want = model.generate(ids_of(text), max_new_tokens=9, do_sample=False)[0, 1:].tolist()
            said = " ".join(f"w{token}" for token in want)
            answer = server.create_completion(text, max_tokens=9, temperature=0)
            assert answer["choices"][0]["text"].split() == said.split()
            assert answer["usage"]["prompt_tokens"] == len(text.split())
            events = server.stream("/v1/completions", prompt=text, max_tokens=9, temperature=0)
            assert "".join(e["choices"][0]["text"] for e in events[:-1]).split() == said.split()
        status, answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "w5"}], max_tokens=3)
        assert status == 200 and answer["choices"][0]["message"]["content"]
        assert server.post("/v1/completions", prompt=[1] * 97)[0] == 400
    pipe: Any = thalweg.pipeline(folder, dtype="fp32", max_length=96, max_batch=2)
    assert pipe(TEXTS[0], max_new_tokens=4, do_sample=False)[0].generated_length == 4
    pipe.destroy()


def test_a_translation_into_the_language_that_a_request_names(tmp_path: Path) -> None:
    model = tiny_encoder("mbart", seed=3)  # with which each language has its own answer
    folder = saved(tmp_path / "mbart", model)
    said = {}
    for language in (None, 9, 120):
        tokens = model.generate(ids_of(TEXTS[0]), max_new_tokens=9, do_sample=False, forced_bos_token_id=language)
        said[language] = [f"w{token}" for token in tokens[0, 1 if language is None else 2 :].tolist()][:8]
    assert len({tuple(words) for words in said.values()}) == 3
    pipe: Any = thalweg.pipeline(folder, dtype="fp32", max_length=96, max_batch=2)
    with run_server(lambda: load_engine(folder, options()), lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        for language, words in said.items():
            fields = {} if language is None else {"forced_bos_token_id": language}
            answer = server.create_completion(TEXTS[0], max_tokens=8, temperature=0, **fields)
            assert answer["choices"][0]["text"].split() == words
            (mii,) = pipe(TEXTS[0], max_new_tokens=8, do_sample=False, **fields)
            assert mii.generated_text.split() == words
        status, answer = server.post("/v1/completions", prompt="w5", forced_bos_token_id=131)
        assert status == 400 and "not in 0 to 130" in answer["error"]["message"]
    pipe.destroy()


def test_sampling_that_a_request_leaves_open_is_the_models(tmp_path: Path) -> None:
    """As its generation_config.json has it, where vLLM's server takes it from; one without has OpenAI's defaults."""
    model = tiny_decoder("llama")
    plain, folder = saved(tmp_path / "plain", model), tmp_path / "set"
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=1, top_p=0.95, repetition_penalty=1.05)
    metadata = [load_engine(given, options()).metadata for given in (plain, saved(folder, model))]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    own = {"temperature": 0.2, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5}
    for fields, info, want in (
        ({}, metadata[0], (1.0, 0, 1.0, 0.0, 1.0)),
        ({}, metadata[1], (0.6, 1, 0.95, 0.0, 1.05)),
        ({"temperature": 0.0}, metadata[1], (0.0, 1, 0.95, 0.0, 1.05)),
        (own, metadata[1], (0.2, 0, 0.5, 0.1, 1.5)),
    ):
        params = completion_sampling_params(CompletionRequest(prompt="w5", **fields), info)
        assert tuple(getattr(params, name) for name in names) == want
    with run_server(lambda: load_engine(folder, options()), lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        greedy = {"do_sample": False, "repetition_penalty": 1.05, "pad_token_id": 0}
        tokens = model.generate(ids_of(TEXTS[0]), max_new_tokens=9, **greedy)[0, 3:].tolist()
        said = server.create_completion(TEXTS[0], max_tokens=9)["choices"][0]["text"]  # top_k 1 came to the replica
        assert said.split() == [f"w{token}" for token in tokens]
        drawn = server.create_completion(TEXTS[0], max_tokens=9, temperature=2, top_k=-1, seed=1)["choices"][0]["text"]
        assert drawn.split() != said.split()


def test_what_a_training_left_in_the_tokenizers_file_is_not_for_requests(tmp_path: Path) -> None:
    """Padding would be averaged into a vector, and truncation take a prompt's end away in silence."""
    from tokenizers import Tokenizer

    saved(tmp_path, tiny_encoder("bert"))
    words = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words.enable_padding(length=6, pad_id=0, pad_token="w0")
    words.enable_truncation(4)
    assert words.encode("w5 w6").ids == [5, 6, 0, 0, 0, 0]  # the control
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(load_tokenizer(str(tmp_path)))
    for text in ("w5 w6", " ".join(f"w{i}" for i in range(20))):
        assert tokenizer._encode(text, True) == ids_of(text)[0].tolist()


def test_names_of_sentencepiece_tokens_keep_their_spaces() -> None:
    """Their decoder drops the first space of a text, and a token by itself is one."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"the": 0, "\u2581the": 1, "\u2581\u2581\u2581": 2, "<0xF0>": 3, "<unk>": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(steps)
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))
    assert tokenizer.hf_tokenizer.decode([1]) == "the"  # the control
    assert [tokenizer.token_text(token)[0] for token in range(3)] == ["the", " the", "   "]
    assert tokenizer.token_text(1)[1] == list(b" the") and tokenizer.token_text(3)[1] == [0xF0]


def test_an_encoder(tmp_path: Path) -> None:
    model = tiny_encoder("bert")
    folder = saved(tmp_path / "bert", model)
    with torch.no_grad():
        want = [model(ids_of(text)).last_hidden_state[0].mean(0).tolist() for text in TEXTS]
    with run_server(lambda: load_engine(folder, options()), lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        status, answer = server.post("/v1/embeddings", input=TEXTS)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 11
        for row, data in zip(want, answer["data"], strict=True):
            assert data["embedding"] == pytest.approx(row, abs=1e-4)
        assert want[0] != pytest.approx(want[1], abs=1e-2)
        assert server.post("/v1/embeddings", input=[1] * 97)[0] == 400
        assert (
            server.post("/v1/embeddings", input=[131])[0] == 400 and server.post("/v1/embeddings", input="w1")[0] == 200
        )
        status, answer = server.post("/v1/completions", prompt="w5")
        assert status == 400 and "use /v1/embeddings" in answer["error"]["message"]
    pipe: Any = thalweg.pipeline(folder, dtype="fp32", pooling="cls", normalize=True)
    (row,) = pipe(TEXTS[0])
    assert sum(x * x for x in row) == pytest.approx(1, abs=1e-4)
    pipe.destroy()


def test_texts_are_cut_where_vllms_clients_ask_for_it(tmp_path: Path) -> None:
    """As transformers cuts them: the token that ends a text stays its end."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    model = tiny_encoder("bert")
    folder = saved(tmp_path, model)
    words = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    words.post_processor = processors.TemplateProcessing("w2 $A w1", special_tokens=[("w2", 2), ("w1", 1)])
    reference = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w130", cls_token="w2", sep_token="w1")
    reference.save_pretrained(folder)
    long = " ".join(f"w{3 + i % 99}" for i in range(5000))
    ids = [3 + i % 99 for i in range(300)]
    with run_server(lambda: load_engine(folder, options()), lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        for given, asked, num_kept in ((long, -1, 96), (long, 5, 5), ("w5 w6", 5, 5), (ids, -1, 96), (ids, 7, 7)):
            status, answer = server.post("/v1/embeddings", input=[given], truncate_prompt_tokens=asked)
            assert status == 200, answer
            want = given[:num_kept]
            if isinstance(given, str):
                want = reference(given, truncation=True, max_length=num_kept).input_ids
                assert want[0] == 2 and want[-1] == 1
            assert answer["usage"]["prompt_tokens"] == len(want) <= num_kept
            with torch.no_grad():
                row = model(torch.tensor([want])).last_hidden_state[0].mean(0).tolist()
            assert answer["data"][0]["embedding"] == pytest.approx(row, abs=1e-4)
        for given in (long, ids):  # the control: uncut, or cut to more than the model takes
            for more in ({}, {"truncate_prompt_tokens": None}, {"truncate_prompt_tokens": 97}):
                status, answer = server.post("/v1/embeddings", input=["w5", given] if given is long else given, **more)
                assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert server.post("/v1/embeddings", input="w5", truncate_prompt_tokens=-2)[0] == 400


def test_an_adapter_is_asked_for_as_a_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_decoder("llama")
    folder = saved(tmp_path / "llama", model)
    made = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    made.save_pretrained(tmp_path / "poet")

    def load() -> Any:
        return load_engine(folder, options(adapters={"poet": str(tmp_path / "poet")}))

    with run_server(load, lambda: ChatTokenizer(load_tokenizer(folder))) as server:
        said = []
        for name, live in ((None, model), ("poet", made.eval())):
            tokens = live.generate(input_ids=ids_of(TEXTS[0]), max_new_tokens=9, do_sample=False, pad_token_id=0)
            said.append(" ".join(f"w{token}" for token in tokens[0, 3:].tolist()))
            asked = {} if name is None else {"model": name}
            answer = server.create_completion(TEXTS[0], max_tokens=9, temperature=0, ignore_eos=True, **asked)
            assert answer["choices"][0]["text"].split() == said[-1].split()
        assert said[0] != said[1]
        _, answer = server.request("GET", "/v1/models")
        assert [entry["id"] for entry in answer["data"]][1:] == ["poet"]
        status, answer = server.post("/v1/completions", prompt="w5", model="painter")
        assert status == 404 and "poet" in answer["error"]["message"]
