"""The one exception type that the command line turns into a one-line message and exit code 2.

Library code raises :class:`ReplayError` (a ``ValueError``) for anything the caller can put right: a bad argument, an
unreadable file, a checkpoint that does not match its config. The message names the argument, the value that came and
what is allowed. Programming errors keep their own types.
"""

from __future__ import annotations


class ReplayError(ValueError):
    """Bad input, said in one line: what, the value that came, what is allowed."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`ReplayError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ReplayError(message)
