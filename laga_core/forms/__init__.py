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

from .absorbed import absorbed
from .explicit import explicit
from .laga import laga


class Form(NamedTuple):
    """A form's function and, for each of its options, the values it takes (the first is the default)."""

    function: Callable[..., Tensor]
    options: Mapping[str, tuple[Any, ...]]


FORMS: dict[str, Form] = {
    "explicit": Form(explicit, {"key_rope": ("replicated", "headless")}),
    "absorbed": Form(absorbed, {"score": ("joint", "split")}),
    "laga": Form(laga, {}),
}


def resolve_form(name: str, options: Mapping[str, Any]) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The form's function and its options completed with defaults; ``ValueError`` lists what is known."""
    if name not in FORMS:
        raise ValueError(f"unknown form {name!r}; known: {', '.join(FORMS)}")
    form = FORMS[name]
    for key, value in options.items():
        if key not in form.options:
            known = ", ".join(form.options) or "none"
            raise ValueError(f"form {name!r} has no option {key!r}; its options: {known}")
        if value not in form.options[key]:
            raise ValueError(f"form {name!r}: {key} must be one of {list(form.options[key])}, got {value!r}")
    return form.function, {key: options.get(key, values[0]) for key, values in form.options.items()}


__all__ = ["FORMS", "Form", "resolve_form"]
