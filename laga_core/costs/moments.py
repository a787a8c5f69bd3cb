"""What each form holds, tensor by tensor: what it keeps for backward, and the moments at which a step may peak.

A case is one form under one kernel with its options. ``eager`` writes the matrix of scores down; ``fused`` is any
memory-linear kernel without workspace; ``tiled`` keeps what ``fused`` keeps and has its tiles on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy

from . import rebuild, tiles
from .symbols import CONTEXT, HEADS, HIDDEN, KV_LORA, NOPE, Q_LORA, ROPE, SEQ, SP, VALUE
from .tensors import (
    ALL,
    BEFORE,
    DIRECT,
    HERE,
    LATENT,
    LOCAL,
    LSE,
    MATRICES,
    ONE,
    QK,
    QUERY_LATENT,
    ROTARY,
    SCORES,
    TOKENS,
    ZERO,
    Case,
    K,
    Q,
    Roles,
    V,
    W,
    add,
    if_one,
)

KERNELS = ("eager", "fused", "tiled")


def case(form: str, kernel: str, options: Mapping[str, Any]) -> Case:
    """The tensors of ``form`` under ``kernel``; ``options`` are complete."""
    found = _FORMS[form](kernel, options)
    return Case(found.saved, {"output projection": _output_projection(found.saved), **found.moments, **_end(options)})


def _explicit(kernel: str, options: Mapping[str, Any]) -> Case:
    kept = {**BEFORE, "latent": LOCAL * (LATENT + KV_LORA) * W, "q": QUERY_LATENT + Q, "k": K, "v": V}
    if kernel != "eager" and not options["packed"]:
        product = LOCAL * HEADS * (NOPE + VALUE) * W  # of keys and values, of which v is a view on one rank
        kept["v"] = if_one(SP, product, V)
    found = _per_head(kernel, kept, again=if_one(SP, ZERO, ONE))
    return Case(found.saved, {**found.moments, "exchange": _packed(options)}) if options["packed"] else found


def _laga(kernel: str, options: Mapping[str, Any]) -> Case:
    groups = CONTEXT if options["context"] > 1 else ONE
    heads, rows = HERE * groups, ALL / groups  # of this rank's queries
    chunk = options["head_chunk"] or heads  # heads that are built together
    latent_query = options["query"] == "latent"
    if options["recompute"]:
        return rebuild.again(kernel, groups, chunk, latent_query)
    chunks = sympy.ceiling(heads / chunk)
    kept = {**BEFORE, "latent": (LOCAL + ALL) * LATENT * W, "q": QUERY_LATENT + Q, "k": groups * K, "v": groups * V}
    if latent_query:
        kept["q"] = (LOCAL + rows) * Q_LORA * W + Q
        kept["rotary tables"] += ROTARY * chunks * SEQ / groups * ROPE * W
    joined = options["head_chunk"] is not None or (options["layout"] == "zigzag" and options["context"] > 1)
    found = _per_head(kernel, kept, ONE if joined else if_one(SP / groups, ZERO, ONE), groups, chunks)
    return Case(found.saved, found.moments | rebuild.gathered(groups, options)) if latent_query else found


def _per_head(kernel: str, kept: Roles, again: sympy.Expr, groups: sympy.Expr = ONE, chunks: sympy.Expr = ONE) -> Case:
    """Attention over keys and values of each head. ``again`` is 1 where the output is laid out again after it."""
    if kernel == "eager":
        kept = add(kept, MATRICES, {"causal mask": (chunks - 1) * MATRICES["causal mask"]})
        backward = add(kept, {"gradient of probabilities": SCORES, "gradient of scores": SCORES})
        backward["gradient of v"] = backward.pop("v")
        return Case(add(kept, {"output": V}), {"softmax backward": backward})
    kept = {**kept, "log-sum-exp": LSE}
    gradients = {"gradient of output": V, "gradient of q": Q, "gradient of k": groups * K, "gradient of v": groups * V}
    held = add(kept, {"output": V}, gradients)
    if kernel == "tiled":
        held["kernel workspace"] = tiles.per_head(HERE * groups, SEQ / groups)
    return Case(add(kept, {"output": (1 + again) * V}), {"attention backward": held})


def _absorbed(kernel: str, options: Mapping[str, Any]) -> Case:
    split = options["score"] == "split"
    gathered, value = ALL * LATENT * W, ALL * KV_LORA * W
    query = ALL * HERE * (KV_LORA if split and kernel == "eager" else LATENT) * W
    accumulator = ALL * HERE * KV_LORA * W
    common = {**BEFORE, "latent": LOCAL * LATENT * W + gathered, "q": QUERY_LATENT + Q, "q_absorbed": query}
    up_value = {"gradient of weights": HERE * KV_LORA * VALUE * W}
    if kernel == "eager":
        common = add(common, {"q": ALL * HERE * ROPE * W if split else ZERO}, MATRICES)
        saved = add(common, {"latent": value, "latent accumulator": accumulator, "output": V})
        # In forward the values of the function's own variables are there too: scores, the query before scaling, ...
        names = {"scores": SCORES * (3 if split else 1), "q_absorbed": query, "latent accumulator": accumulator}
        locals_ = LOCAL * (KV_LORA + ROTARY * ROPE) * W + value + (gathered if split else 0)
        forward = add(common, names, {"latent": locals_})
        gradients = {"gradient of probabilities": SCORES, "gradient of scores": SCORES, "gradient of latent": value}
        return Case(saved, {"attention forward": forward, "softmax backward": add(common, gradients, up_value)})
    joined = gathered if split else ZERO  # the key's two parts, copied into one for a kernel that takes one
    common = add(common, {"latent": joined, "latent accumulator": accumulator, "log-sum-exp": LSE})
    gradients = {
        "gradient of latent accumulator": accumulator,
        "gradient of q_absorbed": query,
        "gradient of latent": gathered + value,
    }
    held = add(common, gradients, up_value)
    if kernel == "tiled":
        held["kernel workspace"] = tiles.shared()
    return Case(add(common, {"output": V}), {"attention backward": held})


_FORMS: dict[str, Callable[[str, Mapping[str, Any]], Case]] = {
    "explicit": _explicit,
    "absorbed": _absorbed,
    "laga": _laga,
}


def _output_projection(saved: Roles) -> Roles:
    """Backward's first product: its weight's new gradient, the output's, and the loss's gradient made dense."""
    new = {"gradient of weights": HEADS * VALUE * HIDDEN * W, "gradient of output": V, "kernel workspace": TOKENS}
    return add(saved, new)


def _end(options: Mapping[str, Any]) -> dict[str, Roles]:
    """The end of backward: the last gradients of the query and the latent, and their sum, the gradient of hidden."""
    overlap = bool(options.get("overlap"))  # the latent's gradient is on its way meanwhile
    later = not (overlap or options.get("recompute"))  # the query's comes after the latent's
    query = {
        "hidden": TOKENS,
        "gradient of hidden": (int(later) + DIRECT) * TOKENS,
        "gradient of weights": HEADS * QK * (DIRECT * HIDDEN + (1 - DIRECT) * Q_LORA) * W,
        "gradient of q": (_parts(options) if options.get("packed") else Q) + QUERY_LATENT / 2,
        "q": QUERY_LATENT,
        "gradient of latent": int(overlap) * ALL * LATENT * W,
    }
    weights = [HIDDEN * LATENT * W, HIDDEN * (DIRECT * HEADS * QK + (1 - DIRECT) * Q_LORA) * W]
    first, last = weights if later else reversed(weights)
    return {
        "query projection": query,
        "first gradient of hidden": {"hidden": TOKENS, "gradient of hidden": TOKENS, "gradient of weights": first},
        "gradient of hidden": {"hidden": TOKENS, "gradient of hidden": 3 * TOKENS, "gradient of weights": last},
    }


def _packed(options: Mapping[str, Any]) -> Roles:
    """One all-to-all for all: what is joined, sent and received, beside the tensors it is joined from."""
    shared, parts = options["key_rope"] == "headless", _parts(options)
    copied = V + (LOCAL * HEADS * NOPE * W if shared else 0)  # parts of a product, where a rank has many heads
    return add(
        BEFORE,
        {
            "latent": LOCAL * (LATENT + KV_LORA + ROTARY * ROPE) * W,
            "q": QUERY_LATENT + Q,
            "k and v": LOCAL * HEADS * (NOPE + VALUE) * W,
            "k": ZERO if shared else K,
            "q, k and v": if_one(SP, parts, 2 * parts) + if_one(HERE, ZERO, copied),
            "collective buffers": if_one(SP, ZERO, parts),
        },
    )


def _parts(options: Mapping[str, Any]) -> sympy.Expr:
    """Query, key and value in one, the rotary key once for each rank or for each head."""
    return Q + V + (LOCAL * (HEADS * NOPE + SP * ROPE) * W if options["key_rope"] == "headless" else K)
