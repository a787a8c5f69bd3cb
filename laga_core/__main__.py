"""``python -m laga_core``: what the package does from a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .launch import add_commands as add_launch_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a wrong argument or a failed run is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m laga_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add_command in (add_launch_commands,):
        add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
