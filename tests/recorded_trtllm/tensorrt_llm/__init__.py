"""Recorded stand-in of tensorrt_llm 1.2.1 (../README.md)."""

__version__ = "1.2.1+recorded.stand.in"
