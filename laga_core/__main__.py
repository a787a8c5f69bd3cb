"""``python -m laga_core``: what the package does from a command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from .config import PRESETS, MLAConfig
from .costs import ACCOUNTINGS, Cost, FormChoice, Machine, choose, communication
from .costs.choice import code
from .forms import resolve_form
from .launch import add_commands as add_launch_commands
from .memory import simulate_memory
from .sharding import LAYOUTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. What goes wrong is one line on stderr; exit code 2 for what cannot be, 1 for a failed run."""
    parser = argparse.ArgumentParser(prog="python -m laga_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add_command in (add_launch_commands, _add_memory, _add_communication, _add_plan):
        add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        result = int(arguments.run(arguments))
        if sys.stdout is not None:  # closed by the caller, as by ``>&-``
            sys.stdout.flush()
        return result
    except BrokenPipeError:  # who reads the output, as ``| head`` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return 0
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"{parser.prog} {arguments.command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, TypeError, FileNotFoundError)) else 1
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


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser("plan", help="which form is quickest, does it fit, and the code to copy; derived")
    _add_job(parser)
    parser.add_argument("--layers", type=int, default=1, help="whose memory adds up on a rank (default: 1)")
    parser.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="of the tokens, where R > 1")
    parser.add_argument("--device", default="npu", help="a typical one to start from: cpu, cuda or npu (default)")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    for name, (what, _) in _MACHINE.items():
        parser.add_argument(f"--{name}", type=float, metavar="NUMBER", help=what)
    parser.set_defaults(run=_plan)


_MACHINE = {
    "node-link": ("GB/s to a rank of the same node", 1e9),
    "slow-link": ("GB/s to a rank of another node", 1e9),
    "rate": ("TFLOP/s in projections", 1e12),
    "attention-rate": ("TFLOP/s in attention", 1e12),
    "latency": ("microseconds that any collective takes", 1e-6),
    "memory": ("GB there are for what all layers keep (default: no limit)", 1e9),
}
"""What a reader may say of a machine: in words, and the unit."""


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    _add_job(parser)
    parser.add_argument("--form", help="only this form (default: all three)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the form, such as score=split"
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, help=f"a preset ({', '.join(sorted(PRESETS))}), a config.json or a folder with one"
    )
    parser.add_argument("--seq", type=int, required=True, help="tokens of the whole sequence")
    parser.add_argument("--sp", type=int, required=True, help="ranks that share it")
    parser.add_argument("--batch", type=int, default=1)
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


def _plan(arguments: argparse.Namespace) -> int:
    config, config_code = _config(arguments.model)
    sp, per_node = arguments.sp, arguments.ranks_per_node
    if sp > per_node > 0 and sp % per_node:
        raise ValueError(f"--ranks-per-node {per_node} does not divide --sp {sp}: nodes are taken to be full")
    said = {name.replace("-", "_"): unit for name, (_, unit) in _MACHINE.items()}
    given = {name: value * unit for name, unit in said.items() if (value := getattr(arguments, name)) is not None}
    machine = replace(Machine.typical(arguments.device), ranks_per_node=per_node, **given)
    found = choose(config, arguments.seq, sp, machine, arguments.layers, arguments.layout, arguments.batch)
    written = code(found.form, found.options, config_code)
    if arguments.json:
        told = {"kind": "derived", "machine": asdict(machine), "layers": arguments.layers, "reason": found.reason}
        members = [_member(each, found) for each in found.weighed]
        print(json.dumps({**told, "code": written, "best": _member(found.best, found), "members": members}, indent=1))
        return 0
    print(f"{'derived, one layer forward and backward':<46}{'ms':>10}{'MB sent':>12}{'outside':>10}{'GB kept':>10}")
    for each in found.contenders:
        sent, outside = each.sent_bytes / 1e6, each.inter_node_bytes / 1e6
        kept, note = arguments.layers * each.saved_bytes / 1e9, "" if each in found.fitting else "  does not fit"
        print(f"{each!s:<46}{1e3 * each.seconds:>10,.2f}{sent:>12,.1f}{outside:>10,.1f}{kept:>10,.2f}{note}")
    print(f"\n{found.reason}\n\n{written}")
    return 0


def _member(cost: Cost, found: FormChoice) -> dict[str, Any]:
    return {"member": str(cost), **asdict(cost), "seconds": cost.seconds, "fits": cost in found.fitting}


def _config(name: str) -> tuple[MLAConfig, str]:
    """The configuration that ``--model`` names, and the code that makes it."""
    if name not in PRESETS and os.path.exists(name):
        return MLAConfig.from_hf(name), f"MLAConfig.from_hf({json.dumps(name)})"
    return MLAConfig.preset(name), f"MLAConfig.preset({json.dumps(name)})"


def _requests(arguments: argparse.Namespace) -> list[tuple[str, MLAConfig, dict[str, Any]]]:
    """The forms asked for, with the configuration and the form's options."""
    options: dict[str, Any] = {}
    for name, value in map(_option, arguments.option):
        if name in options:
            raise ValueError(f"--option {name} is given twice: {options[name]!r} and {value!r}")
        options[name] = value
    if options and arguments.form is None:
        raise ValueError("--option needs --form: each form has options of its own")
    config, _ = _config(arguments.model)
    forms = ("explicit", "absorbed", "laga") if arguments.form is None else (arguments.form,)
    for form in forms:
        resolve_form(form, options)
    return [(form, config, options) for form in forms]


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"--option takes NAME=VALUE, got {text!r}")
    known = {"true": True, "false": False, "none": None}
    return name, known[value.lower()] if value.lower() in known else int(value) if value.isdecimal() else value


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
