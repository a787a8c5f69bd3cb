"""Which form, by cost: arithmetic, bytes at two link speeds, and what is kept for backward.

Each cost of a training step (forward and backward of one layer, on one rank) is a closed form in the symbols of
:mod:`laga_core.costs.symbols`. :class:`Machine` turns them into seconds; :func:`choose` compares the members.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch

from ..config import MLAConfig
from ..forms import STRONG_EXPLICIT, check_form
from ..sharding import check_layout
from .communication import transfers
from .symbols import (
    BATCH,
    CONTEXT,
    HEADS,
    HIDDEN,
    ITEMSIZE,
    KV_LORA,
    NODE,
    NOPE,
    Q_LORA,
    ROPE,
    SEQ,
    SP,
    VALUE,
    substitutions,
)

_HALF = sympy.Rational(1, 2)
_TOKENS = BATCH * SEQ / SP  # of this rank
_ROW_SUM = sympy.Max(4, ITEMSIZE)  # bytes: float32, or float64 for float64


@dataclass(frozen=True)
class Machine:
    """What a choice depends on, for one rank.

    ``rate`` and ``attention_rate`` are operations a second in the projections and in the attention kernel,
    ``node_link`` and ``slow_link`` bytes a second to a rank of the same and of another node, ``latency`` seconds that a
    collective takes however small it is, ``memory`` bytes that are there for what is kept between forward and backward.
    """

    rate: float
    node_link: float
    slow_link: float | None = None
    ranks_per_node: int = 8
    attention_rate: float | None = None
    latency: float = 30e-6
    memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "node_link", "slow_link", "ranks_per_node", "attention_rate", "latency", "memory"):
            value = getattr(self, name)
            if value is None and name in ("slow_link", "attention_rate", "memory"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"Machine: {name} must be a positive number, got {value!r}")

    @classmethod
    def typical(cls, device: str) -> Machine:
        """A guess for a kind of device (``"cpu"``, ``"cuda"``, ``"npu"``), where nothing has been measured.

        An Ascend 910B and an A100 at about half their bf16 peak; links within and between nodes as the throughput in
        the Laga paper's tables 4 and 5 implies them for the former. For a CPU two processes on one machine.
        """
        if device not in _TYPICAL:
            raise ValueError(f"no typical machine for {device!r}; known: {', '.join(_TYPICAL)}; describe yours")
        return cls(**_TYPICAL[device])


_TYPICAL: dict[str, dict[str, Any]] = {
    "cpu": {"rate": 50e9, "attention_rate": 25e9, "node_link": 1e9, "slow_link": 1e8, "latency": 1e-3},
    "cuda": {"rate": 150e12, "attention_rate": 120e12, "node_link": 200e9, "slow_link": 20e9},
    "npu": {"rate": 150e12, "attention_rate": 100e12, "node_link": 60e9, "slow_link": 11e9},
}


@dataclass(frozen=True)
class Cost:
    """One member's cost on a machine: seconds of a step, and bytes kept for backward. ``seconds`` sums the parts."""

    form: str
    options: dict[str, Any]
    compute: float
    transfer: float
    latency: float
    saved_bytes: int

    @property
    def seconds(self) -> float:
        """Of forward and backward of one layer."""
        return self.compute + self.transfer + self.latency

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.form}({options})" if options else self.form


@dataclass(frozen=True)
class FormChoice:
    """The member to take, all that were weighed (the quickest that fits first), and why in words."""

    best: Cost
    weighed: list[Cost] = field(repr=False)
    reason: str

    @property
    def form(self) -> str:
        """Its form."""
        return self.best.form

    @property
    def options(self) -> dict[str, Any]:
        """Its options."""
        return self.best.options


