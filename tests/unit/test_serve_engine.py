"""The server on the true engine: a small random Llama with a byte-pair tokenizer, in fp32 (row 41)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import thalweg
from tests.serve_client import send_request
from tests.serve_fuzz import BAD_BODIES, bad_body
from tests.serve_support import ServerThread, run_server, until
from thalweg.infer import EngineConfig, Request, SamplingParams, load_engine
from thalweg.serve.openai.requests import ChatTokenizer, load_tokenizer
from thalweg.serve.replicas.pool import PoolLimits

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]

PROMPTS = [
    "import os",
    "def main(argv):\n    return",
    "x",
    "for i in range(10):",
    "深い川 🌊 and",
    "class A:" * 9,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """(folder, Hugging Face's model, its tokenizer)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": len(fast)}
    config = LlamaConfig(**shape, bos_token_id=None, eos_token_id=None)
    live = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        live.lm_head.weight *= 20  # a clear choice each time, so that equal means equal
    live.save_pretrained(folder)
    return folder, live, fast


@pytest.fixture(scope="module")
def server(model: tuple[Path, Any, Any]) -> Iterator[ServerThread]:
    torch.set_num_threads(1)
    with run_model_server(str(model[0])) as running:
        yield running


def run_model_server(folder: str, **options: Any) -> contextlib.AbstractContextManager[ServerThread]:
    """A server whose replicas are the true engine in threads."""

    def load() -> Any:
        return load_engine(folder, EngineConfig(dtype="fp32", max_batch=8, kv_memory=2**20, max_step_tokens=64))

    return run_server(load, lambda: ChatTokenizer(load_tokenizer(folder)), **options)


def greedy(model: tuple[Path, Any, Any], prompt: str, count: int) -> tuple[str, list[int], list[float]]:
    """Hugging Face's tokens, one request at a time, with their log-probabilities."""
    _, live, tokenizer = model
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=True).input_ids
    with torch.inference_mode():
        out = live.generate(
            ids, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True,
            attention_mask=torch.ones_like(ids), pad_token_id=0,
        )  # fmt: skip
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    scores = [x[0].log_softmax(-1)[t].item() for x, t in zip(out.logits, tokens, strict=True)]
    return tokenizer.decode(tokens), tokens, scores


def test_row41_the_server_gives_what_hugging_face_gives(server: ServerThread, model: tuple[Path, Any, Any]) -> None:
    """Prompts of unequal lengths, all at once, streamed and whole: the tokens of one-by-one generation."""

    def one(prompt: str) -> tuple[Any, Any]:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 0}
        return server.create_completion(**body), server.stream("/v1/completions", **body)

    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(one, PROMPTS))
    for prompt, (whole, events) in zip(PROMPTS, answers, strict=True):
        text, tokens, scores = greedy(model, prompt, 24)
        (choice,) = whole["choices"]
        assert choice["text"] == text == "".join(event["choices"][0]["text"] for event in events[:-1])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=2e-3)
        assert whole["usage"]["completion_tokens"] == len(tokens) == 24
    assert len({answer[0]["choices"][0]["text"] for answer in answers}) > 3, "negative control: they differ"


def test_an_echoed_prompt_has_its_own_logprobs(server: ServerThread, model: tuple[Path, Any, Any]) -> None:
    """As those who score texts ask for them: the prompt's tokens, the first without, then the answer's."""
    _, live, tokenizer = model
    prompt = "import os, sys"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        scores = live(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    body = {"max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 2}
    (choice,) = server.create_completion(prompt, **body)["choices"]
    found, count = choice["logprobs"], ids.shape[1]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:count] == pytest.approx(scores, abs=2e-3)
    assert {len(values) for values in found.values()} == {count + 3}
    assert choice["text"].startswith(prompt) and found["text_offset"][count] == len(prompt)
    assert "".join(found["tokens"][:count]) == prompt
    events = server.stream("/v1/completions", prompt=prompt, **body)
    streamed = [x for e in events[:-1] if e["choices"] for x in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert streamed == pytest.approx(found["token_logprobs"])


_TEMPLATE = "{% if tools %}tools {{ tools | length }} {% endif %}{% for m in messages %}{{ m.content }} {% endfor %}"
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"metres": {"$ref": "#/$defs/depth"}}, "required": ["metres"],
        "additionalProperties": False, "$defs": {"depth": {"enum": values}},
    }}}
    for name, values in (("depth", [1, 2, 30]),)
]  # fmt: skip


