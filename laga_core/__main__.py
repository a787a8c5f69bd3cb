"""``python -m laga_core``: what the package does from a command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import PRESETS, MLAConfig
from .costs import ACCOUNTINGS, communication
from .launch import add_commands as add_launch_commands
from .memory import simulate_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; a wrong argument or a failed run is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m laga_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add_command in (add_launch_commands, _add_memory, _add_communication):
        add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_memory(commands: Any) -> None:
    parser = commands.add_parser("memory", help="where every byte of a training step is, simulated")
    _add_sizes(parser)
    parser.add_argument("--kernel", default="fused", help="eager, tiled or fused (default)")
    parser.add_argument("--layers", type=int, default=1)
    parser.set_defaults(run=_memory)


def _add_communication(commands: Any) -> None:
    parser = commands.add_parser("communication", help="bytes that one rank sends in one forward, derived")
    _add_sizes(parser)
    parser.add_argument("--accounting", choices=list(ACCOUNTINGS), default="wire")
    parser.set_defaults(run=_communication)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help=f"a preset ({', '.join(sorted(PRESETS))}), a config.json or a folder with one"
    )
    parser.add_argument("--seq", type=int, required=True, help="tokens of the whole sequence")
    parser.add_argument("--sp", type=int, required=True, help="ranks that share it")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--form", help="only this form (default: all three)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the form, such as score=split"
    )
    parser.add_argument("--json", action="store_true", help="for machines: bytes, as JSON")


def _memory(arguments: argparse.Namespace) -> int:
    results = {}
    for form, config, options in _requests(arguments):
        sizes = {"seq": arguments.seq, "sp": arguments.sp, "batch": arguments.batch, "layers": arguments.layers}
        run = simulate_memory(config, form=form, kernel=arguments.kernel, **sizes, **options)
        results[form] = {"peak_bytes": run.peak_bytes, "saved_bytes": run.saved_bytes, "breakdown": run.breakdown}
    rows = {"peak": "peak_bytes", "saved for backward": "saved_bytes"}
    _print(arguments, "simulated", results, rows, "at the peak", "breakdown")
    return 0


def _communication(arguments: argparse.Namespace) -> int:
    results = {}
    for form, config, options in _requests(arguments):
        sizes = {"seq": arguments.seq, "sp": arguments.sp, "batch": arguments.batch}
        sent = communication(config, form=form, accounting=arguments.accounting, **sizes, **options)
        parts = {"by_collective": sent.by_collective, "by_tensor": sent.by_tensor}
        results[form] = {"total_bytes": sent.total_bytes, **parts}
    _print(arguments, "derived", results, {"sent": "total_bytes"}, "by tensor", "by_tensor")
    return 0


def _requests(arguments: argparse.Namespace) -> list[tuple[str, MLAConfig, dict[str, Any]]]:
    """The forms asked for, with the configuration and the form's options."""
    options = dict(_option(text) for text in arguments.option)
    if options and arguments.form is None:
        raise ValueError("--option needs --form: each form has options of its own")
    name = arguments.model
    config = MLAConfig.from_hf(name) if name not in PRESETS and Path(name).exists() else MLAConfig.preset(name)
    forms = ("explicit", "absorbed", "laga") if arguments.form is None else (arguments.form,)
    return [(form, config, options) for form in forms]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--option takes NAME=VALUE, got {text!r}")
    known = {"true": True, "false": False, "none": None}
    return name, known[value.lower()] if value.lower() in known else int(value) if value.isdigit() else value


def _print(
    arguments: argparse.Namespace,
    kind: str,
    results: dict[str, dict[str, Any]],
    totals: dict[str, str],
    heading: str,
    parts: str,
) -> None:
    if arguments.json:
        print(json.dumps({"kind": kind, "forms": results}, indent=1))
        return
    roles = sorted({role for r in results.values() for role in r[parts]},
                   key=lambda role: -max(r[parts].get(role, 0) for r in results.values()))  # fmt: skip
    print(f"{f'MB, {kind}':<32}" + "".join(f"{form:>14}" for form in results))
    for name, key in totals.items():
        print(f"{name:<32}" + "".join(f"{r[key] / 1e6:>14,.1f}" for r in results.values()))
    print(f"{heading}:")
    for role in roles:
        print(f"  {role:<30}" + "".join(f"{r[parts].get(role, 0) / 1e6:>14,.1f}" for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
