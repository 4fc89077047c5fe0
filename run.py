#!/usr/bin/env python3
"""The one door for newcomers and developers: `python3 run.py COMMAND`. Standard library only; see `tools/`."""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - said by the program itself, in syntax that old versions read
    sys.stderr.write(
        "run.py needs Python 3.10 or newer, and this is Python "
        + ".".join(map(str, sys.version_info[:2]))
        + ". Install a newer Python and start run.py with it.\n"
    )
    sys.exit(1)

import argparse
import importlib
import signal

from tools.messages import ToolError

#: Command -> module with HELP, add_arguments(parser) and main(arguments) -> exit status.
COMMANDS = {
    "demo": "tools.demo.command",
    "test": "tools.test",
    "serve": "tools.serve",
    "replay": "tools.replay",
    "bench": "tools.bench",
    "doctor": "tools.doctor",
    "lint": "tools.lint",
    "wheels": "tools.wheels",
}


def parser_for(commands):
    """The argument parser of every command."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="VC-Attention: see it, check it, use it. `run.py COMMAND --help` tells about one command.",
    )
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module_name in commands.items():
        module = importlib.import_module(module_name)
        command = choices.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    return parser


def main():
    """Run one command. A problem that a person can act on is one sentence on stderr; 130 when interrupted."""
    # so that a `kill` ends child processes through the same `finally` blocks as an exception
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = parser_for(COMMANDS)
    arguments, rest = parser.parse_known_args()
    if rest and not hasattr(arguments, "passed_on"):
        parser.error("unrecognized arguments: " + " ".join(rest))
    arguments.rest = rest
    try:
        return arguments.main(arguments)
    except ToolError as error:
        sys.stdout.flush()
        sys.stderr.write("run.py " + arguments.command + ": " + str(error) + "\n")
        return error.status
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nStopped.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
