"""Numerical equivalence (paper §4.5): every form on real ranks against the explicit form in one process.

The loss is the sum of the outputs. The paper names neither its sizes nor its loss, on which an absolute deviation
depends, so each deviation is also given relative to the largest element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import MLAAttention
from ..config import MLAConfig
from ..device import resolve_device
from ..launch import launch
from ..parallel import all_reduce_gradients, gather_sequence
from ..results import Record, Store, provenance

EXPERIMENT = "equivalence"
FORMS = ("explicit", "absorbed", "laga")
BOUNDS = {"output": 5.6e-6, "kv_b_proj": 7.7e-4}
"""Reported by the paper, §4.5: largest absolute deviation at sp 2, 4 and 8 in fp32."""

EXACT = ("output", "q_proj", "kv_b_proj", "o_proj")
"""What the paper reports as bit-identical at sp 1; the other gradients it reports within 2e-5."""


def sweep(
    store: Store,
    preset: str,
    degrees: Sequence[int] = (1, 2, 4, 8),
    dtypes: Iterable[str] = ("float32",),
    seq: int = 64,
    batch: int = 1,
    seed: int = 0,
    device: str | None = None,
    timeout: float = 300.0,
    **launch_options: Any,
) -> list[Record]:
    """One launch a degree; a measured record for each form, degree and dtype.

    Metrics are ``{"absolute": {tensor: deviation}, "relative": {tensor: deviation}}`` over the output, the input's
    gradient and every parameter's gradient.
    """
    records = []
    for sp in degrees:
        size = {"preset": preset, "sp": sp, "seq": seq, "batch": batch, "seed": seed}
        found = launch(_deviations, size, list(dtypes), nproc=sp, device=device, timeout=timeout, **launch_options)[0]
        where = provenance(device=device, ranks=sp, backend=found["backend"])
        for form, dtype, metrics in found["deviations"]:
            parameters = {"form": form, "dtype": dtype, **size}
            record = Record(
                experiment=EXPERIMENT, kind="measured", parameters=parameters, metrics=metrics, provenance=where
            )
            store.write(record)
            records.append(record)
    return records


def table(records: Iterable[Record], tensor: str = "output") -> list[dict[str, Any]]:
    """Rows of degree, dtype, form and deviation of one tensor, with the paper's bound where it reports one."""
    rows = []
    for record in records:
        p, m = record.parameters, record.metrics
        if tensor not in m["absolute"]:
            raise ValueError(f"no tensor {tensor!r} in this record; there are: {', '.join(m['absolute'])}")
        row = {"sp": p["sp"], "dtype": p["dtype"], "form": p["form"], "tensor": tensor}
        bound = BOUNDS.get(tensor) if p["sp"] > 1 and p["dtype"] == "float32" else None
        rows.append({**row, "absolute": m["absolute"][tensor], "relative": m["relative"][tensor], "bound": bound})
    return rows


def beside_the_paper(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each statement of §4.5 about fp32: the paper's figure, ours (worst over its degrees), and whether it holds."""
    fp32 = [r for r in records if r.parameters["dtype"] == "float32" and r.parameters["form"] == "laga"]
    one, many = ([r for r in fp32 if (r.parameters["sp"] == 1) == single] for single in (True, False))
    others = sorted({name for r in one for name in r.metrics["absolute"]} - set(EXACT))
    statements = [(name, one, 0.0) for name in EXACT if one and name in one[0].metrics["absolute"]]
    statements += [(name, one, 2e-5) for name in others] + [(name, many, BOUNDS[name]) for name in BOUNDS]
    rows = []
    for name, chosen, bound in statements:
        if chosen:
            worst = max(r.metrics["absolute"][name] for r in chosen)
            degrees = ", ".join(str(r.parameters["sp"]) for r in chosen)
            rows.append({"sp": degrees, "tensor": name, "reported": bound, "measured": worst, "holds": worst <= bound})
    return rows


# --- on a rank ---


def _deviations(size: Mapping[str, Any], dtypes: Sequence[str]) -> dict[str, Any]:
    """On rank 0, which alone runs the reference: the deviations of each form; on the others only the backend."""
    deviations = []
    for dtype in dtypes:
        weights, hidden = _drawn(size, getattr(torch, dtype))
        reference = _run(size, weights, hidden, "explicit", sharded=False) if dist.get_rank() == 0 else {}
        for form in FORMS:
            found = _run(size, weights, hidden, form, sharded=True)
            absolute = {name: (found[name] - reference[name]).abs().max().item() for name in reference}
            relative = {name: absolute[name] / reference[name].abs().max().item() for name in reference}
            deviations.append((form, dtype, {"absolute": absolute, "relative": relative}))
    return {"backend": dist.get_backend(), "deviations": deviations}


def _drawn(size: Mapping[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Weights and the input of the whole sequence, the same on every rank: drawn on the CPU from the seed."""
    device = resolve_device("cpu" if dist.get_backend() == "gloo" else None)
    config = MLAConfig.preset(size["preset"])
    torch.manual_seed(size["seed"])
    layer = MLAAttention(config, "explicit", dtype=dtype).to(device)
    return layer.state_dict(), torch.randn(size["batch"], size["seq"], config.hidden_size, dtype=dtype).to(device)


def _run(
    size: Mapping[str, Any], weights: Mapping[str, Tensor], hidden: Tensor, form: str, sharded: bool
) -> dict[str, Tensor]:
    """Output, input gradient and parameter gradients of the whole sequence, on ranks or in one process."""
    group = dist.group.WORLD if sharded else None
    layer = MLAAttention(MLAConfig.preset(size["preset"]), form, group=group, device="meta")
    layer.load_state_dict(weights, assign=True)
    if sharded:
        hidden = hidden.chunk(size["sp"], dim=1)[dist.get_rank()]
    hidden = hidden.detach().clone().requires_grad_()
    out = layer(hidden)
    out.sum().backward()
    if sharded:
        all_reduce_gradients(layer, group)
    found = {"output": gather_sequence(out.detach(), group)}
    if hidden.grad is not None:
        found["hidden"] = gather_sequence(hidden.grad, group)
    gradients = {name.removesuffix(".weight"): weight.grad for name, weight in layer.named_parameters()}
    return found | {name: gradient for name, gradient in gradients.items() if gradient is not None}
