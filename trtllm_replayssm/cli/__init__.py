"""The command line: ``trtllm-replayssm COMMAND ...``.

Exit codes: 0 done, 1 a comparison failed, 2 bad input (one line on stderr), 130 interrupted, 141 the reader of stdout
went away. Importing this and ``--help`` load neither torch nor any command but the one that is named.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import ReplayError
from .common import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_PIPE, PROG, Parser, close_stdout, open_streams, report_error

#: Command, module that has add_arguments(parser) and main(args) -> int, one line of help.
COMMANDS = {
    "convert": ("trtllm_replayssm.cli.convert", "Hugging Face checkpoint -> checkpoint directory"),
    "build": ("trtllm_replayssm.cli.build", "checkpoint directory -> TensorRT or TensorRT-LLM engine directory"),
    "run": ("trtllm_replayssm.cli.run", "text from a checkpoint; ReplaySSM against conventional decoding"),
    "plan": ("trtllm_replayssm.plan", "memory, traffic, best window and predicted speed-up of a model on a GPU"),
    "doctor": ("trtllm_replayssm.doctor", "what is installed, what works, what to do about the rest"),
}

#: Packages that come with the extra ``torch`` and that commands import when they need them.
TORCH_EXTRA = ("torch", "safetensors")


def build_parser(command: str | None) -> Parser:
    """The whole parser, with the options of ``command`` alone filled in."""
    parser = Parser(prog=PROG, description="ReplaySSM decoding for hybrid (attention + state-space) models.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, (module, text) in COMMANDS.items():
        child = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(module).add_arguments(child)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and raises nothing but SystemExit (from --help and bad options)."""
    open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    try:
        args, surplus = build_parser(command).parse_known_args(arguments)
        if surplus:
            raise ReplayError(_surplus_message(args.command, surplus))
        code = int(importlib.import_module(COMMANDS[args.command][0]).main(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        close_stdout()
        return EXIT_PIPE
    except ReplayError as error:
        report_error(str(error))
    except (OSError, MemoryError) as error:
        report_error(str(error) or "out of memory")
    except ModuleNotFoundError as error:
        if error.name not in TORCH_EXTRA:
            raise
        report_error(f"{error.name} is not installed; install it with: pip install torch safetensors")
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        report_error(f"out of memory; use a smaller --max-batch or another --device ({error})")
    return EXIT_BAD_INPUT


def _surplus_message(command: str, surplus: Sequence[str]) -> str:
    prompt = command == "run" and (surplus[0] == "-" or not surplus[0].startswith("-"))
    hint = " (a prompt is given as --prompt TEXT, or on stdin without it)" if prompt else ""
    return f"unrecognized arguments: {' '.join(surplus)}{hint}; see {PROG} {command} --help"


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, on the GPU or (DefaultCPUAllocator) on the host. Needs no torch."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