def arithmetic(
    form: str, causal: bool, query_latent: bool, direction: str = "forward", **form_options: Any
) -> tuple[sympy.Expr, sympy.Expr]:
    """Operations of one rank in the projections and in attention (a multiplication and an addition are two).

    ``query_latent``: the model has one (q_lora_rank). Backward takes two products for each of forward's, attention five
    for two. With a contiguous layout under a causal mask it is the last ranks' work, which the others wait for.
    """
    recompute = form_options.get("recompute", False)
    down_q, up_q = _TOKENS * HIDDEN * Q_LORA, _TOKENS * Q_LORA * HEADS * (NOPE + ROPE)
    if not query_latent:
        down_q, up_q = sympy.S.Zero, _TOKENS * HIDDEN * HEADS * (NOPE + ROPE)
    down_kv = _TOKENS * HIDDEN * (KV_LORA + ROPE)
    up_kv = _TOKENS * KV_LORA * HEADS * (NOPE + VALUE)
    if form == "laga" and form_options.get("context", 1) > 1:
        up_kv *= CONTEXT  # each rank, for the heads it has, the keys of all
    output = _TOKENS * HEADS * VALUE * HIDDEN
    wide = 2 * KV_LORA + ROPE if form == "absorbed" else NOPE + ROPE + VALUE
    visible = sympy.S.One
    if causal:
        balanced = form_options.get("layout") == "zigzag" or form_options.get("context", 1) == 1
        visible = _HALF if balanced else 1 - 1 / (2 * CONTEXT)
    attention = BATCH * SEQ**2 * visible * HEADS / SP * wide
    if direction == "forward":
        return 2 * (down_q + up_q + down_kv + up_kv + output), 2 * attention
    again = sympy.S.Zero
    if recompute:
        latent = form_options.get("query") == "latent"
        again = up_kv + 2 * down_kv + (up_q + 2 * down_q if latent else 0)
    return 4 * (down_q + up_q + down_kv + up_kv + output) + 2 * again, 5 * attention


def saved_expression(form: str, query_latent: bool, **form_options: Any) -> sympy.Expr:
    """Bytes one layer keeps between forward and backward on one rank, with a kernel that is linear in memory.

    The layer's input is among them; norms keep their input and one float32 a token.
    """
    o = {"context": 1, "query": "heads", "recompute": False, **form_options}
    rotary = 2 * SEQ / SP * ROPE / 2 * ITEMSIZE
    norms = _TOKENS * 4 * (2 if query_latent else 1)
    down = _TOKENS * ITEMSIZE * ((2 * Q_LORA if query_latent else 0) + 2 * KV_LORA + ROPE)
    heads = HEADS * CONTEXT / SP if o["context"] > 1 else HEADS / SP  # of this rank
    rows = BATCH * SEQ / CONTEXT if o["context"] > 1 else BATCH * SEQ  # of its queries
    query = rows * heads * (NOPE + ROPE) * ITEMSIZE
    key_value = BATCH * SEQ * heads * (NOPE + ROPE + VALUE) * ITEMSIZE
    latent = BATCH * SEQ * (KV_LORA + ROPE) * ITEMSIZE
    here = rows * heads * VALUE * ITEMSIZE  # the output, head by head; the same bytes again token by token
    common = _TOKENS * HIDDEN * ITEMSIZE + rotary + rows * heads * _ROW_SUM + here
    if form == "explicit":
        return common + norms + down + query + key_value + here
    if form == "absorbed":
        raise ValueError("saved_expression knows explicit and laga; simulate_memory knows absorbed too")
    gathered = rows * Q_LORA * ITEMSIZE
    if o["recompute"]:
        others = (SP - 1) / SP * latent
        if o["query"] == "latent":
            return common + others + gathered - _TOKENS * Q_LORA * ITEMSIZE
        return common + others + query + (_TOKENS * (2 * Q_LORA * ITEMSIZE + 4) if query_latent else 0)
    own = _TOKENS * (KV_LORA + ROPE) * ITEMSIZE  # the latent before its norm
    kept = common + norms + own + latent + query + key_value + here
    if o["query"] == "latent":
        return kept + gathered + _TOKENS * Q_LORA * ITEMSIZE
    return kept + (2 * _TOKENS * Q_LORA * ITEMSIZE if query_latent else 0)


