"""``simulate_memory``: the project's own layer, forward and backward, as one rank of any sp, without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import check_sizes
from ..kernels import KERNELS
from .fake import fake_group, stand_ins
from .recorder import Change, Recorder


@dataclass(frozen=True)
class Event:
    """One allocation or release: bytes in use after it, its own bytes (negative for a release), and what it was."""

    bytes: int
    delta: int
    operator: str
    role: str
    phase: str


@dataclass(frozen=True)
class MemorySimulation:
    """Bytes of one rank's training step.

    ``peak_bytes`` is the most in use at once, weights and gradients included; ``breakdown`` says by role what it was
    and sums to it. ``saved_bytes`` is what autograd holds between forward and backward besides weights and gradients,
    the layers' input included; ``saved_breakdown`` says by role what. ``timeline`` has every change in order.
    """

    peak_bytes: int
    saved_bytes: int
    breakdown: dict[str, int]
    saved_breakdown: dict[str, int]
    timeline: list[Event]


def simulate_memory(
    config: MLAConfig,
    form: str,
    kernel: str,
    seq: int,
    sp: int,
    batch: int = 1,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "accelerator",
    **form_options: Any,
) -> MemorySimulation:
    """Memory of one rank in a training step of ``layers`` attention layers, one after the other, on ``sp`` ranks.

    The layer is the project's own :class:`~laga_core.attention.MLAAttention`, run forward and backward as rank 0 with
    tensors that have no data and a fake process group: nothing is computed, sent or allocated, and process groups of
    the caller are left alone. Bytes are counted as a caching allocator's ``max_memory_allocated`` counts them (blocks
    of 512 bytes), in a step that finds gradients in place and adds to them; the loss is the sum of the output. An
    optimizer's state is not counted. ``seq`` is the whole sequence, ``batch`` the sequences of one rank.

    ``kernel`` is ``"eager"``, ``"tiled"`` or ``"fused"``: what a fused kernel such as FlashAttention has to keep, and
    no workspace. On an ``"accelerator"`` (``device``) RMSNorm is one kernel, and ``tiled`` takes larger tiles than on a
    ``"cpu"``.

    Raises ``ValueError`` or ``TypeError`` for unknown names, sizes that cannot be split evenly or make no sense, and a
    kernel whose memory only its device knows.
    """
    check_sizes(config, seq, sp, batch, form, **form_options)
    _check(config, kernel, seq, batch, layers, dtype, device)
    recorder = Recorder()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins(device),
        fake_group(sp, "meta") as group,
        recorder,
    ):
        kinds = dict(form=form, kernel=kernel, group=group, dtype=dtype, **form_options)
        saved, end = _step(recorder, config, (batch, seq // sp, config.hidden_size), layers, kinds)
    return _summary(recorder.changes[:end], saved)


def _step(
    recorder: Recorder, config: MLAConfig, shape: tuple[int, int, int], layers: int, kinds: dict[str, Any]
) -> tuple[int, int]:
    """A step of ``layers`` layers whose gradients are in place already, as from the second step on.

    Returns how many changes had been recorded after forward, and after backward.
    """
    weights = [MLAAttention(config, device="meta", **kinds) for _ in range(layers)]
    parameters = [p for layer in weights for p in layer.parameters()]
    gradients = [torch.empty_like(p) for p in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    del gradient, gradients
    hidden = torch.empty(shape, dtype=kinds["dtype"], device="meta").requires_grad_()
    recorder.phase = "forward"
    for layer in weights:
        hidden = layer(hidden)
    loss = hidden.sum()
    del hidden
    saved = len(recorder.changes)
    recorder.name_gradients(loss)
    recorder.phase = "backward"
    torch.autograd.backward(loss)  # not loss.backward(), under which a function mode is off
    return saved, len(recorder.changes)


SIMULATED = ("eager", "tiled", "fused")
"""Kernels whose memory can be simulated."""

DEVICES = ("accelerator", "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MOST_TOKENS, _MOST_LAYERS = 1 << 30, 1024


def _check(config: MLAConfig, kernel: str, seq: int, batch: int, layers: int, dtype: torch.dtype, device: str) -> None:
    if kernel not in SIMULATED:
        if kernel in (*KERNELS, "auto"):
            raise ValueError(
                f"kernel {kernel!r} cannot be simulated: what it keeps is decided on its device; simulate 'fused', "
                f"which keeps what a fused kernel has to, or one of {', '.join(SIMULATED)}"
            )
        raise ValueError(f"unknown kernel {kernel!r}; known to the simulation: {', '.join(SIMULATED)}")
    if device not in DEVICES:
        raise ValueError(f"unknown device {device!r}; known to the simulation: {', '.join(DEVICES)}")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"layers must be a whole number from 1 to {_MOST_LAYERS}, got {layers!r}")
    if batch * seq > _MOST_TOKENS:
        raise ValueError(f"batch * seq = {batch * seq} tokens is more than can be simulated ({_MOST_TOKENS})")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
    largest = config.num_attention_heads * batch * seq * max(seq, config.kv_lora_rank) * 8
    if largest > 2**62 or config.hidden_size * config.num_attention_heads * config.qk_head_dim > 2**58:
        raise ValueError("these sizes overflow 64-bit byte counts; choose a smaller seq, batch or configuration")


def _summary(changes: list[Change], saved: int) -> MemorySimulation:
    peak = max(range(len(changes)), key=lambda i: changes[i].bytes)
    held = _by_role(changes[:saved])
    saved_breakdown = {role: size for role, size in held.items() if role not in ("weights", "gradients", "loss")}
    return MemorySimulation(
        peak_bytes=changes[peak].bytes,
        saved_bytes=sum(saved_breakdown.values()),
        breakdown=_by_role(changes[: peak + 1]),
        saved_breakdown=saved_breakdown,
        timeline=[Event(c.bytes, c.delta, c.operator, c.block.role, c.phase) for c in changes],
    )


def _by_role(changes: list[Change]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for change in changes:
        totals[change.block.role] = totals.get(change.block.role, 0) + change.delta
    return {role: size for role, size in sorted(totals.items(), key=lambda item: -item[1]) if size}
