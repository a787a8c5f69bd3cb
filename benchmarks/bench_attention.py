"""The attention layer against others: transformers in one process, and on two ranks explicit and a Ulysses layer.

The Ulysses layer is yunchang's ``SeqAllToAll4D`` around this project's kernel and projections: yunchang's own attention
kernels do not run on a CPU. It sends what explicit sends, and lays it out by more copies.

transformers gets its quickest setting: SDPA, and float32 where the CPU has no instructions for bf16, on which a step of
it in bf16 takes minutes. Ours is in bf16 everywhere, and there also in float32, as like with like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from unittest import mock

import torch
import torch.distributed as dist

from laga_core import MLAAttention, MLAConfig, launch
from laga_core.kernels import products

from . import floor
from .harness import Comparison, faster, interleaved, operators


def compare() -> Iterator[Comparison]:
    slow = products.slow(torch.empty(0, dtype=torch.bfloat16))
    for mine, theirs in ((torch.bfloat16, torch.float32), (torch.float32,) * 2) if slow else ((torch.bfloat16,) * 2,):
        ours, reference = _ours(2048, mine), _transformers(2048, theirs)
        ours(), reference()
        names = (str(dtype).removeprefix("torch.") for dtype in (mine, theirs))
        name = "Laga {}, transformers {}: V2-Lite, seq 2048".format(*names)
        yield faster(name, ours, reference, _products(2048, mine), at_least=1.5, repeats=5, seconds=60)

    seconds, profiles = launch(_on_two_ranks, nproc=2, device="cpu", threads_per_rank=1, timeout=300)[0]
    for other, at_least in (("explicit", 1.0), ("ulysses", 1.2)):
        mine, theirs = (f"{1e3 * seconds[who]:.0f} ms" for who in ("laga", other))
        ratio, bound = (seconds[other] / seconds[who] for who in ("laga", "laga, nothing sent"))
        profile = partial(_both, profiles, "laga", other)
        yield Comparison(
            f"Laga, {other}: sp 2, seq 1024, bf16", mine, theirs, ratio, at_least, bound=bound, profile=profile
        )


def _both(profiles: dict[str, str], *names: str) -> str:
    return "\n".join(f"{name}\n{profiles[name]}" for name in names)


def _ours(seq: int, dtype: torch.dtype) -> Callable[[], object]:
    config = MLAConfig.preset("deepseek-v2-lite")
    layer = MLAAttention(config, "laga", "auto", dtype=dtype)
    hidden = torch.randn(1, seq, config.hidden_size, dtype=dtype, requires_grad=True)
    return lambda: layer(hidden).sum().backward()


def _transformers(seq: int, dtype: torch.dtype) -> Callable[[], object]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

    ours = MLAConfig.preset("deepseek-v2-lite")
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
    names = (*names, "qk_rope_head_dim", "v_head_dim")
    config = reference.DeepseekV3Config(
        **{name: getattr(ours, name) for name in names}, num_key_value_heads=ours.num_attention_heads
    )
    config._attn_implementation = "sdpa"
    layer = reference.DeepseekV3Attention(config, layer_idx=0).to(dtype)
    hidden = torch.randn(1, seq, ours.hidden_size, dtype=dtype, requires_grad=True)
    rotary = reference.DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(seq)[None])
    return lambda: layer(hidden, rotary, None)[0].sum().backward()


def _products(seq: int, dtype: torch.dtype) -> Callable[[], object]:
    c = MLAConfig.preset("deepseek-v2-lite")
    heads, latent = c.num_attention_heads, c.kv_lora_rank
    sizes = [
        (c.hidden_size, heads * c.qk_head_dim),
        (c.hidden_size, latent + c.qk_rope_head_dim),
        (latent, heads * (c.qk_nope_head_dim + c.v_head_dim)),
        (heads * c.v_head_dim, c.hidden_size),
    ]
    return floor.both(
        floor.projections(seq, sizes, dtype), floor.attention(seq, heads, c.qk_head_dim, c.v_head_dim, dtype)
    )


def _on_two_ranks(seq: int = 1024) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds of each layer's forward and backward, and where they go."""
    from yunchang.comm.all_to_all import SeqAllToAll4D

    config = MLAConfig(
        hidden_size=1024, num_attention_heads=32, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    explicit = import_module("laga_core.forms.explicit")  # the package has a function of that name
    group = dist.group.WORLD
    hidden = torch.randn(1, seq // dist.get_world_size(), 1024, dtype=torch.bfloat16, requires_grad=True)

    def step(form: str) -> Callable[[], object]:
        layer = MLAAttention(config, form, "auto", group, dtype=torch.bfloat16)

        def run() -> None:
            dist.barrier()
            layer(hidden).sum().backward()
            dist.barrier()

        return run

    plain = step("explicit")

    def ulysses() -> None:
        with (
            mock.patch.object(explicit, "sequence_to_heads", lambda x, group: SeqAllToAll4D.apply(group, x, 2, 1)),
            mock.patch.object(explicit, "heads_to_sequence", lambda x, group: SeqAllToAll4D.apply(group, x, 1, 2)),
        ):
            plain()

    laga = step("laga")

    def nothing_sent() -> None:
        def receive(received: torch.Tensor, *_: object, **__: object) -> None:
            received.zero_()

        names = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
        with mock.patch.multiple(dist, **dict.fromkeys(names, receive)):
            laga()

    layers = {"laga": laga, "explicit": plain, "ulysses": ulysses, "laga, nothing sent": nothing_sent}
    profiles = {name: operators(run) for name, run in layers.items()}
    return {name: took.seconds for name, took in interleaved(layers, repeats=7).items()}, profiles