def cost(
    config: MLAConfig,
    form: str,
    seq: int,
    sp: int,
    machine: Machine,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "tiled",
    **form_options: Any,
) -> Cost:
    """Seconds of one layer's forward and backward on one rank, and what it keeps, by the closed forms.

    Raises ``ValueError`` for options that do not fit the configuration, or a sequence that cannot be laid out so.
    """
    options = check_form(config, sp, form, form_options)
    context = options.get("context", 1)
    check_layout(seq, sp, options.get("layout", "contiguous"), context)
    numbers = substitutions(config, seq=seq, sp=sp, batch=batch, dtype=dtype, context=context)
    numbers[NODE] = min(machine.ranks_per_node, sp)
    found = {name: float(value) for name, value in _evaluated(form, config.causal, kernel, options, numbers).items()}
    near, far = machine.node_link, machine.slow_link or machine.node_link
    matmul = found["projections"] / machine.rate
    attention = found["attention"] / (machine.attention_rate or machine.rate)
    transfer = (found["wire"] - found["between nodes"]) / near + found["between nodes"] / far
    if options.get("overlap"):
        hop = (found["hop"] - found["hop between nodes"]) / near + found["hop between nodes"] / far
        transfer -= min(hop, found["query"] / machine.rate)
    given = {key: value for key, value in options.items() if key in form_options}
    return Cost(form, given, matmul + attention, transfer, found["calls"] * machine.latency, int(found["saved"]))


def choose(
    config: MLAConfig,
    seq: int,
    sp: int,
    machine: Machine,
    layers: int = 1,
    layout: str = "contiguous",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "tiled",
) -> FormChoice:
    """The quickest member by the cost model that keeps no more than ``machine.memory`` in all its ``layers``.

    Where nothing fits it is the one that keeps least, and the reason says so. Raises ``ValueError`` where no member can
    run at this degree.
    """
    costs = [
        cost(config, form, seq, sp, machine, batch, dtype, kernel, **options)
        for form, options in members(config, seq, sp, layout)
    ]
    if not costs:
        raise ValueError(f"no form can share {config.num_attention_heads} heads and seq={seq} over sp={sp} ranks")
    costs.sort(key=lambda c: c.seconds)
    fitting = [c for c in costs if machine.memory is None or layers * c.saved_bytes <= machine.memory]
    best = fitting[0] if fitting else min(costs, key=lambda c: c.saved_bytes)
    weighed = [*fitting, *(c for c in costs if c not in fitting)]
    return FormChoice(best, weighed, _reason(best, costs, fitting, machine, layers))


