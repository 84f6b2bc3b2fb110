"""Text to token ids and back: tokenizer.json through the tokenizers library, or raw bytes where vocab_size is 256.

Contract: the pieces that a stream returns, joined, are the decoded text of all its tokens, and no piece ends inside a
UTF-8 character. (Tokens that are no text at all become U+FFFD; how many is up to the tokenizer's decoder.)
Chat templates are rendered in jinja2's sandbox. tokenizers and jinja2 are imported when needed.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ReplayError, require
from ..spec import require_int
from .chat import ChatTemplate

BYTE_VOCAB = 256
REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most four bytes, so at most four tokens can still be waiting for its end.
_LONGEST_CHARACTER = 4
_MOST_HELD = 16


class TextStream(ABC):
    """Tokens of one row in, text out as soon as it is whole."""

    @abstractmethod
    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now complete (may be empty)."""

    @abstractmethod
    def finish(self) -> str:
        """The rest of the text; bytes that are no UTF-8 become U+FFFD."""


class Tokenizer(ABC):
    """What `run` needs of a tokenizer."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. Raises ReplayError for text that cannot be encoded."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``, special tokens left out."""

    @abstractmethod
    def stream(self, context: Sequence[int] = ()) -> TextStream:
        """A new stream for one row whose text goes on from the tokens ``context``."""

    def continuation(self, context: Sequence[int], tokens: Sequence[int]) -> str:
        """Text of ``tokens`` where they go on from ``context``."""
        stream = self.stream(context)
        return stream.push(tokens) + stream.finish()

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of ``text`` as a user's message, up to where the answer begins.

        Raises:
            ReplayError: there is no chat template, or it cannot be rendered.
        """
        raise ReplayError("the checkpoint has no chat template; run it without --chat")


class _ByteStream(TextStream):
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(bytes(tokens))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """Token id = byte of the UTF-8 text.

    Args:
        bos: token in front of every prompt that does not begin with it, 0..255, or None.
    """

    def __init__(self, bos: int | None = None) -> None:
        self._first = [] if bos is None else [bos]

    def encode(self, text: str) -> list[int]:
        try:
            ids = list(text.encode("utf-8", "surrogateescape"))
            return ids if self._first == ids[:1] else self._first + ids
        except UnicodeEncodeError as error:
            raise ReplayError(f"prompt cannot be written as UTF-8: {error.reason} at character {error.start}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        return _ByteStream()


class _DecodeStream(TextStream):
    """Streams by decoding the tokens since the last boundary together with those before it, which give the context.

    Args:
        decode: tokens to text. context: tokens in front of the stream; a decoder that drops the blank before the first
            word of a text keeps it where there is a context.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._context = _clean_tail(decode, context)
        self._held: list[int] = []

    def _text_of(self, count: int) -> str:
        """Text that the first ``count`` held tokens add behind the context."""
        before = self._decode(self._context)
        return self._decode(self._context + self._held[:count])[len(before) :]

    def _emit(self, count: int) -> str:
        text = self._text_of(count)
        if text:
            self._context = self._held[:count]
        if text or count > _MOST_HELD:  # a few tokens without text stay: they may belong to what follows
            self._held = self._held[count:]
        return text

    def push(self, tokens: Sequence[int]) -> str:
        out = ""
        for token in tokens:
            self._held.append(token)
            if not self._text_of(len(self._held)).endswith(REPLACEMENT):
                out += self._emit(len(self._held))
            elif len(self._held) > _MOST_HELD:
                out += self._emit_garbage()
        return out

    def _emit_garbage(self) -> str:
        """Let go of tokens that are no text, at a place where cutting changes nothing."""
        whole = self._text_of(len(self._held))
        for kept in range(1, _LONGEST_CHARACTER + 1):
            count = len(self._held) - kept
            if self._text_of(count) + self._decode(self._held[count:]) == whole:
                return self._emit(count)
        return ""

    def finish(self) -> str:
        return self._emit(len(self._held))


def _clean_tail(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[int]:
    """The last few of ``tokens``, from where a character begins."""
    first = max(0, len(tokens) - _MOST_HELD)
    for start in range(first, min(first + _LONGEST_CHARACTER, len(tokens))):
        if not decode(tokens[start:]).startswith(REPLACEMENT):
            return list(tokens[start:])
    return list(tokens[first:])


class HFTokenizer(Tokenizer):
    """A tokenizer.json, with the chat template that lies beside it.

    Args:
        path: the tokenizer.json.
        chat: the chat template, or None.

    Raises:
        ReplayError: the tokenizers library is missing, or the file cannot be read.
    """

    def __init__(self, path: Path, chat: ChatTemplate | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ReplayError(
                f"{path.name} needs the tokenizers library; install it with: pip install tokenizers jinja2"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise ReplayError(f"cannot read {path}: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._chat = chat

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ReplayError(f"prompt cannot be written as UTF-8: {error.reason} at character {error.start}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stream(self, context: Sequence[int] = ()) -> TextStream:
        return _DecodeStream(self.decode, context)

    def encode_chat(self, text: str) -> list[int]:
        if self._chat is None:
            return super().encode_chat(text)
        return self._encode(self._chat.render([{"role": "user", "content": text}]), special=False)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises ReplayError where it cannot be read or is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReplayError(f"cannot read {path}: {error}") from None
    require(isinstance(data, dict), f"{path} holds a {type(data).__name__}; it must be a JSON object")
    return dict(data)


def _chat_template(directory: Path) -> ChatTemplate | None:
    config_path = directory / "tokenizer_config.json"
    config: Mapping[str, Any] = read_json_object(config_path) if config_path.is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = {t["name"]: t["template"] for t in source if isinstance(t, dict) and {"name", "template"} <= t.keys()}
        source = named.get("default")
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ReplayError(f"cannot read {file}: {error}") from None
    if source is None:
        return None
    require(isinstance(source, str), f"chat_template in {config_path} is a {type(source).__name__}; it must be text")
    return ChatTemplate(str(source), special_tokens(config))


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of a tokenizer_config.json, whose values are text or objects with a ``content``."""
    out = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            out[name] = value
    return out


def load_tokenizer(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Args:
        directory: where tokenizer.json may lie, with tokenizer_config.json and chat_template.jinja.
        vocab_size: of the model; without a tokenizer.json it must be 256, one token per byte. Prompts then begin with
            the bos_token_id of generation_config.json, where that names one.

    Raises:
        ReplayError: no usable tokenizer, a file that cannot be read, or a library that is missing.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if path.is_file():
        return HFTokenizer(path, _chat_template(directory))
    others = [n for n in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json") if (directory / n).is_file()]
    require(
        not others,
        f"{directory} has {', '.join(others)} but no tokenizer.json; write one with transformers: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
    )
    require(
        vocab_size == BYTE_VOCAB,
        f"{directory} has no tokenizer.json and vocab_size is {vocab_size}; only byte-level models (vocab_size "
        f"{BYTE_VOCAB}) do without one",
    )
    return ByteTokenizer(_first_byte(directory / "generation_config.json"))


def _first_byte(path: Path) -> int | None:
    """bos_token_id of a generation_config.json. Raises ReplayError for one that is no byte."""
    bos = read_json_object(path).get("bos_token_id") if path.is_file() else None
    if bos is not None:
        require_int(f"bos_token_id in {path}", bos, 0, BYTE_VOCAB - 1)
    return bos
