"""What a person would call a tensor, read from the code that makes it.

A value's role is the name of the variable that first receives it, in the innermost line of this package that has a
word for it: ``probabilities = scores.softmax(dim=-1)`` needs no label. So the forms and kernels stay free of labels,
and a new form or option gets its roles without any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent.parent
_DRIVER = "simulate.py"

WORKSPACE = "kernel workspace"
COLLECTIVE = "collective buffers"
GRADIENT_OF = "gradient of "

# Folder or file of this package -> variable -> role. A variable that is not listed does not name a value: the caller's
# does.
_WORDS: dict[str, dict[str, str]] = {
    _DRIVER: {
        "weights": "weights",
        "gradients": "gradients",
        "hidden": "hidden",
        "loss": "loss",
    },
    "attention.py": {
        "q": "q",
        "q_latent": "query latent",
        "latent": "latent",
        "positions": "rotary tables",
        "tokens": "token order",
        "rotary": "rotary tables",
        "out": "output",
    },
    "forms": {
        "q": "q",
        "k": "k",
        "v": "v",
        "kv": "k and v",
        "some": "q",
        "packed": "q, k and v",
        "q_latent": "query latent",
        "latent": "latent",
        "shards": "latent",
        "gathered": "latent",
        "key": "latent",
        "q_absorbed": "q_absorbed",
        "accumulator": "latent accumulator",
        "out": "output",
        "lse": "log-sum-exp",
        "delta": "row sums",
        "dout": "gradient of output",
        "dq": "gradient of q",
        "dk": "gradient of k",
        "dv": "gradient of v",
        "d_q": "gradient of q",
        "found": "gradient of q, k and v",
        "part_q": "gradient of q",
        "d_latent": "gradient of latent",
        "part_latent": "gradient of latent",
        "d_up": "gradient of weights",
        "d_up_q": "gradient of weights",
    },
    "kernels": {
        "q": "q",
        "k": "k",
        "v": "v",
        "products": "scores",
        "scores": "scores",
        "future": "causal mask",
        "probabilities": "probabilities",
        "lse": "log-sum-exp",
        "dq": "gradient of q",
        "dk": "gradient of k",
        "dv": "gradient of v",
    },
}
# A buffer in these folders that only they know is theirs, unless it leaves them: then it is what the caller calls it.
_OWN = {"parallel": COLLECTIVE, "kernels": WORKSPACE}
_LEAVES = {"out", "product"}


class Place(NamedTuple):
    """Where in this package a value is made, and the role it has there, and the one it has once it leaves."""

    role: str | None
    outer: str | None
    room: str | None  # the innermost folder or file of this package


def locate() -> Place:
    """The roles of a value that is being made now; all ``None`` outside this package, as in autograd's own formulas."""
    own = fallback = room = None
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        here = _room(frame.f_code.co_filename)
        if here is not None:
            room = room or here
            names = _assigned(frame.f_code.co_filename).get(frame.f_lineno, ())
            words = _WORDS.get(here, {})
            leaves = here in _OWN and _LEAVES.intersection(names)
            known = [words[name] for name in names if name in words]
            if known and not leaves:
                word = _joined(known)
                if here in _OWN and word.startswith(GRADIENT_OF):
                    own = own or _OWN[here]
                return Place(own or word, word, room)
            if names and here in _OWN and not leaves:
                own = own or _OWN[here]
            fallback = names[0] if names and here == "forms" else fallback
            if here == _DRIVER:
                break
        frame = frame.f_back
    outer = fallback and fallback.replace("_", " ")
    return Place(own or outer, outer, room)


@cache
def _room(filename: str) -> str | None:
    path = Path(filename)
    if not path.is_relative_to(_PACKAGE):
        return None
    folder, *rest = path.relative_to(_PACKAGE).parts
    return {"fused.py": "kernels", _DRIVER: _DRIVER}.get(rest[0]) if folder == "memory" else folder


def _joined(words: list[str]) -> str:
    """Several roles in one: "k and v", "gradient of q, k and v"."""
    *most, last = dict.fromkeys(words)
    prefix = GRADIENT_OF if last.startswith(GRADIENT_OF) and most else ""
    shown = [word.removeprefix(prefix) for word in most]
    return f"{prefix}{', '.join(shown)} and {last.removeprefix(prefix)}" if most else last


@cache
def _assigned(filename: str) -> dict[int, tuple[str, ...]]:
    """Line -> the variables that the statement on it assigns to."""
    found: dict[int, tuple[str, ...]] = {}
    for node in ast.walk(ast.parse(Path(filename).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names = tuple(_names(target))
            if names:
                found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), names))
    return found


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Subscript, ast.Starred)):
        yield from _names(target.value)
    elif isinstance(target, ast.Tuple):
        for part in target.elts:
            yield from _names(part)
