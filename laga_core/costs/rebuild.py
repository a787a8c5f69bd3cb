"""Memory of Laga's options: both latents gathered, and keys and values (and queries) built again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

from . import tiles
from .symbols import BATCH, HEADS, KV_LORA, NOPE, Q_LORA, ROPE, SEQ, SP, VALUE
from .tensors import (
    ALL,
    BEFORE,
    HERE,
    LATENT,
    LOCAL,
    LSE,
    MATRICES,
    OTHERS,
    QK,
    QUERY_LATENT,
    SCORES,
    SUM,
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


def again(kernel: str, groups: sympy.Expr, chunk: sympy.Expr, latent_query: bool) -> Case:
    """Laga that keeps latents and rebuilds the rest, ``chunk`` heads at a time; ``groups`` is the context R."""
    heads = HERE * groups
    query_latent = ALL / groups * Q_LORA * W
    saved = {**BEFORE, "latent": OTHERS * ALL * LATENT * W, "output": V}
    saved["q"] = query_latent - LOCAL * Q_LORA * W if latent_query else QUERY_LATENT + Q
    held = {
        **BEFORE,
        "latent": 2 * ALL * LATENT * W,  # the others', this rank's own again, all of them together
        "q": 2 * query_latent if latent_query else QUERY_LATENT + Q,
        "gradient of output": if_one(SP / groups, V, 2 * V),
        "gradient of q": query_latent if latent_query else Q,
        "gradient of latent": ALL * LATENT * W,
        "gradient of weights": heads * W * (KV_LORA * (NOPE + VALUE) + (Q_LORA * QK if latent_query else 0)),
    }
    if kernel == "tiled":  # it takes its output apart from the projection's copy, which one head needs too
        saved |= {"log-sum-exp": LSE, "output": if_one(heads, 2 * V, V)}
        held |= {"log-sum-exp": LSE, "output": V}

    part = chunk / heads
    q, k, v = part * Q, part * groups * K, part * groups * V
    gradients = {"gradient of q": q, "gradient of k": k, "gradient of v": v}
    # From the second chunk on, what the chunk before left is still there while the next is at work.
    left = {"gradient of latent": if_one(1 / part, ZERO, ALL * LATENT * W)}
    held = add(held, {"k": k, "v": v, "q": q if latent_query else ZERO})
    attention = add(held, left, {role: if_one(1 / part, ZERO, size) for role, size in gradients.items()})
    if kernel == "eager":
        matrix = part * SCORES
        scores = {"probabilities": matrix, "gradient of probabilities": matrix, "gradient of scores": matrix}
        copies = {"k": k, "q": q, "output": part * V, "gradient of v": v, "causal mask": MATRICES["causal mask"]}
        attention = add(attention, scores, copies)
    elif kernel == "tiled":
        strided = VALUE * W + 2 * SUM + (ZERO if latent_query else if_one(1 / part, ZERO, QK * W))
        workspace = tiles.per_head(chunk, SEQ / groups, alone=strided)
        attention = add(attention, gradients, {"kernel workspace": workspace})
    else:
        attention = add(attention, gradients, {"output": part * V})
    held = add(held, gradients, {} if latent_query else left)  # the query's gradient has taken its place
    return Case(saved, {"attention backward": attention, **_unfolding(held, chunk, latent_query, groups)})


def _unfolding(held: Roles, chunk: sympy.Expr, latent_query: bool, groups: sympy.Expr) -> dict[str, Roles]:
    """From the gradients of keys and values to the latent's, beside all that is ``held``."""
    held = add(
        held,
        {
            "gradient of latent": ALL * LATENT * W,
            "gradient of q": ALL / groups * Q_LORA * W if latent_query else ZERO,
            "gradient of weights": chunk * KV_LORA * (NOPE + VALUE) * W,
        },
    )
    return {
        "unfolding backward": add(held, {"gradient of k and v": ALL * chunk * (NOPE + VALUE) * W}),
        "gradient of latent": add(held, {"gradient of latent": ALL * if_one(chunk, KV_LORA, LATENT) * W}),
    }


def gathered(groups: sympy.Expr, options: Mapping[str, Any]) -> dict[str, Roles]:
    """The gathered latents of query and key as they arrive, and as their gradients form.

    Where a rank has few heads that is more than attention itself holds.
    """
    query, latent = ALL / groups * Q_LORA * W, ALL * LATENT * W
    own = {**BEFORE, "q": LOCAL * Q_LORA * W, "latent": LOCAL * LATENT * W}
    k, v = groups * K, groups * V
    apart = options["overlap"] and options["context"] == 1  # the key's latent arrives by itself
    copies = query if apart else query + latent
    if options["context"] == 1:
        copies = if_one(BATCH, ZERO, copies)
    arriving = {"q": 2 * LOCAL * Q_LORA * W + query, "latent": 2 * LOCAL * LATENT * W + latent}
    leaving = add(own, {"latent": latent, "gradient of q": query})
    together = add(leaving, {"q": query})
    product = {"gradient of k and v": groups * LOCAL * HEADS * (NOPE + VALUE) * W}
    unfolding = add(leaving if apart else together, product)
    some = {"gradient of k": k, "gradient of v": v}
    return {
        "gathering": add(own, arriving, {"collective buffers": copies}),
        "gradient of q": add(together, some, {"gradient of q": Q}),
        "gradient of k and v": add(unfolding, some, {"gradient of latent": ALL * ROPE * W}),
        "gradient of latent": add(
            unfolding, {"gradient of k": if_one(HERE * groups, k, ZERO), "gradient of latent": ALL * KV_LORA * W}
        ),
    }
