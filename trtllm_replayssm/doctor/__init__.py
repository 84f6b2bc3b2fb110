"""``trtllm-replayssm doctor``: what is installed, what works, what to do about the rest. Needs no other package."""

from __future__ import annotations

from .command import add_arguments, examine, main

__all__ = ["add_arguments", "examine", "main"]
