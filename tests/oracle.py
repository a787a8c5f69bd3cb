"""An independent oracle: MLA written out from the equations of DeepSeek-V2 (arXiv 2405.04434, appendix C).

One process, one head at a time, every matrix spelled out, nothing taken from laga_core but the numbers of a config.
Rotations are complex multiplications. YaRN is left to the comparison with transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def mla(weights: Weights, hidden: Tensor, config, positions: Tensor | None = None) -> Tensor:
    """``[batch, seq, hidden]`` to the same; ``positions`` are those of the tokens, for rotation and mask."""
    heads, nope, rope, value = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )
    positions = torch.arange(hidden.shape[1]) if positions is None else positions
    c_q = hidden
    if config.q_lora_rank is not None:
        c_q = normalise(hidden @ weights["q_a_proj.weight"].T, weights, "q_a_layernorm", config)  # eq. 37
    w_q = weights["q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"]
    w_kv_a, w_kv_b, w_o = (weights[f"{name}.weight"] for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    c_kv = normalise(hidden @ w_kv_a[: config.kv_lora_rank].T, weights, "kv_a_layernorm", config)  # eq. 41
    k_r = turn(hidden @ w_kv_a[config.kv_lora_rank :].T, positions, config)  # eq. 43

    out = torch.zeros_like(hidden)
    for head in range(heads):
        w_q_head = w_q[head * (nope + rope) : (head + 1) * (nope + rope)]
        w_kv_head = w_kv_b[head * (nope + value) : (head + 1) * (nope + value)]
        q_c, q_r = c_q @ w_q_head[:nope].T, turn(c_q @ w_q_head[nope:].T, positions, config)  # eq. 38, 39
        k_c, v_c = c_kv @ w_kv_head[:nope].T, c_kv @ w_kv_head[nope:].T  # eq. 42, 45
        scores = (q_c @ k_c.transpose(1, 2) + q_r @ k_r.transpose(1, 2)) / math.sqrt(nope + rope)
        if config.causal:
            scores = scores.where(positions[None, :] <= positions[:, None], -torch.inf)
        weight = (scores - scores.amax(-1, keepdim=True).detach()).exp()
        o = (weight / weight.sum(-1, keepdim=True)) @ v_c  # eq. 46
        out = out + o @ w_o[:, head * value : (head + 1) * value].T  # eq. 47, one head's columns of W_O
    return out


def normalise(x: Tensor, weights: Weights, name: str, config) -> Tensor:
    if config.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def turn(x: Tensor, positions: Tensor, config) -> Tensor:
    """Rotate the i-th pair of the last dimension by position * theta^(-2i/d)."""
    if config.rope_theta is None:
        return x
    d = x.shape[-1]
    angles = [[int(p) * config.rope_theta ** (-2 * i / d) for i in range(d // 2)] for p in positions]
    turns = torch.tensor(angles, dtype=torch.float64).mul(1j).exp()
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turns
    return torch.view_as_real(pairs).flatten(-2)


def gradients(weights: Weights, hidden: Tensor, cotangent: Tensor, config, positions: Tensor | None = None) -> Weights:
    """Output ("out"), input gradient ("hidden") and every parameter's gradient under its name, in fp64."""
    leaves = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    x = hidden.detach().double().requires_grad_()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its products are so small that threads would mostly wait for each other
    try:
        out = mla(leaves, x, config, positions)
        found = torch.autograd.grad(out, [x, *leaves.values()], cotangent.double())
    finally:
        torch.set_num_threads(threads)
    return {"out": out.detach(), "hidden": found[0], **dict(zip(leaves, found[1:], strict=True))}
