"""Do the three forms train alike? The paper's figure 6 (§4.5), and the same question asked of real text.

The paper gives depth, width, heads, sequence, optimizer and steps; what it leaves open is chosen here and part of the
parameters: vocabulary 2048, latent of a quarter of the width, heads of 32 + 16 and 32 elements, feed-forward of twice
the width, ``nn.Embedding``'s own width 1 and 0.02 for every other weight. Random logits of variance s² cost
``ln(vocab) + s²/2`` = 7.62 + 0.10 nats; the paper starts at 7.711.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
from ..results import Record, Store, provenance
from ..training import Trainer, shard

EXPERIMENT = "convergence"
FORMS = ("explicit", "absorbed", "laga")
PAPER_RUN = {"hidden": 512, "heads": 16, "layers": 4, "seq": 512, "steps": 60, "lr": 1e-3, "task": "random tokens"}
"""What the paper says of its run, §4.5; vocabulary, latent and head sizes it leaves open."""

REPORTED = {0: 7.711, 59: 0.004}
"""Loss at the first and the last step of the paper's run, the same for all forms; the last is about that."""

PAIRS = (("laga", "explicit"), ("absorbed", "explicit"), ("laga", "absorbed"))


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
    store: Store,
    degrees: Sequence[int] = (1, 2, 4),
    forms: Sequence[str] = FORMS,
    hidden: int = 512,
    heads: int = 16,
    layers: int = 4,
    vocab: int = 2048,
    seq: int = 512,
    steps: int = 60,
    lr: float = 1e-3,
    seed: int = 0,
    timeout: float = 7200.0,
) -> list[Record]:
    """Train on one sequence of random tokens, each to be followed by the next, under every form on every degree.

    A measured record of each: ``loss`` (nats a token, before each step), ``weights`` (a hash of all of them at the end)
    and ``seconds``. One thread a rank, so that nothing but form and degree changes the arithmetic.
    """
    size = {"hidden": hidden, "heads": heads, "layers": layers, "vocab": vocab, "seq": seq, "steps": steps}
    cell = {"task": "random tokens", **size, "lr": lr, "seed": seed}
    return _sweep(store, _memorise, cell, degrees, forms, timeout)


def read_text(
    store: Store,
    degrees: Sequence[int] = (2,),
    forms: Sequence[str] = ("explicit", "laga"),
    hidden: int = 256,
    heads: int = 8,
    layers: int = 4,
    batch: int = 2,
    seq: int = 256,
    steps: int = 300,
    lr: float = 1e-3,
    seed: int = 0,
    timeout: float = 7200.0,
) -> list[Record]:
    """Train on the bytes of this repository's book and code; a tenth of them is held out.

    A measured record of each form: ``loss`` (nats a byte, before each step), ``held_out`` (the same of the bytes never
    trained on, at the end), ``bytes`` and ``text`` (a hash of the corpus, which changes as the book does).
    """
    size = {"hidden": hidden, "heads": heads, "layers": layers, "batch": batch, "seq": seq, "steps": steps}
    cell = {"task": "text", **size, "lr": lr, "seed": seed}
    return _sweep(store, partial(_read_text, repository_text()), cell, degrees, forms, timeout)


def compare_layer(
    degrees: Sequence[int] = (1, 2), hidden: int = 512, heads: int = 16, seq: int = 512, seed: int = 0
) -> list[dict[str, Any]]:
    """One fp32 attention layer forward and backward under each form: how far apart output and gradients are (§4.5).

    Rows with ``sp``, ``tensor``, and for each pair of forms the largest absolute difference; 0 means equal bit for bit.
    """
    attention = model_config(hidden, heads).attention
    return [
        {"sp": sp, **row}
        for sp in degrees
        for row in launch(_compare_layer, attention, seq, seed, nproc=sp, device="cpu", threads_per_rank=1)[0]
    ]


