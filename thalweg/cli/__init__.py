"""The command line: one program, one file for each subcommand.

``main`` finds the subcommand's name, imports that one module (``thalweg/cli/<name>.py``, which has
``add_arguments(parser)`` and ``run(args) -> int``) and no other, so `thalweg config` never pays for torch.  A module's
docstring is its help: a paragraph that says what it does, then examples.  ``PARSER_OPTIONS`` are further keywords of
its parser.  A module that starts other programs has ``split_passthrough(parser, arguments)`` as well: what it sets
apart is in ``args.passthrough``, untouched.

Exit codes: 0 for success, 2 for wrong use (arguments, a config, a path that is not there), 1 for failure;
`thalweg run` passes on the code of the rank that failed.  Errors are one paragraph on standard error that
names the cure; THALWEG_TRACEBACK=1 adds the traceback.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import thalweg
from thalweg.utils.formatting import did_you_mean
from thalweg.utils.log import enable_console

COMMANDS: dict[str, str] = {
    "demo": "train a GPT on real text on two processes, from nothing",
    "run": "start a script on several processes of this host",
    "config": "check a ds_config.json and print it resolved",
    "migrate": "what a DeepSpeed config or script comes to here",
    "plan": "what a run will need: bytes, traffic, seconds",
    "tune": "find the fastest configuration that fits",
    "ckpt": "inspect, verify or export a checkpoint",
    "study": "what techniques give for your models and data",
    "bench": "run one of the benchmarks",
    "rlhf": "fine-tune a model: SFT, a reward model, PPO, DPO, GRPO",
    "serve": "serve a model over HTTP (OpenAI's API and a chat page)",
    "chat": "talk to a model in the terminal",
    "doctor": "say what this machine has and what it lacks",
}

_EXAMPLES = """examples:
  thalweg demo
  thalweg run --nproc 2 train.py --config ds_config.json
  thalweg config ds_config.json --world-size 8
"""


class _SuggestingParser(argparse.ArgumentParser):
    """argparse whose errors are one paragraph that ends with where to look."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code and raises nothing but what argparse's ``--help`` does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        parser, module, command_parser = _build_parser(command)
        if command is not None and command_parser is None:
            named = f"{command!r}{did_you_mean(command, COMMANDS)}: there are {', '.join(COMMANDS)}"
            return _print_error(2, f"no subcommand {named}, and options follow them; see `thalweg --help`")
        passthrough: list[str] = []
        if command is not None and hasattr(module, "split_passthrough"):
            position = arguments.index(command) + 1
            own_arguments, passthrough = module.split_passthrough(command_parser, arguments[position:])
            arguments = arguments[:position] + own_arguments
        parsed, unknown = parser.parse_known_args(arguments, argparse.Namespace(passthrough=passthrough))
        if unknown:
            known = [] if command_parser is None else _list_options(command_parser)
            suggestion = did_you_mean(unknown[0].partition("=")[0], known)
            (command_parser or parser).error(f"there is no {' '.join(unknown)}{suggestion}")
        if module is None:
            parser.print_help(sys.stderr)
            return 2
        enable_console()
        code = module.run(parsed)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _print_error(130, "interrupted")
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return _print_error(2, _error_text(error))
    except (OSError, RuntimeError, ImportError, MemoryError) as error:
        return _print_error(1, _error_text(error))


def _build_parser(command: str | None) -> tuple[argparse.ArgumentParser, Any, Any]:
    """The parser, the chosen subcommand's module, and that subcommand's own parser (None without one)."""
    parser = _SuggestingParser(
        prog="thalweg",
        description="Train, fine-tune and serve PyTorch models bigger than the machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"thalweg {thalweg.__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="COMMAND", parser_class=_SuggestingParser)
    module = None
    for name, text in COMMANDS.items():
        if name != command:
            subparsers.add_parser(name, help=text)
            continue
        module = importlib.import_module(f"{__name__}.{name}")
        description, _, examples = (module.__doc__ or "").strip().partition("\n\n")
        texts = {"help": text, "description": description, "epilog": examples}
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, **getattr(module, "PARSER_OPTIONS", {})}
        module.add_arguments(subparsers.add_parser(name, **texts, **options))
    return parser, module, subparsers.choices.get(command or "")


def _list_options(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a subcommand, those of its own actions included."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options += _list_options(inner)
    return options


def _error_text(error: BaseException) -> str:
    """An error in words; the system's own name a file last, and a number first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}; check the path"
    return str(error) or type(error).__name__


def _print_error(code: int, message: str) -> int:
    if os.environ.get("THALWEG_TRACEBACK"):
        traceback.print_exc()
    print(f"thalweg: {message}", file=sys.stderr)
    return code