def members(config: MLAConfig, seq: int, sp: int, layout: str = "contiguous") -> Iterator[tuple[str, dict[str, Any]]]:
    """The members that can run: the strong explicit, and Laga with each context, query, recomputation and overlap.

    At equal cost the earlier is taken, so the plainer comes first.
    """
    if config.num_attention_heads % sp == 0:
        yield "explicit", dict(STRONG_EXPLICIT)
    queries = ("heads",) if config.q_lora_rank is None else ("heads", "latent")
    contexts = [r for r in range(1, sp + 1) if sp % r == 0 and config.num_attention_heads % (sp // r) == 0]
    for context in contexts:
        if layout == "zigzag" and seq % (2 * context):
            continue
        for query in queries:
            for recompute in (False, True):
                for overlap in (False, True) if sp > 1 else (False,):
                    options: dict[str, Any] = {"context": context, "query": query, "recompute": recompute}
                    options = {**options, "overlap": overlap, "layout": layout}
                    plain = {"context": 1, "query": "heads", "recompute": False, "overlap": False}
                    if context == 1:
                        plain["layout"] = layout
                    yield "laga", {key: value for key, value in options.items() if plain.get(key) != value}


def _evaluated(
    form: str, causal: bool, kernel: str, options: Mapping[str, Any], numbers: Mapping[sympy.Symbol, int]
) -> dict[str, float]:
    symbols = tuple(numbers)
    names, function = _compiled(form, causal, kernel, tuple(options.items()), symbols)
    return dict(zip(names, function(*(numbers[symbol] for symbol in symbols)), strict=True))


@lru_cache(maxsize=256)
def _compiled(
    form: str, causal: bool, kernel: str, options: tuple[tuple[str, Any], ...], symbols: tuple[sympy.Symbol, ...]
) -> tuple[list[str], Any]:
    expressions = _expressions(form, causal, kernel, Q_LORA in symbols, **dict(options))
    return list(expressions), sympy.lambdify(symbols, list(expressions.values()), "math")


def _expressions(form: str, causal: bool, kernel: str, query_latent: bool, **options: Any) -> dict[str, sympy.Expr]:
    """All that a member's cost is made of, forward and backward together."""
    forward, backward = (arithmetic(form, causal, query_latent, d, **options) for d in ("forward", "backward"))
    moved = [t for d in ("forward", "backward") for t in transfers(form, d, kernel, **options)]
    # What overlap hides: the latent's first hop, under the work on the query that does not need it.
    hop = next(
        (t for t in moved if t.tensor == "latent across"), next((t for t in moved if t.tensor == "latent"), None)
    )
    query = _TOKENS * (HIDDEN * Q_LORA if query_latent else HIDDEN * HEADS * (NOPE + ROPE))
    if query_latent and options.get("query") != "latent":
        query += _TOKENS * Q_LORA * HEADS * (NOPE + ROPE)
    return {
        "projections": forward[0] + backward[0],
        "attention": forward[1] + backward[1],
        "query": 6 * query,
        "wire": sympy.Add(*(t.bytes_sent("wire") for t in moved)),
        "between nodes": sympy.Add(*(t.bytes_between_nodes() for t in moved)),
        "hop": 2 * hop.bytes_sent("wire") if hop else sympy.S.Zero,
        "hop between nodes": 2 * hop.bytes_between_nodes() if hop else sympy.S.Zero,
        "calls": sympy.Add(*(sympy.Min(1, t.ranks - 1) for t in _calls(moved, options))),
        "saved": saved_expression(form, query_latent, **options),
    }


def _calls(moved: list[Any], options: Mapping[str, Any]) -> list[Any]:
    """One transfer for each collective: those that travel together count once."""
    together = {"row sums"}
    if options.get("packed"):
        together |= {"key", "value", "rotary key"}
    if options.get("query") == "latent" and not (options.get("overlap") and options.get("context") == 1):
        together |= {"query latent"}
    return [t for t in moved if t.tensor not in together]


def _reason(best: Cost, costs: list[Cost], fitting: list[Cost], machine: Machine, layers: int) -> str:
    """Why, in words."""
    parts = ", ".join(
        f"{1e3 * value:.3g} ms {name}"
        for name, value in (("computing", best.compute), ("sending", best.transfer), ("in latency", best.latency))
    )
    kept = layers * best.saved_bytes / 1e6
    text = f"{best}: {1e3 * best.seconds:.3g} ms a layer by the cost model ({parts}), {kept:.0f} MB kept"
    if not fitting:
        return f"{text}; nothing fits the {(machine.memory or 0) / 1e6:.0f} MB there are, this keeps least"
    if costs[0] is not best:
        text += f"; {costs[0]} would be quicker ({1e3 * costs[0].seconds:.3g} ms) but does not fit"
    other = next((c for c in fitting if c.form != best.form), None)
    if other is not None:
        text += f"; {other} would take {other.seconds / best.seconds:.2f} times as long"
    return text
