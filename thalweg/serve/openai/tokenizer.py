"""Text to tokens in the server process: prompts, chat templates, and the names of single tokens.

Tokens to text is the engine's work (it must know stop strings); what the server needs of a tokenizer is
encoding, a template, and how a token is spelled in a list of log-probabilities.  Encoding a long prompt
takes a while and gives up the GIL, and a chat template is a program: both happen in a thread.  The tokenizer's Rust
object is called directly, because the Python wrapper changes its state on every call and is not safe in two threads.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from thalweg.serve.errors import BadRequest, ContextLengthExceeded
from thalweg.utils.log import get_logger

_LOG = get_logger(__name__)
T = TypeVar("T")
_INLINE_CHARS = 2048  # characters that are encoded on the spot
FALLBACK_STOP = "\nUser:"
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


def load_chat_tokenizer(
    model: str, loader: str, chat_template: str | None = None, trust_remote_code: bool = False
) -> ChatTokenizer:
    """Load the tokenizer of ``model``; a loader of engines may have a ``load_tokenizer`` beside it."""
    module = importlib.import_module(loader.partition(":")[0])
    custom_loader = getattr(module, "load_tokenizer", None)
    tokenizer = custom_loader(model) if custom_loader is not None else load_tokenizer(model, trust_remote_code)
    return ChatTokenizer(tokenizer, chat_template)


class ChatTokenizer:
    """A tokenizer as the endpoints use it; ``chat_template`` takes the place of the tokenizer's own."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.hf_tokenizer = tokenizer
        templates = chat_template or getattr(tokenizer, "chat_template", None)
        templates_by_name = templates if isinstance(templates, dict) else {"default": templates}
        self.chat_template: str | None = templates_by_name.get("default") or next(
            iter(templates_by_name.values()), None
        )
        self._tool_template: str | None = templates_by_name.get("tool_use")
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # One thread, so that a flood of long prompts takes one core.
        self._executor = ThreadPoolExecutor(1, "thalweg-tokenizer")
        self._token_texts: dict[int, tuple[str, list[int]]] = {}
        self._max_token_chars = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    @property
    def supports_tools(self) -> bool:
        """Whether the chat template says what to do with tools."""
        return self._tool_template is not None or "tools" in (self.chat_template or "")

    async def encode(self, text: str, add_special_tokens: bool, max_tokens: int, param: str) -> list[int]:
        """Return the tokens of ``text``; raises 400 when there must be more than ``max_tokens``."""
        if self.hf_tokenizer is None:
            raise BadRequest("this model has no tokenizer: send token ids", param)
        if len(text) > max_tokens * self._max_token_chars:
            raise context_length_error(f"at least {len(text) // self._max_token_chars}", max_tokens, param)
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await self._in_thread(lambda: self._encode(text, add_special_tokens))

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, bool]:
        """:meth:`apply_chat_template` in a thread: a template is a program, and a long conversation its input."""
        if self.chat_template is None:
            return self.apply_chat_template(messages, tools, continue_final_message, template_kwargs)
        return await self._in_thread(
            lambda: self.apply_chat_template(messages, tools, continue_final_message, template_kwargs)
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, bool]:
        """Return the prompt of a conversation, and whether special tokens must be added to it.

        ``template_kwargs`` go to the template; one that is a setting of ours is refused.
        """
        if self.chat_template is None:
            return apply_fallback_template(messages, continue_final_message), True
        try:
            prompt = self.hf_tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._tool_template if tools and self._tool_template else self.chat_template,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except Exception as error:  # templates refuse what they do not know by raising whatever they like
            raise BadRequest(f"the model's chat template refuses this: {error}", "messages") from None
        return prompt, False

    def token_text(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes, which may be a part of a character."""
        if token not in self._token_texts:
            if len(self._token_texts) > 200_000:
                self._token_texts.clear()
            self._token_texts[token] = self._decode_token(token)
        return self._token_texts[token]

    def _decode_token(self, token: int) -> tuple[str, list[int]]:
        if self.hf_tokenizer is None:
            return f"token_id:{token}", []
        text = self.hf_tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            return text, list(text.encode())
        piece = self.hf_tokenizer.convert_ids_to_tokens(token) or ""
        if len(piece) == 6 and piece.startswith("<0x"):
            return text, [int(piece[3:5], 16)]
        table = _byte_decoder()
        return text, [table[c] for c in piece] if all(c in table for c in piece) else list(text.encode())


def context_length_error(length: int | str, max_tokens: int, param: str) -> ContextLengthExceeded:
    """Return the 400 of a prompt that leaves no room."""
    return ContextLengthExceeded(
        f"the prompt has {length} tokens, and there is room for {max_tokens} beside the answer: shorten it", param
    )


def apply_fallback_template(messages: Sequence[dict[str, Any]], continue_final_message: bool) -> str:
    """Return a conversation in plain words, for models without a chat template."""
    names = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
    lines = [f"{names.get(m['role'], 'User')}: {m['content']}" for m in messages]
    return "\n".join(lines if continue_final_message else [*lines, "Assistant:"])


def _byte_decoder() -> dict[str, int]:
    """The alphabet of byte-level tokenizers (GPT-2): which character stands for which byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
