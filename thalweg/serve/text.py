"""Text to tokens in the front: prompts, chat templates, and the names of single tokens.

Tokens to text is the engine's work (it must know stop strings); what the front needs of a tokenizer is
encoding, a template, and how a token is spelled in a list of log-probabilities.  Encoding a long prompt
takes a while and gives up the GIL, so it happens in a thread; the tokenizer's Rust object is called
directly, because the Python wrapper changes its state on every call and is not safe in two threads.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from thalweg.serve.errors import bad_request
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
_SHORT = 2048  # characters that are encoded on the spot
DEFAULT_STOP = "\nUser:"
"""Where an answer ends that was asked for by the plain template."""


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face model's directory; None, with a warning, where it has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        cause = (str(error) or type(error).__name__).strip().splitlines()[0]
        _LOG.warning("%s has no tokenizer that can be read (%s): requests must send token ids", model, cause)
        return None


def load_text(model: str, loader: str, template: str | None = None, trust_remote_code: bool = False) -> Text:
    """Load the tokenizer of ``model``; a loader of engines may have a ``load_tokenizer`` beside it."""
    module = importlib.import_module(loader.partition(":")[0])
    own = getattr(module, "load_tokenizer", None)
    tokenizer = own(model) if own is not None else load_tokenizer(model, trust_remote_code)
    return Text(tokenizer, template)


class Text:
    """A tokenizer as the endpoints use it; ``template`` takes the place of the tokenizer's own."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        given = template or getattr(tokenizer, "chat_template", None)
        named = given if isinstance(given, dict) else {"default": given}
        self.template: str | None = named.get("default") or next(iter(named.values()), None)
        self._with_tools: str | None = named.get("tool_use")
        self._rust = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = asyncio.Lock()
        self._spellings: dict[int, tuple[str, list[int]]] = {}
        self._longest = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template says what to do with tools."""
        return self._with_tools is not None or "tools" in (self.template or "")

    async def encode(self, text: str, special: bool, at_most: int, param: str) -> list[int]:
        """Return the tokens of ``text``; raises 400 when there must be more than ``at_most``."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer: send token ids", param)
        if len(text) > at_most * self._longest:
            raise too_long(f"at least {len(text) // self._longest}", at_most, param)
        if len(text) <= _SHORT:
            return self._encode(text, special)
        async with self._lock:  # one at a time, so that a flood of long prompts takes one core
            return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        if self._rust is not None:
            return self._rust.encode(text, add_special_tokens=special).ids
        return self.tokenizer.encode(text, add_special_tokens=special)

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        go_on: bool,
        variables: dict[str, Any],
    ) -> tuple[str, bool]:
        """Return the prompt of a conversation, and whether special tokens must be added to it.

        ``variables`` go to the template; one that is a setting of ours is refused.
        """
        if self.template is None:
            return plain_chat(messages, go_on), True
        try:
            prompt = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._with_tools if tools and self._with_tools else self.template,
                tokenize=False,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                **variables,
            )
        except Exception as error:  # templates refuse what they do not know by raising whatever they like
            raise bad_request(f"the model's chat template refuses this: {error}", "messages") from None
        return prompt, False

    def spell(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes, which may be a part of a character."""
        if token not in self._spellings:
            if len(self._spellings) > 200_000:
                self._spellings.clear()
            self._spellings[token] = self._spell(token)
        return self._spellings[token]

    def _spell(self, token: int) -> tuple[str, list[int]]:
        if self.tokenizer is None:
            return f"token_id:{token}", []
        text = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = self.tokenizer.convert_ids_to_tokens(token) or ""
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, [int(piece[3:5], 16)]
        table = _byte_table()
        return text, [table[c] for c in piece] if all(c in table for c in piece) else list(text.encode())


def too_long(length: int | str, at_most: int, param: str) -> Exception:
    """Return the 400 of a prompt that leaves no room."""
    return bad_request(
        f"the prompt has {length} tokens, and there is room for {at_most} beside the answer: shorten it",
        param,
        "context_length_exceeded",
    )


def plain_chat(messages: Sequence[dict[str, Any]], go_on: bool) -> str:
    """Return a conversation in plain words, for models without a chat template."""
    names = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
    lines = [f"{names.get(m['role'], 'User')}: {m['content']}" for m in messages]
    return "\n".join(lines if go_on else [*lines, "Assistant:"])


def _byte_table() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (GPT-2): which character stands for which byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
