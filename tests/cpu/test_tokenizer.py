"""Tokenizers: round trips, streams that join to the decoded text at any split, chat templates, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from trtllm_replayssm import ReplayError
from trtllm_replayssm.runtime.chat import ChatTemplate
from trtllm_replayssm.runtime.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer

TEXT = 'def naïve():\n    return "日本語 🙂🚀"\t# ü\u0301\n'
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Every byte is a token; a few merges; two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("d", "e"), ("de", "f"), ("Ġ", "Ġ")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tok = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(["<s>", "</s>"])
    return tok


def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """Words begin with U+2581; what is no word falls back to one token per byte."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    for piece in ("▁", "a", "b", "▁a", "▁b", "c"):
        vocab[piece] = len(vocab)
    tok = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True))
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tok


def write_tokenizer(folder: Path, tok: tokenizers.Tokenizer, **config: object) -> Path:
    tok.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["bytes", "byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer(tmp_path, 256)
    make = byte_level_bpe if request.param == "byte_level" else byte_fallback_bpe
    return load_tokenizer(write_tokenizer(tmp_path, make()), 300)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    stream, pieces, start = tokenizer.stream(), [], 0
    for size in sizes:
        pieces.append(stream.push(ids[start : start + size]))
        start += size
    assert start == len(ids)
    return [*pieces, stream.finish()]


def test_text_survives_and_streams_in_whole_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    for size in (1, 2, 3, 7):
        sizes = [size] * (len(ids) // size) + ([len(ids) % size] if len(ids) % size else [])
        pieces = streamed(tokenizer, ids, sizes)
        assert "".join(pieces) == TEXT
        assert not any("\ufffd" in p for p in pieces)
    # a character is out as soon as its last token is in: nothing is left for finish()
    assert streamed(tokenizer, ids, [1] * len(ids))[-1] == ""


def test_streams_of_garbage_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    # A byte-fallback decoder gives up whole runs of bytes, also those that a stream has shown already.
    fallback = tokenizer.decode([1 + 0x41, 1 + 0xE0]) == "\ufffd\ufffd"
    draw = random.Random(5)
    for _ in range(60):
        ids = [draw.randrange(256) for _ in range(draw.randrange(1, 90))]
        pieces = streamed(tokenizer, ids, [1] * len(ids))
        if not fallback:
            assert "".join(pieces) == tokenizer.decode(ids)
        for piece in pieces:
            piece.encode("utf-8")  # no half characters, no surrogates


def test_garbage_does_not_hold_the_stream_up(tmp_path: Path) -> None:
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_level_bpe()), 300)
    start = tok.encode("日")[:1]
    pieces = streamed(tok, start * 100, [1] * 100)
    assert len("".join(pieces[:-1])) >= 80
    assert "".join(pieces) == "\ufffd" * 100


def test_streams_of_rows_are_separate() -> None:
    tok = ByteTokenizer()
    first, second = tok.stream(), tok.stream()
    euro = list("€".encode())
    assert first.push(euro[:2]) == "" and second.push([65]) == "A"
    assert first.push(euro[2:]) == "€"
    assert second.finish() == ""
    assert first.push(euro[:1]) == "" and first.finish() == "\ufffd"


def test_the_blank_between_prompt_and_text_stays(tmp_path: Path) -> None:
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_fallback_bpe()), 300)
    prompt, new = tok.encode("c 日本語日本語日本語 c"), tok.encode("a b")
    assert tok.decode(new) == "a b"
    assert tok.continuation(prompt, new) == " a b"
    assert tok.continuation([], new) == "a b"
    long = tok.encode("日本語" * 12)  # one run of bytes that no context of fixed length holds
    assert tok.continuation(long, tok.encode("日")[-3:]) == "日"
    assert ByteTokenizer().continuation([65], [66]) == "B"


def test_many_tokens_without_text_are_let_go(tmp_path: Path) -> None:
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_level_bpe()), 300)
    ids = tok.encode("a" + "<s>" * 50 + "b")
    assert "".join(streamed(tok, ids, [1] * len(ids))) == "ab"