def test_a_call_can_be_demanded(model: tuple[Path, Any, Any]) -> None:
    folder = str(model[0])
    options = EngineConfig(dtype="fp32", max_batch=8, kv_memory=2**20, max_step_tokens=64)
    messages = [{"role": "user", "content": "How deep?"}]
    with run_server(
        lambda: load_engine(folder, options), lambda: ChatTokenizer(load_tokenizer(folder), _TEMPLATE)
    ) as s:
        for choice in ("required", {"type": "function", "function": {"name": "depth"}}):
            body = {"messages": messages, "tools": _TOOLS, "tool_choice": choice, "max_tokens": 120}
            status, answer = s.post("/v1/chat/completions", **body, temperature=0)
            assert status == 200, answer
            (found,) = answer["choices"]
            (call,) = found["message"]["tool_calls"]
            assert call["function"]["name"] == "depth" and found["finish_reason"] == "tool_calls"
            assert json.loads(call["function"]["arguments"])["metres"] in (1, 2, 30)
            events = s.stream("/v1/chat/completions", **body, temperature=0)
            deltas = [e["choices"][0]["delta"] for e in events[:-1] if e["choices"]]
            streamed = [c for d in deltas for c in d.get("tool_calls", ())]
            assert [c["function"] for c in streamed] == [call["function"]]
            again = [*messages, {**found["message"], "annotations": [], "audio": None, "function_call": None},
                     {"role": "tool", "content": "2", "tool_call_id": call["id"]}]  # fmt: skip
            assert s.post("/v1/chat/completions", messages=again, max_tokens=2)[0] == 200
        free = s.post("/v1/chat/completions", messages=messages, tools=_TOOLS, max_tokens=40, temperature=0)[1]
        assert "tool_calls" not in free["choices"][0]["message"], "control: left free it does not call"
        for bad in ("always", {"type": "function", "function": {"name": "width"}}, {"name": 3}):
            assert s.post("/v1/chat/completions", messages=messages, tools=_TOOLS, tool_choice=bad)[0] == 400
        assert s.post("/v1/chat/completions", messages=messages, tool_choice="required")[0] == 400


def test_responses_of_a_demanded_form(server: ServerThread) -> None:
    """As OpenAI's client asks for an object of a class: the JSON schema is kept to, and the answer parsed."""
    openai, pydantic = pytest.importorskip("openai"), pytest.importorskip("pydantic")

    class Depth(pydantic.BaseModel):
        metres: Literal[1, 2, 30]
        river: Literal["Aare", "Inn"]

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "toy", "input": "How deep?", "temperature": 0, "max_output_tokens": 80}
    parsed = client.responses.parse(**asked, text_format=Depth)
    assert parsed.output_parsed.metres in (1, 2, 30) and parsed.status == "completed"
    assert parsed.text.format.type == "json_schema"
    with client.responses.stream(**asked, text_format=Depth) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    free = client.responses.create(**asked, extra_body={"stop": []})
    assert "metres" not in free.output_text, "control: left free it writes something else"


