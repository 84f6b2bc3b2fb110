"""How ``run`` shows text and results."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..runtime.compare import Comparison, Difference, RowComparison
    from ..runtime.generate import Completion
    from ..runtime.tokenizer import Tokenizer

_LABEL_WIDTH = 60
#: Control characters other than tab and newline: a terminal would obey them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def count(number: int, noun: str) -> str:
    """``1 token``, ``1,000 tokens``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def label(index: int, text: str) -> str:
    """One line that names a prompt."""
    shown = quoted(text if len(text) <= _LABEL_WIDTH else text[: _LABEL_WIDTH - 3] + "...")
    return f"[{index}] {shown}"


def quoted(text: str) -> str:
    """``text`` in quotes, on one line, with nothing a terminal would obey."""
    return repr(text)


class Printer:
    """Text on stdout: streamed for one prompt, each when it is done under its label for several.

    Args:
        tokenizer: turns tokens into text. texts: the prompts, for the labels. ids: their tokens.

    Attributes:
        terminal: whether stdout is one.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._streams = [tokenizer.stream(prompt) for prompt in ids]
        self._held = ["" for _ in texts]
        self._live = len(texts) == 1
        self.terminal = sys.stdout.isatty()
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")

    def tokens(self, index: int, tokens: Sequence[int]) -> None:
        """New tokens of prompt ``index``."""
        self._put(index, self._streams[index].push(tokens))

    def done(self, index: int) -> None:
        """Prompt ``index`` has all its tokens."""
        self._put(index, self._streams[index].finish())
        if self._live:
            self._write("\n")
        else:
            self._write(f"{label(index, self._texts[index])}\n{self._held[index]}\n")

    def _put(self, index: int, text: str) -> None:
        if self._live:
            self._write(text)
        else:
            self._held[index] += text

    def _write(self, text: str) -> None:
        sys.stdout.write(_CONTROL.sub("\ufffd", text) if self.terminal else text)
        sys.stdout.flush()


def speed_line(completions: Sequence[Completion], seconds: float) -> str:
    """Tokens, time, with drafts how many were kept, and how many texts the model's position limit cut off."""
    tokens = sum(len(c.tokens) for c in completions)
    line = f"{count(tokens, 'token')} in {seconds:.2f} s ({tokens / max(seconds, 1e-9):.1f} tokens/s)"
    line += drafts_text(sum(c.drafted for c in completions), sum(c.accepted for c in completions))
    cut = sum(c.finish_reason == "positions" for c in completions)
    return line + (f"; {count(cut, 'text')} ended at the position limit" if cut else "")


def drafts_text(drafted: int, accepted: int) -> str:
    """How many drafts were kept; empty without drafts."""
    return f"; {accepted:,} of {drafted:,} draft tokens kept ({accepted / drafted:.0%})" if drafted else ""


def comparison_lines(result: Comparison, tokenizer: Tokenizer) -> list[str]:
    """A line per prompt, one more for where its texts differ, and the verdict."""
    lines = []
    for i, row in enumerate(result.rows):
        verdict = "texts identical" if row.identical else "texts differ"
        lines.append(
            f"[{i}] {count(len(row.tokens), 'token')}: {verdict}; logits differ by at most {row.logit_difference:.1e}, "
            f"final states by {row.state_difference:.1e} (relative)" + drafts_text(row.drafted, row.accepted)
        )
        if row.first is not None:
            lines.append("    " + _difference_line(row, row.first, tokenizer))
    tokens, same = sum(row.compared for row in result.rows), sum(row.identical for row in result.rows)
    bounds = result.rounding
    lines.append(
        f"conventional and ReplaySSM decoding, {count(tokens, 'position')}: "
        f"{same} of {count(len(result.rows), 'text')} identical; "
        + ("every difference is rounding" if result.ok else "DIFFERENT beyond rounding")
    )
    lines.append(
        f"  logits:       {max(r.logit_difference_relative for r in result.rows):.1e} of the largest logit "
        f"(rounding explains {bounds.logits:.1e})"
    )
    lines.append(
        f"  final states: {max(r.state_difference for r in result.rows):.1e} of their norm "
        f"(rounding explains {bounds.states:.1e})"
    )
    return lines


def _difference_line(row: RowComparison, first: Difference, tokenizer: Tokenizer) -> str:
    ours, theirs = (quoted(tokenizer.decode([t])) for t in (first.conventional, first.replay))
    a, b = first.conventional_logits
    verdict = ""
    if row.greedy:
        verdict = ": rounding" if first.gap <= first.allowed else ": NOT rounding"
    return (
        f"first at token {first.position}: conventional {ours} ({first.conventional}), ReplaySSM {theirs} "
        f"({first.replay}); their logits {a:.6g} and {b:.6g} lie {first.gap:.1e} apart, the decodings differ by "
        f"{first.logit_difference:.1e} here, rounding explains {first.allowed:.1e}{verdict}; "
        f"{row.differing} of {count(row.compared, 'choice')} differ, each on the conventional tokens"
    )


def completion_json(index: int, prompt: str, prompt_tokens: int, text: str, row: Completion) -> dict[str, Any]:
    """One completion as plain values."""
    return {
        "index": index,
        "prompt": prompt,
        "prompt_tokens": prompt_tokens,
        "text": text,
        "tokens": row.tokens,
        "finish_reason": row.finish_reason,
        "launches": row.launches,
        "drafted": row.drafted,
        "accepted": row.accepted,
    }
