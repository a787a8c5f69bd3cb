"""Do the three forms train alike? The paper's figure 6 (§4.5), and the same question asked of real text.

The paper gives depth, width, heads, sequence, optimizer and steps; what it leaves open is chosen here and part of the
parameters: vocabulary 2048, latent of a quarter of the width, heads of 32 + 16 and 32 elements, feed-forward of twice
the width, ``nn.Embedding``'s own width 1 and 0.02 for every other weight. Random logits of variance s² cost
``ln(vocab) + s²/2`` = 7.62 + 0.10 nats; the paper starts at 7.711.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..attention import MLAAttention
from ..config import MLAConfig
from ..launch import launch
from ..model import LanguageModel, ModelConfig
from ..parallel import all_reduce_gradients, degree
from ..training import Trainer, shard

FORMS = ("explicit", "absorbed", "laga")


def model_config(hidden: int = 512, heads: int = 16, layers: int = 4, vocab: int = 2048, **more: Any) -> ModelConfig:
    """The small language model of this experiment; ``more`` goes to :class:`~laga_core.model.ModelConfig`."""
    attention = MLAConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=hidden // 4,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    )
    return ModelConfig(
        attention=attention, vocab_size=vocab, num_hidden_layers=layers, **{"intermediate_size": 2 * hidden} | more
    )


def memorise(
    form: str,
    sp: int = 1,
    hidden: int = 512,
    heads: int = 16,
    layers: int = 4,
    vocab: int = 2048,
    seq: int = 512,
    steps: int = 60,
    lr: float = 1e-3,
    seed: int = 0,
    timeout: float = 3600.0,
) -> dict[str, Any]:
    """Train on one sequence of random tokens, each to be followed by the next, under ``form`` on ``sp`` ranks.

    Returns ``loss`` (nats a token, before each step), ``weights`` (a hash of all of them at the end) and ``seconds``.
    One thread a rank, so that nothing but the form and sp changes the arithmetic.
    """
    config = model_config(hidden, heads, layers, vocab)
    return launch(
        _memorise, config, form, seq, steps, lr, seed, nproc=sp, device="cpu", threads_per_rank=1, timeout=timeout
    )[0]


def read_text(
    form: str,
    sp: int = 2,
    hidden: int = 256,
    heads: int = 8,
    layers: int = 4,
    batch: int = 2,
    seq: int = 256,
    steps: int = 300,
    lr: float = 1e-3,
    seed: int = 0,
    timeout: float = 3600.0,
) -> dict[str, Any]:
    """Train on the bytes of this repository's book and code; a tenth of them is held out.

    Returns ``loss`` (nats a byte, before each step), ``held_out`` (the same of the bytes never trained on, at the
    end), ``bytes`` and ``text`` (a hash of the corpus).
    """
    config = model_config(hidden, heads, layers, vocab=256)
    corpus = repository_text()
    return launch(
        _read_text,
        config,
        form,
        corpus,
        batch,
        seq,
        steps,
        lr,
        seed,
        nproc=sp,
        device="cpu",
        threads_per_rank=1,
        timeout=timeout,
    )[0]


def compare_layer(
    sp: int = 1, hidden: int = 512, heads: int = 16, seq: int = 512, dtype: str = "float32", seed: int = 0
) -> list[dict[str, Any]]:
    """One attention layer forward and backward under each form: how far apart output and gradients are (§4.5).

    Rows with ``tensor``, ``pair`` ("laga - explicit", …) and ``difference``, the largest absolute one; 0 means equal
    bit for bit.
    """
    attention = model_config(hidden, heads).attention
    rows = launch(_compare_layer, attention, seq, dtype, seed, nproc=sp, device="cpu", threads_per_rank=1)[0]
    return [{"sp": sp, **row} for row in rows]


def random_tokens(vocab: int, seq: int, seed: int) -> Tensor:
    """One sequence ``[1, seq + 1]`` of tokens drawn evenly."""
    return torch.randint(vocab, (1, seq + 1), generator=torch.Generator().manual_seed(seed + 1))


def repository_text(root: Path | None = None) -> bytes:
    """The chapters and the code of this repository in one piece; ``FileNotFoundError`` outside of a checkout."""
    root = root or Path(__file__).resolve().parents[2]
    files = sorted([*root.glob("book/*.md"), *root.glob("laga_core/**/*.py")])
    if not files:
        raise FileNotFoundError(f"{root}: neither book/*.md nor laga_core/**/*.py; run from a checkout")
    return b"\n".join(file.read_bytes() for file in files)


class Text:
    """Bytes cut into blocks, every tenth of which is held out."""

    block = 2048

    def __init__(self, corpus: bytes, batch: int, seq: int, seed: int) -> None:
        blocks = torch.frombuffer(bytearray(corpus), dtype=torch.uint8).split(self.block)[:-1]
        if len(blocks) < 10 or seq >= self.block:
            raise ValueError(
                f"{len(corpus)} bytes make {len(blocks)} blocks of {self.block}; at least 10 are needed, and a seq "
                f"below {self.block}, got {seq}"
            )
        whole = torch.stack(blocks).long()
        held_out = torch.arange(len(whole)) % 10 == 9
        self.train, self.held_out = whole[~held_out], whole[held_out]
        self.batch, self.seq, self.seed = batch, seq, seed

    def __call__(self, step: int) -> Tensor:
        """The batch of a step, ``[batch, seq + 1]``; a function of seed and step alone, so a resume needs no state."""
        source = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows = torch.randint(len(self.train), (self.batch,), generator=source)
        starts = torch.randint(self.block - self.seq, (self.batch,), generator=source)
        return torch.stack([self.train[r, s : s + self.seq + 1] for r, s in zip(rows, starts, strict=True)])

    def held_out_batches(self) -> list[Tensor]:
        """The held-out blocks, cut to ``[batch, seq + 1]``."""
        pieces = self.held_out[:, : self.block // (self.seq + 1) * (self.seq + 1)].reshape(-1, self.seq + 1)
        return list(pieces.split(self.batch))


def _train(trainer: Trainer, batches: Callable[[int], Tensor], steps: int) -> list[float]:
    return [trainer.step(batches(step)) for step in range(steps)]


def _memorise(config: ModelConfig, form: str, seq: int, steps: int, lr: float, seed: int) -> dict[str, Any]:
    trainer = Trainer(LanguageModel(config, form, group=dist.group.WORLD, seed=seed), lr=lr)
    tokens = random_tokens(config.vocab_size, seq, seed)
    started = time.perf_counter()
    loss = _train(trainer, lambda _: tokens, steps)
    return {"loss": loss, "weights": weights_hash(trainer.model), "seconds": time.perf_counter() - started}


def _read_text(
    config: ModelConfig, form: str, corpus: bytes, batch: int, seq: int, steps: int, lr: float, seed: int
) -> dict[str, Any]:
    trainer = Trainer(LanguageModel(config, form, group=dist.group.WORLD, seed=seed), lr=lr)
    text = Text(corpus, batch, seq, seed)
    loss = _train(trainer, text, steps)
    pieces = text.held_out_batches()
    with torch.no_grad():
        total = sum(trainer.loss(piece).item() * len(piece) for piece in pieces)
    return {
        "loss": loss,
        "held_out": total / sum(map(len, pieces)),
        "bytes": len(corpus),
        "text": hashlib.sha256(corpus).hexdigest()[:12],
    }


def weights_hash(model: torch.nn.Module) -> str:
    """A short hash of every weight's bits."""
    total = hashlib.sha256()
    for weight in model.state_dict().values():
        total.update(weight.contiguous().numpy().tobytes())
    return total.hexdigest()[:12]