def differences(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row of each pair of forms, degree and step: the absolute ``difference`` of their losses."""
    by_degree: dict[int, dict[str, Record]] = {}
    for record in records:
        by_degree.setdefault(record.parameters["sp"], {})[record.parameters["form"]] = record
    return [
        {"sp": sp, "pair": f"{a} − {b}", "step": step, "difference": abs(x - y)}
        for sp, forms in sorted(by_degree.items())
        for a, b in PAIRS
        if a in forms and b in forms
        for step, (x, y) in enumerate(zip(forms[a].metrics["loss"], forms[b].metrics["loss"], strict=True))
    ]


def ends(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row of each degree and form: where its loss starts and ends, and the hash of its weights."""
    return [
        {
            "sp": record.parameters["sp"],
            "form": record.parameters["form"],
            "start": record.metrics["loss"][0],
            "end": record.metrics["loss"][-1],
            **{name: record.metrics[name] for name in ("weights", "held_out") if name in record.metrics},
        }
        for record in sorted(records, key=lambda r: (r.parameters["sp"], r.parameters["form"]))
    ]


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


def _sweep(
    store: Store,
    task: Callable[..., dict[str, Any]],
    cell: dict[str, Any],
    degrees: Sequence[int],
    forms: Sequence[str],
    timeout: float,
) -> list[Record]:
    """One launch a degree, one record a form."""
    records = []
    for sp in degrees:
        found = launch(_run_forms, task, cell, forms, nproc=sp, device="cpu", threads_per_rank=1, timeout=timeout)[0]
        where = provenance(device="cpu", backend="gloo", ranks=sp)
        for form in forms:
            parameters = {"form": form, "sp": sp, **cell}
            record = Record(
                experiment=EXPERIMENT, kind="measured", parameters=parameters, metrics=found[form], provenance=where
            )
            store.write(record)
            records.append(record)
    return records


def _run_forms(task: Callable[..., dict[str, Any]], cell: dict[str, Any], forms: Sequence[str]) -> dict[str, Any]:
    return {form: task(form=form, **{k: v for k, v in cell.items() if k != "task"}) for form in forms}


def _memorise(form: str, vocab: int, seq: int, steps: int, lr: float, seed: int, **size: int) -> dict[str, Any]:
    config = model_config(vocab=vocab, **size)
    trainer = Trainer(LanguageModel(config, form, group=dist.group.WORLD, seed=seed), lr=lr)
    tokens = random_tokens(vocab, seq, seed)
    started = time.perf_counter()
    loss = [trainer.step(tokens) for _ in range(steps)]
    return {"loss": loss, "weights": weights_hash(trainer.model), "seconds": time.perf_counter() - started}


def _read_text(
    corpus: bytes, form: str, batch: int, seq: int, steps: int, lr: float, seed: int, **size: int
) -> dict[str, Any]:
    config = model_config(vocab=256, **size)
    trainer = Trainer(LanguageModel(config, form, group=dist.group.WORLD, seed=seed), lr=lr)
    text = Text(corpus, batch, seq, seed)
    loss = [trainer.step(text(step)) for step in range(steps)]
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


def _compare_layer(attention: MLAConfig, seq: int, seed: int) -> list[dict[str, Any]]:
    results = {form: _run_layer(attention, form, seq, seed) for form in FORMS}
    return [
        {
            "tensor": name,
            **{f"{a} − {b}": (results[a][name] - results[b][name]).abs().max().item() for a, b in PAIRS},
        }
        for name in results["laga"]
    ]


def _run_layer(attention: MLAConfig, form: str, seq: int, seed: int) -> dict[str, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    source = torch.Generator().manual_seed(seed)
    layer = MLAAttention(attention, form, group=group)
    with torch.no_grad():
        for weight in layer.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=source) / weight.shape[1] ** 0.5)
    hidden, cotangent = (
        shard(torch.randn(1, seq, attention.hidden_size, generator=source), group).clone() for _ in range(2)
    )
    hidden.requires_grad_()
    out = layer(hidden)
    out.backward(cotangent)
    if degree(group) > 1:
        all_reduce_gradients(layer, group)
    results = {"output": _all_ranks(out.detach(), group), "gradient of the input": _all_ranks(hidden.grad, group)}
    for name, weight in layer.named_parameters():
        assert weight.grad is not None
        results[f"gradient of {name.removesuffix('.weight').removesuffix('_with_mqa')}"] = weight.grad
    return results


def _all_ranks(tensor: Tensor | None, group: ProcessGroup) -> Tensor:
    assert tensor is not None
    parts = [torch.empty_like(tensor) for _ in range(degree(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim=1)
