#!/usr/bin/env python3
"""Published checkpoint -> checkpoint directory: ``trtllm-replayssm convert`` where the package need not be installed.

usage: build_scripts/convert_checkpoint.py HF_DIR OUT_DIR [options]      (--help lists them)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_replayssm.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
