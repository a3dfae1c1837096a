"""Talk to a model in the terminal: one loaded here, or one that a server has.

examples:
  thalweg chat ./my-model
  thalweg chat --url http://127.0.0.1:8000

Ctrl-C ends an answer (a model that several processes compute, --tensor-parallel, must be loaded again after it);
an empty line or Ctrl-D ends the conversation; /new begins another.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from thalweg.cli.engine_args import add_engine_arguments, build_engine_spec
from thalweg.serve.errors import ApiError

Messages = list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    # fmt: off
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a Hugging Face model's directory or name")
    add = parser.add_argument
    add("--url", help="talk to this server instead")
    add("--api-key", default=os.environ.get("THALWEG_API_KEY"), metavar="KEY")
    add("--system", metavar="TEXT", help="what the model is told before the conversation")
    add("--temperature", type=float, default=0.7)
    add("--max-tokens", type=int, default=512, metavar="N", help="of one answer (default: 512)")
    add("--seed", type=int)
    add_engine_arguments(parser)
    # fmt: on


def run(args: argparse.Namespace) -> int:
    """Converse until the reader has had enough."""
    if (args.url is None) == (args.model is None):
        raise ValueError("give a model, or --url of a server that has one")
    stream_reply = _chat_with_server(args) if args.url else _chat_in_process(args)
    initial_messages: Messages = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(initial_messages)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if not line:
            return 0
        if line == "/new":
            messages = list(initial_messages)
            continue
        messages.append({"role": "user", "content": line})
        reply = ""
        try:
            for chunk in stream_reply(messages):
                reply += chunk
                print(chunk, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:
            raise
        except (ApiError, ValueError, ConnectionError) as error:
            if not sys.stdin.isatty():
                raise RuntimeError(str(error)) from None
            print(("\n" if reply else "") + f"thalweg: {error}", file=sys.stderr, flush=True)
            del messages[-1]  # the next question may do better, or /new
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": reply})


def _chat_with_server(args: argparse.Namespace) -> Callable[[Messages], Iterator[str]]:
    from thalweg.serve.client import iter_sse, post_json

    base = args.url if "://" in args.url else f"http://{args.url}"
    url = f"{base.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    def stream_reply(messages: Messages) -> Iterator[str]:
        body: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": args.max_tokens}
        body |= {"temperature": args.temperature, "seed": args.seed}
        try:
            response = post_json(url, body, args.api_key)
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            response = post_json(url, body | {"max_tokens": None}, args.api_key)  # as long as there is room
        with response:
            for event in iter_sse(response):
                yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    return stream_reply


def _chat_in_process(args: argparse.Namespace) -> Callable[[Messages], Iterator[str]]:
    from thalweg.infer.types import Request, SamplingParams
    from thalweg.serve.openai.requests import FALLBACK_STOP, ChatTokenizer

    engine = build_engine_spec(args).load()
    if engine.metadata.kind == "encoder" or engine.tokenizer is None:
        reason = "is an encoder: it writes nothing" if engine.tokenizer is not None else "has no tokenizer"
        raise ValueError(f"{args.model} {reason}; give a model that generates text")
    chat_tokenizer = ChatTokenizer(engine.tokenizer)

    def stream_reply(messages: Messages) -> Iterator[str]:
        try:
            copies = [dict(message) for message in messages]
            prompt, special = chat_tokenizer.apply_chat_template(copies, None, False, {})
        except ApiError as error:
            raise ValueError(str(error)) from None
        tokens = engine.tokenizer.encode(prompt, add_special_tokens=special)
        max_new_tokens = engine.metadata.max_length - len(tokens)
        if max_new_tokens < 1:
            raise ValueError(f"the conversation fills the model's {engine.metadata.max_length} tokens: begin with /new")
        stop = (FALLBACK_STOP,) if chat_tokenizer.chat_template is None else ()
        max_tokens = min(args.max_tokens, max_new_tokens)
        asked: dict[str, Any] = {"temperature": args.temperature, "seed": args.seed}
        params = SamplingParams(max_tokens=max_tokens, stop=stop, **{**engine.metadata.sampling_defaults, **asked})
        engine.add(Request("chat", tokens, params))
        try:
            while engine.has_work():
                yield from (output.text for output in engine.step())
        finally:
            engine.abort("chat")

    return stream_reply
