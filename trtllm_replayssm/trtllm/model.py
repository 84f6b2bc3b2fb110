"""The file for ``trtllm-build --model_cls_file <this file> --model_cls_name ReplayHybridForCausalLM``.

trtllm-build loads it under the module name ``models``, outside this package, so imports here are absolute. Loading it
registers the plugins in the building process, which the command itself has no option for.
"""

from __future__ import annotations

from trtllm_replayssm import plugins
from trtllm_replayssm.trtllm.hybrid import ReplayHybridForCausalLM

__all__ = ["ReplayHybridForCausalLM"]

plugins.register()