def test_special_tokens_do_not_show(tmp_path: Path) -> None:
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_level_bpe()), 300)
    ids = tok.encode("a<s>b</s>")
    assert len(ids) == 4
    assert tok.decode(ids) == "ab"
    assert "".join(streamed(tok, ids, [1] * 4)) == "ab"


def test_bytes_of_the_command_line_survive() -> None:
    assert ByteTokenizer().encode("a\udcff") == [97, 255]
    with pytest.raises(ReplayError, match="cannot be written as UTF-8"):
        ByteTokenizer().encode("a\ud800")


def test_prompts_of_byte_level_models_begin_as_those_were_trained(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, 256).encode("ab") == [97, 98]
    config = tmp_path / "generation_config.json"
    config.write_text('{"bos_token_id": 0, "eos_token_id": 0}')
    tok = load_tokenizer(tmp_path, 256)
    assert tok.encode("ab") == [0, 97, 98] and tok.encode("\0ab") == [0, 97, 98] and tok.encode("") == [0]
    config.write_text('{"bos_token_id": null}')
    assert load_tokenizer(tmp_path, 256).encode("") == []
    config.write_text('{"bos_token_id": 256}')
    with pytest.raises(ReplayError, match=r"bos_token_id in .*generation_config.json is 256; it must be .*255"):
        load_tokenizer(tmp_path, 256)


def test_half_a_surrogate_is_refused(tmp_path: Path) -> None:
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_level_bpe()), 300)
    with pytest.raises(ReplayError, match=r"cannot be written as UTF-8: .* at character 1"):
        tok.encode("a\udcff")


@pytest.mark.parametrize("form", ["text", "named", "file"])
def test_chat_template(tmp_path: Path, form: str) -> None:
    template: object = TEMPLATE
    if form == "named":
        template = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    elif form == "file":
        template = "the file beside it counts"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    tok = load_tokenizer(write_tokenizer(tmp_path, byte_level_bpe(), **config), 300)
    ids = tok.encode_chat("héllo")
    assert ids[0] == tok.encode("<s>")[0]
    assert tok.decode(ids) == "<|user|>héllo\n<|assistant|>"


def test_a_template_writes_all_special_tokens_itself(tmp_path: Path) -> None:
    """A tokenizer that puts a start token in front of every text does not put a second one in front of a chat."""
    made = byte_level_bpe()
    start = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    tok = load_tokenizer(write_tokenizer(tmp_path, made, chat_template=TEMPLATE, bos_token="<s>"), 300)
    assert tok.encode("hi")[0] == start and tok.encode("hi").count(start) == 1
    assert tok.encode_chat("hi")[0] == start and tok.encode_chat("hi").count(start) == 1


def test_chat_template_helpers() -> None:
    source = (
        "{%- for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%%') }}{{ eos_token }}"
    )
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "2"}]
    shown = ChatTemplate(source, {"eos_token": "E"}).render(messages)
    assert shown == '{"role": "user", "content": "<é>"}%E'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_chat_template_refused(source: str, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_no_chat_template(tmp_path: Path) -> None:
    plain = write_tokenizer(tmp_path, byte_level_bpe(), chat_template=[{"name": "tool_use", "template": "x"}])
    for tok in (ByteTokenizer(), load_tokenizer(plain, 300)):
        with pytest.raises(ReplayError, match="no chat template"):
            tok.encode_chat("hi")


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"no tokenizer\.json and vocab_size is 97"):
        load_tokenizer(tmp_path, 97)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ReplayError, match=r"has tokenizer.model but no tokenizer.json.*save_pretrained"):
        load_tokenizer(tmp_path, 256)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "cannot read .*tokenizer.json"),
        ("tokenizer_config.json", "{", "cannot read .*tokenizer_config.json"),
        ("tokenizer_config.json", "[1]", "holds a list; it must be a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template in .* is a int"),
        ("chat_template.jinja", b"\xff", "cannot read .*chat_template.jinja"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    write_tokenizer(tmp_path, byte_level_bpe())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReplayError, match=message):
        load_tokenizer(tmp_path, 300)


def test_missing_libraries_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, byte_level_bpe())
    template = ChatTemplate("x", {})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ReplayError, match=r"pip install tokenizers jinja2"):
        HFTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ReplayError, match=r"jinja2.*pip install tokenizers jinja2"):
        template.render([])