def _compare_layer(attention: MLAConfig, seq: int, dtype: str, seed: int) -> list[dict[str, Any]]:
    results = {form: _run_layer(attention, form, seq, getattr(torch, dtype), seed) for form in FORMS}
    pairs = (("laga", "explicit"), ("laga", "absorbed"), ("absorbed", "explicit"))
    return [
        {"tensor": name, "pair": f"{a} - {b}", "difference": (results[a][name] - results[b][name]).abs().max().item()}
        for a, b in pairs
        for name in results[a]
    ]


def _run_layer(attention: MLAConfig, form: str, seq: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    source = torch.Generator().manual_seed(seed)
    layer = MLAAttention(attention, form, group=group, dtype=dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=source, dtype=torch.float64) / weight.shape[1] ** 0.5)
    hidden, cotangent = (
        shard(torch.randn(1, seq, attention.hidden_size, generator=source, dtype=torch.float64), group).to(dtype)
        for _ in range(2)
    )
    hidden.requires_grad_()
    out = layer(hidden)
    out.backward(cotangent)
    if degree(group) > 1:
        all_reduce_gradients(layer, group)
    results = {"output": _all_ranks(out.detach(), group), "gradient of the input": _all_ranks(hidden.grad, group)}
    for name, weight in layer.named_parameters():
        assert weight.grad is not None
        results[f"gradient of {name.removesuffix('.weight')}"] = weight.grad
    return results


def _all_ranks(tensor: Tensor | None, group: ProcessGroup) -> Tensor:
    assert tensor is not None
    parts = [torch.empty_like(tensor) for _ in range(degree(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=1)
