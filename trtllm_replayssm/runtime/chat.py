"""Chat templates: the jinja text that a checkpoint carries, rendered in jinja2's immutable sandbox.

A template is data from whoever made the checkpoint. It gets the messages, the special tokens and the helpers that
templates on model hubs expect (raise_exception, strftime_now, tojson, loop controls), and nothing else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ReplayError


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as templates expect it: readable characters, not HTML-escaped as jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """One template.

    Args:
        source: the jinja text.
        tokens: special tokens by name (bos_token, eos_token, ...), which the template may use.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text for ``messages`` (each with ``role`` and ``content``), up to where the answer begins.

        Raises:
            ReplayError: jinja2 is missing, the template is malformed, or it refuses the messages.
        """
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise ReplayError("--chat needs jinja2; install it with: pip install tokenizers jinja2") from None

        class Generation(jinja2.ext.Extension):  # type: ignore[misc, unused-ignore]
            """``{% generation %}`` marks the assistant's words for training; here it only encloses them."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=refuse, strftime_now=_strftime_now)
        try:
            template = environment.from_string(self._source)
            return template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except Exception as error:  # whatever the template's own code raises
            raise ReplayError(f"chat template: {type(error).__name__}: {error}") from None