def test_shared_prefixes_hit_and_change_nothing(server: ServerThread, model: tuple[Path, Any, Any]) -> None:
    prompt = "the same long beginning of a prompt, word for word, " * 2
    first, second = (server.create_completion(prompt, max_tokens=12, temperature=0) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == greedy(model, prompt, 12)[0]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_seeds_stops_and_samples(server: ServerThread) -> None:
    body = {"max_tokens": 30, "temperature": 1.5, "seed": 4, "n": 3}
    one, two = (server.create_completion("seeded", **body)["choices"] for _ in range(2))
    assert [c["text"] for c in one] == [c["text"] for c in two] and len({c["text"] for c in one}) == 3
    text = one[0]["text"]
    stop = text[len(text) // 2 :][:3]
    cut = server.create_completion("seeded", **body, stop=[stop])["choices"][0]
    assert cut["text"] == text[: text.find(stop)] and cut["stop_reason"] == stop


def test_r24_cancellations_leave_no_block_and_harm_nobody(server: ServerThread) -> None:
    rng = random.Random(2)
    bodies = [
        {"prompt": rng.choice(PROMPTS) * rng.randrange(1, 3), "max_tokens": rng.randrange(4, 40), "seed": i,
         "n": rng.choice((1, 1, 2)), "stream": rng.random() < 0.5, "temperature": 1.0}
        for i in range(60)
    ]  # fmt: skip

    async def all_at_once() -> list[Any]:
        gate = asyncio.Semaphore(16)

        async def one(body: dict[str, Any]) -> Any:
            leave = rng.uniform(0.0, 0.3) if rng.random() < 0.3 else None
            async with gate:
                return await send_request(server.port, body, leave)

        return await asyncio.gather(*map(one, bodies))

    outcomes = asyncio.run(all_at_once())
    (engine,) = server.engines
    server.wait_idle()
    assert engine.stats().kv_blocks_used == 0 and not engine.has_work()
    done = [outcome for outcome in outcomes if outcome.status == 200]
    assert len(done) >= 30
    for outcome in done[::6]:
        alone = server.create_completion(**{**outcome.body, "stream": False})
        assert outcome.texts == [choice["text"] for choice in alone["choices"]], "as alone"


def test_r23_bad_requests_are_the_clients_fault_and_harm_no_engine(server: ServerThread) -> None:
    rng, before = random.Random(5), len(server.engines)
    bodies = [(path, BAD_BODIES[name]) for path in PATHS for name in sorted(BAD_BODIES)]
    for path, body in bodies:
        status, _, answer = server.request_raw("POST", path, body)
        assert 400 <= status < 500 and answer["error"]["message"], (path, body[:200], status, answer)
    statuses = [server.request_raw("POST", *bad_body(rng))[0] for _ in range(60)]
    assert max(statuses) < 500 and statuses.count(200) < 30
    assert len(server.engines) == before and server.request("GET", "/health")[0] == 200
    assert server.create_completion("x", max_tokens=2)


def test_row42_overload_completes_and_a_broken_engine_fails_health(
    model: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thalweg.serve.replicas.pool._RESTART_BACKOFF", (1.0,))
    limits, body = PoolLimits(max_outstanding=6), {"prompt": PROMPTS[1], "max_tokens": 24, "temperature": 0}
    text = greedy(model, PROMPTS[1], 24)[0]
    with run_model_server(str(model[0]), pool_limits=limits) as server:
        with ThreadPoolExecutor(24) as clients:
            answers = list(clients.map(lambda _: server.post("/v1/completions", **body), range(24)))
        assert {status for status, _ in answers} == {200, 429}, "some are refused, none is lost"
        texts = {answer["choices"][0]["text"] for status, answer in answers if status == 200}
        assert texts == {text}

        def broken(*_: Any) -> Any:
            raise RuntimeError("the kernel broke")

        server.engines[0].runner.run = broken  # for good: an engine that is lost is emptied
        with ThreadPoolExecutor(1) as client:  # its request has not begun: it waits for the next engine
            late = client.submit(server.create_completion, **body)
            until(lambda: server.request("GET", "/health")[0] == 503)
            assert "the kernel broke" in server.request("GET", "/health")[1]["error"]["message"]
            assert late.result(60)["choices"][0]["text"] == text
        assert server.request("GET", "/health")[0] == 200 and len(server.engines) == 2


def test_a_structure_is_kept_or_refused_never_cut_short(server: ServerThread) -> None:
    """This model has no end token: nothing may stand in for it, and the first complete text ends."""
    ask = {"prompt": "x", "max_tokens": 8, "temperature": 0}
    for form, fits in (("(a{1,100}){1,100}", "a"), ("(?:a|aa)+", "a"), ("[0-9]{3}", None), ("[ab]+c", None)):
        text = server.create_completion(**ask, guided_regex=form)["choices"][0]["text"]
        assert re.fullmatch(form, text) or len(text) >= 8, (form, text)
        assert fits is None or set(text) == {fits}, (form, text)
    for form in ("(a?){500}a{500}", "^$"):
        status, answer = server.post("/v1/completions", **ask, guided_regex=form)
        assert status == 400 and "the structure" in answer["error"]["message"], (form, answer)
    assert server.create_completion("x", max_tokens=2)


def test_what_the_engine_refuses_is_a_400(server: ServerThread) -> None:
    status, answer = server.post("/v1/completions", prompt="x" * 4000)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    status, answer = server.post("/v1/completions", prompt="x", max_tokens=300)
    assert status == 400
    status, answer = server.post("/v1/completions", prompt="x", stop_token_ids=[10**6])
    assert status == 400, json.dumps(answer)


def test_pipeline_in_miis_form(model: tuple[Path, Any, Any]) -> None:
    pipe = thalweg.pipeline(str(model[0]), dtype="fp32", max_batch=8, kv_memory=2**20)
    responses = pipe(PROMPTS[:3], max_new_tokens=16, do_sample=False)
    assert [response.generated_text for response in responses] == [greedy(model, p, 16)[0] for p in PROMPTS[:3]]
    assert [response.generated_length for response in responses] == [16] * 3
    assert responses[0].finish_reason == "length" and str(responses[0]) == responses[0].generated_text
    pieces: list[str] = []
    whole = pipe("x", lambda part: pieces.append(part[0].generated_text), max_new_tokens=9, return_full_text=True)
    assert whole[0].generated_text == "x" + "".join(pieces) and len(pieces) > 3
    with pytest.raises(ValueError, match="did you mean max_new_tokens"):
        pipe("x", max_new_token=9)
    with pytest.raises(ValueError, match="leave no room"):
        pipe("x", max_length=1)
    pipe.destroy()


def test_a_pipeline_keeps_the_outputs_of_other_requests(model: tuple[Path, Any, Any]) -> None:
    pipe = thalweg.pipeline(str(model[0]), dtype="fp32", max_batch=8, kv_memory=2**20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    pipe.engine.add(Request("other", pipe.engine.tokenizer.encode(PROMPTS[0]), params))
    assert pipe(PROMPTS[1], max_new_tokens=16, do_sample=False)[0].generated_text == greedy(model, PROMPTS[1], 16)[0]
    outputs = []
    while pipe.engine.has_work():
        outputs += pipe.engine.step()
    assert {output.request_id for output in outputs} == {"other"} and len(outputs) == 12 and outputs[-1].finished
    pipe.destroy()


def test_vllms_clients_find_their_paths_and_fields(server: ServerThread, model: tuple[Path, Any, Any]) -> None:
    """``/tokenize`` gives what the model's tokenizer does, ``structured_outputs`` what ``guided_*`` does."""
    _, live, tokenizer = model
    for text in PROMPTS:
        status, answer = server.post("/tokenize", prompt=text, return_token_strs=True)
        assert status == 200 and answer["tokens"] == tokenizer(text)["input_ids"]
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == live.config.max_position_embeddings
        assert server.post("/detokenize", tokens=answer["tokens"]) == (200, {"prompt": text})
    messages = [{"role": "user", "content": "hello"}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=1)[1]
    assert server.post("/tokenize", messages=messages)[1]["count"] == chat["usage"]["prompt_tokens"]
    for wrong in ({}, {"prompt": "x", "messages": messages}, {"prompt": 3}):
        assert server.post("/tokenize", **wrong)[0] == 400, wrong
    assert server.post("/detokenize", tokens=[10**6])[0] == 400
    assert server.request("GET", "/version") == (200, {"version": thalweg.__version__})
    assert server.request("GET", "/ping")[0] == 200
    ask = {"prompt": "x", "max_tokens": 8, "temperature": 0}
    for field, form in (("regex", "(?:a|aa)+"), ("choice", ["no", "yes"]), ("json", {"enum": [7]})):
        old, new = (
            server.create_completion(**ask, **given)["choices"][0]["text"]
            for given in ({f"guided_{field}": form}, {"structured_outputs": {field: form}})
        )
        assert old == new and old != server.create_completion(**ask)["choices"][0]["text"]
    assert server.create_completion(**ask, structured_outputs={"json_object": True})["choices"][0]["text"][0] == "{"
    status, answer = server.post("/v1/completions", **ask, structured_outputs={"regex": "a"}, guided_regex="a")
    assert status == 400 and "one form" in answer["error"]["message"]
