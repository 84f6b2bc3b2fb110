"""Hybrid models: configuration, the decoder (written once against ops/), readers of published checkpoints.

No module here imports torch before it handles a tensor, so configs can be read without it.
"""
