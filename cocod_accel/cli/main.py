"""Parses the command line and calls the command that it names.

Commands import what they need when they run: ``cocod --help`` must not wait for matplotlib or accelerate.
"""

from __future__ import annotations

import argparse
import os
import select
import sys

from cocod_accel import __version__
from cocod_accel.cli import compare, doctor, lighthouse, plan, reproduce, selftest, simulate, trace, train, watch
from cocod_accel.cli import list as list_command
from cocod_accel.config.strict import printable

_COMMANDS = (train, compare, watch, trace, simulate, plan, reproduce, selftest, lighthouse, doctor, list_command)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of a command, and ``run``, which carries it out; a mistake ends the process."""
    parser = argparse.ArgumentParser(
        prog="cocod", description="Train on many workers without waiting for the network or for the slowest machine."
    )
    parser.add_argument("--version", action="version", version=f"cocod {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands).set_defaults(run=command.run)
    options, rest = parser.parse_known_args(arguments)
    if hasattr(options, "configs") and not any(argument.startswith("-") for argument in rest):
        options.configs += rest  # overrides after an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        code = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit would raise again
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _reader_is_gone() -> bool:
    """Whether whoever reads what is printed, such as ``head``, has seen enough."""
    if sys.stdout is None:
        return False
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # POLLERR, a pipe that nobody reads, is reported unasked
    return any(events & select.POLLERR for _, events in output.poll(0))
