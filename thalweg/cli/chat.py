"""``thalweg chat``: talk to a model in the terminal, on a server or in this process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from thalweg.cli.serve import add_engine_arguments, engine_task

_EPILOG = """examples:
  thalweg chat ./my-model
  thalweg chat --url http://127.0.0.1:8000

Ctrl-C ends an answer; an empty line or Ctrl-D ends the conversation; /new begins another.
"""

Messages = list[dict[str, str]]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `chat` to the command line."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal: one loaded here, or one that a server has.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    answer = _remote(args) if args.url else _local(args)
    first: Messages = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(first)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if not line:
            return 0
        if line == "/new":
            messages = list(first)
            continue
        messages.append({"role": "user", "content": line})
        said = ""
        try:
            for piece in answer(messages):
                said += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print(flush=True)
        messages.append({"role": "assistant", "content": said})


def _remote(args: argparse.Namespace) -> Callable[[Messages], Iterator[str]]:
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"

    def answer(messages: Messages) -> Iterator[str]:
        body: dict[str, Any] = {"messages": messages, "stream": True, "max_tokens": args.max_tokens}
        body |= {"temperature": args.temperature, "seed": args.seed}
        url = f"{args.url.rstrip('/')}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            response = urllib.request.urlopen(request)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise RuntimeError(f"the server says {error.code}: {_message(text)}") from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"{args.url} does not answer ({error.reason}): is it serving?") from None
        with response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    return answer


def _message(text: str) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:500]


def _local(args: argparse.Namespace) -> Callable[[Messages], Iterator[str]]:
    from thalweg.infer.api import Request, SamplingParams
    from thalweg.serve.errors import ApiError
    from thalweg.serve.text import DEFAULT_STOP, Text

    engine = engine_task(args).load()
    text = Text(engine.tokenizer)

    def answer(messages: Messages) -> Iterator[str]:
        try:
            prompt, special = text.chat([dict(message) for message in messages], None, False, {})
        except ApiError as error:
            raise ValueError(str(error)) from None
        tokens = engine.tokenizer.encode(prompt, add_special_tokens=special)
        room = engine.facts.max_length - len(tokens)
        if room < 1:
            raise ValueError(
                f"the conversation fills the model's {engine.facts.max_length} tokens: begin with /new"
            )
        stop = (DEFAULT_STOP,) if text.template is None else ()
        params = SamplingParams(
            max_tokens=min(args.max_tokens, room), temperature=args.temperature, seed=args.seed, stop=stop
        )
        engine.add(Request("chat", tokens, params))
        try:
            while engine.has_work():
                yield from (output.text for output in engine.step())
        finally:
            engine.abort("chat")

    return answer
