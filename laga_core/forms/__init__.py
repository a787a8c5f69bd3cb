"""The three forms of sequence-parallel MLA: one function each, one signature.

A form takes ``(mla, hidden, rotary, attend, group, **options)``: the layer's projections (:class:`Projections`), this
rank's hidden shard ``[batch, seq/sp, hidden]``, the rotary tables of its tokens, an attention kernel with scale and
mask bound, and the process group. It returns the attention output before the last projection,
``[batch, seq/sp, heads, v_head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..config import MLAConfig
from ..sharding import LAYOUTS
from .absorbed import absorbed
from .explicit import explicit
from .family import check_family, family


class Option(NamedTuple):
    """An option of a form: ``values`` to try (the first is the default), what it ``accepts``, and that in words."""

    values: tuple[Any, ...]
    accepts: Callable[[Any], bool]
    expected: str

    @property
    def default(self) -> Any:
        """The value it has when it is not given."""
        return self.values[0]


def one_of(*values: Any) -> Option:
    """One of these values and no other, not even an equal one of another type."""
    return Option(values, lambda x: any(x == v and type(x) is type(v) for v in values), f"one of {list(values)}")


def whole(*values: int | None) -> Option:
    """A whole number of at least 1, or ``None`` where that is the default; ``values`` are examples."""
    optional = values[0] is None

    def accepts(x: Any) -> bool:
        return (optional and x is None) or (type(x) is int and x >= 1)

    return Option(values, accepts, f"a whole number of at least 1{' or None' if optional else ''}")


def _check_heads(config: MLAConfig, sp: int, options: Mapping[str, Any]) -> None:
    config.check_degree(sp)


class Form(NamedTuple):
    """A form's function, its options, and a check that raises where they do not fit a configuration on sp ranks."""

    function: Callable[..., Tensor]
    options: Mapping[str, Option]
    check: Callable[[MLAConfig, int, Mapping[str, Any]], None] = _check_heads


FORMS: dict[str, Form] = {
    "explicit": Form(explicit, {"key_rope": one_of("replicated", "headless"), "packed": one_of(False, True)}),
    "absorbed": Form(absorbed, {"score": one_of("joint", "split")}),
    "laga": Form(
        family,
        {
            "context": whole(1, 2),
            "layout": one_of(*LAYOUTS),
            "query": one_of("heads", "latent"),
            "recompute": one_of(False, True),
            "head_chunk": whole(None, 1),
            "overlap": one_of(False, True),
        },
        check_family,
    ),
}

STRONG_EXPLICIT = {"key_rope": "headless", "packed": True}
"""The options of the explicit form as a good engineer would write it: the opponent in comparisons of speed."""


def resolve_form(name: str, options: Mapping[str, Any]) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The form's function and its options completed with defaults; ``ValueError`` lists what is known."""
    if not isinstance(name, str) or name not in FORMS:
        raise ValueError(f"unknown form {name!r}; known: {', '.join(FORMS)}, and auto in MLAAttention")
    form = FORMS[name]
    for key, value in options.items():
        if key not in form.options:
            known = ", ".join(form.options) or "none"
            raise ValueError(f"form {name!r} has no option {key!r}; its options: {known}")
        if not form.options[key].accepts(value):
            raise ValueError(f"form {name!r}: {key} must be {form.options[key].expected}, got {value!r}")
    return form.function, {key: options.get(key, option.default) for key, option in form.options.items()}


def check_form(config: MLAConfig, sp: int, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options completed with defaults; ``ValueError`` where they do not fit ``config`` on ``sp`` ranks."""
    _, complete = resolve_form(name, options)
    FORMS[name].check(config, sp, complete)
    return complete


__all__ = ["FORMS", "STRONG_EXPLICIT", "Form", "Option", "check_form", "one_of", "resolve_form", "whole"]
