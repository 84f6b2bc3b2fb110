"""Recorded: KvCacheConfig."""


class KvCacheConfig:
    def __init__(self, enable_block_reuse: bool = True) -> None:
        self.enable_block_reuse = enable_block_reuse
