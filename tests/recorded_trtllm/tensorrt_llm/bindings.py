"""Recorded: the KV cache types."""

import enum


class KVCacheType(enum.Enum):
    CONTINUOUS = 0
    PAGED = 1
    DISABLED = 2
