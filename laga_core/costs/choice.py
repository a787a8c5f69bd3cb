"""Which form, by cost: arithmetic, bytes at two link speeds, and what is kept for backward.

Each cost of a training step (forward and backward of one layer, on one rank) is a closed form in the symbols of
:mod:`laga_core.costs.symbols` and of a :class:`Machine`; :func:`choose` compares the members, and the page of the
planner does the same with the same expressions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import sympy
import torch

from ..config import MLAConfig, divisors
from ..forms import STRONG_EXPLICIT, check_form, resolve_form
from ..sharding import check_layout
from . import memory
from .communication import Transfer, transfers
from .symbols import (
    BATCH,
    CONTEXT,
    HEADS,
    HIDDEN,
    KV_LORA,
    NODE,
    NOPE,
    Q_LORA,
    ROPE,
    SEQ,
    SP,
    VALUE,
    check_counts,
    substitutions,
)

_HALF = sympy.Rational(1, 2)
_TOKENS = BATCH * SEQ / SP  # of this rank
_LEAST = 1e-24  # of what describes a machine: its costs stay numbers

PARTS = ("projections", "attention", "sent", "outside", "hop", "hop_outside", "under_hop", "calls", "saved")
"""What a member's cost is made of, in operations and bytes: :func:`cost_parts`."""
RATES = ("rate", "attention_rate", "node_link", "slow_link", "latency")
"""What turns them into seconds; as in :class:`Machine`."""


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
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= 1 / _LEAST:
                raise ValueError(
                    f"Machine: {name} must be a positive number from {_LEAST:g} to {1 / _LEAST:g}, got {value!r}"
                )
        check_counts(ranks_per_node=self.ranks_per_node)

    @classmethod
    def typical(cls, device: str) -> Machine:
        """A guess for a kind of device (``"cpu"``, ``"cuda"``, ``"npu"``), where nothing has been measured.

        An Ascend 910B and an A100 at about half their bf16 peak; links within and between nodes as the throughput in
        the Laga paper's tables 4 and 5 implies them for the former. For a CPU two processes on one machine.
        """
        if not isinstance(device, str) or device not in _TYPICAL:
            raise ValueError(f"no typical machine for {device!r}; known: {', '.join(_TYPICAL)}; describe yours")
        return cls(**_TYPICAL[device])


_TYPICAL: dict[str, dict[str, Any]] = {
    "cpu": {"rate": 50e9, "attention_rate": 25e9, "node_link": 1e9, "slow_link": 1e8, "latency": 1e-3},
    "cuda": {"rate": 150e12, "attention_rate": 120e12, "node_link": 200e9, "slow_link": 20e9},
    "npu": {"rate": 150e12, "attention_rate": 100e12, "node_link": 60e9, "slow_link": 11e9},
}


@dataclass(frozen=True)
class Cost:
    """One member's cost on a machine: seconds and bytes of a step, forward and backward of one layer on one rank.

    ``seconds`` sums ``compute``, ``transfer`` and ``latency``. ``sent_bytes`` is all that is sent, ``inter_node_bytes``
    what of it leaves the node, ``saved_bytes`` what is kept between forward and backward.
    """

    form: str
    options: dict[str, Any]
    compute: float
    transfer: float
    latency: float
    sent_bytes: int
    inter_node_bytes: int
    saved_bytes: int

    @property
    def seconds(self) -> float:
        """Of forward and backward of one layer."""
        return self.compute + self.transfer + self.latency

    @property
    def kind(self) -> tuple[tuple[str, Any], ...]:
        """What sort of member it is: all but the number of groups, the layout that goes with it, and overlap."""
        options = {**self.options, "context": self.options.get("context", 1) > 1}
        return (("form", self.form), *sorted((k, v) for k, v in options.items() if k not in ("layout", "overlap")))

    def __str__(self) -> str:
        return in_words(self.form, self.options)


@dataclass(frozen=True)
class FormChoice:
    """The member to take, all that were weighed (the quickest that fits first), those that fit, and why in words."""

    best: Cost
    weighed: list[Cost] = field(repr=False)
    fitting: list[Cost] = field(repr=False)
    reason: str

    @property
    def form(self) -> str:
        """Its form."""
        return self.best.form

    @property
    def options(self) -> dict[str, Any]:
        """Its options."""
        return self.best.options

    @property
    def contenders(self) -> list[Cost]:
        """The best of each kind, the one to take first."""
        found: dict[Any, Cost] = {}
        for each in (self.best, *self.weighed):
            found.setdefault(each.kind, each)
        return list(found.values())


def in_words(form: str, options: Mapping[str, Any]) -> str:
    """A member's name for people: ``"Laga, R = 2, query latent, overlap"``."""
    _, plain = resolve_form(form, {})
    changed = {name: value for name, value in options.items() if value != plain[name] and name != "layout"}
    if form != "laga":
        return (
            form if form != "explicit" else "strong explicit" if changed == STRONG_EXPLICIT else "the paper's explicit"
        )
    said = {"context": "R = {}", "query": "query latent", "head_chunk": "{} heads at a time"}
    return ", ".join(["Laga", *(said.get(name, name).format(value) for name, value in changed.items())])


def code(form: str, options: Mapping[str, Any], config: str, kernel: str = "auto") -> str:
    """Python that makes the layer, for ``config`` a Python expression and ``group`` the ranks that share a sequence.

    Where the tokens do not lie as contiguous shards, another line lays them so.
    """
    named = {name: repr(value).replace("'", '"') for name, value in options.items()}
    given = "".join(f"{name}={value}, " for name, value in named.items()).rstrip()
    lines = [config + ",", f'form="{form}", kernel="{kernel}", group=group,', *([given] if given else [])]
    layer = "\n    ".join(["layer = MLAAttention(", *lines]) + "\n)"
    if options.get("layout", "contiguous") == "contiguous":
        return layer
    return f"{layer}\nhidden = shard_sequence(hidden, group, layout={named['layout']}, context={named['context']})"


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
    """Bytes one layer keeps between forward and backward on one rank, with a kernel that is linear in memory."""
    kept = memory.saved_expression(form, "tiled", **form_options)
    return kept.subs({memory.DIRECT: int(not query_latent), memory.ROTARY: 1})


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
    alike = {**options, "context": 2} if context > 1 else options  # their expressions are the same
    function = _compiled(form, config.causal, kernel, tuple(alike.items()), tuple(numbers))
    parts = dict(zip(PARTS, function(*numbers.values()), strict=True))
    otherwise = {"attention_rate": machine.rate, "slow_link": machine.node_link}
    rates = (getattr(machine, name) or otherwise[name] for name in RATES)
    compute, transfer, latency = _compiled_seconds()(*parts.values(), *rates)
    sent, outside, saved = (round(parts[name]) for name in ("sent", "outside", "saved"))
    given = {key: value for key, value in options.items() if key in form_options}
    return Cost(form, given, compute, transfer, latency, sent, outside, saved)


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
    check_counts(seq=seq, sp=sp, layers=layers, batch=batch)
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
    return FormChoice(best, weighed, fitting, _reason(best, costs, fitting, machine, layers))


def members(config: MLAConfig, seq: int, sp: int, layout: str = "contiguous") -> Iterator[tuple[str, dict[str, Any]]]:
    """The members that can run: the paper's explicit, the strong one, Laga with each context, query, recomputation and
    overlap, and absorbed.

    At equal cost the earlier is taken, so the plainer comes first.
    """
    shared = config.num_attention_heads % sp == 0
    if shared:
        yield "explicit", {}
        yield "explicit", dict(STRONG_EXPLICIT)
    queries = ("heads",) if config.q_lora_rank is None else ("heads", "latent")
    for within in reversed(divisors(math.gcd(sp, config.num_attention_heads))):
        context = sp // within
        if layout == "zigzag" and seq % (2 * context):
            continue
        yield from (("laga", options) for options in laga_options(context, layout, queries, overlap=sp > 1))
    if shared:
        yield "absorbed", {}


def laga_options(context: int, layout: str, queries: Iterable[str], overlap: bool) -> Iterator[dict[str, Any]]:
    """Options of the members of Laga with one ``context``, plainer ones first; defaults are left out."""
    split = {"context": context, "layout": layout} if context > 1 else {}
    if layout == "contiguous":
        split.pop("layout", None)
    for query, recompute, overlapped in itertools.product(
        queries, (False, True), (False, True) if overlap else (False,)
    ):
        chosen = {"query": query, "recompute": recompute, "overlap": overlapped}
        yield split | {name: value for name, value in chosen.items() if value not in ("heads", False)}


@lru_cache(maxsize=256)
def _compiled(
    form: str, causal: bool, kernel: str, options: tuple[tuple[str, Any], ...], symbols: tuple[sympy.Symbol, ...]
) -> Callable[..., list[float]]:
    parts = cost_parts(form, causal, Q_LORA in symbols, kernel, **dict(options))
    return sympy.lambdify(symbols, list(parts.values()), "math", docstring_limit=0)


@cache
def _compiled_seconds() -> Callable[..., list[float]]:
    return sympy.lambdify([*PARTS, *RATES], list(seconds_expressions().values()), "math")


def seconds_expressions() -> dict[str, sympy.Expr]:
    """Seconds of a step that go into computing, transfer and latency, in symbols named as :data:`PARTS` and
    :data:`RATES`."""
    of = {name: sympy.Symbol(name) for name in (*PARTS, *RATES)}

    def on_links(sent: str, outside: str) -> sympy.Expr:
        return (of[sent] - of[outside]) / of["node_link"] + of[outside] / of["slow_link"]

    hidden = sympy.Min(on_links("hop", "hop_outside"), of["under_hop"] / of["rate"], evaluate=False)
    return {
        "compute": of["projections"] / of["rate"] + of["attention"] / of["attention_rate"],
        "transfer": on_links("sent", "outside") - hidden,
        "latency": of["calls"] * of["latency"],
    }


def cost_parts(
    form: str, causal: bool, query_latent: bool, kernel: str = "tiled", **form_options: Any
) -> dict[str, sympy.Expr]:
    """:data:`PARTS` of a member, forward and backward together, as closed forms.

    ``sent`` bytes leave the rank, ``outside`` the node. Under ``overlap`` the latent's first ``hop`` is hidden behind
    what the projections do for the query meanwhile, ``under_hop``.
    """
    both = [arithmetic(form, causal, query_latent, d, **form_options) for d in ("forward", "backward")]
    moved = [t for d in ("forward", "backward") for t in transfers(form, d, kernel, **form_options)]
    hop, query = [], sympy.S.Zero
    if form_options.get("overlap"):
        first = "latent across" if form_options.get("context", 1) > 1 else "latent"
        hop = [t for t in moved if t.tensor == first]
        query = _TOKENS * (HIDDEN * Q_LORA if query_latent else HIDDEN * HEADS * (NOPE + ROPE))
        if query_latent and form_options.get("query") != "latent":
            query += _TOKENS * Q_LORA * HEADS * (NOPE + ROPE)
    found = (
        sum(each[0] for each in both),
        sum(each[1] for each in both),
        sympy.Add(*(t.bytes_sent("wire") for t in moved)),
        sympy.Add(*(t.bytes_between_nodes() for t in moved)),
        sympy.Add(*(t.bytes_sent("wire") for t in hop)),
        sympy.Add(*(t.bytes_between_nodes() for t in hop)),
        6 * query,
        sympy.Add(*(sympy.Min(1, t.ranks - 1) for t in _calls(moved, form_options))),
        saved_expression(form, query_latent, **form_options),
    )
    return dict(zip(PARTS, found, strict=True))


def _calls(moved: list[Transfer], options: Mapping[str, Any]) -> list[Transfer]:
    """One transfer for each collective: those that travel together count once."""
    together = {"row sums"}
    if options.get("packed"):
        together |= {"key", "value", "rotary key"}
    if options.get("query") == "latent" and not (options.get("overlap") and options.get("context", 1) == 1):
        together |= {"query latent"}
    return [t for t in moved if t.tensor not in together]


REASON = {
    "best": "{best}: {seconds} ms a layer by the cost model ({compute} computing, {transfer} sending, {latency} in "
    "latency), {kept} GB kept",
    "nothing fits": "; nothing fits the {memory} GB there are, this keeps least",
    "quicker": "; {quickest} would be quicker ({quickest_seconds} ms) but does not fit",
    "other": "; {other} would take {ratio} times as long, and send {other_sent} MB ({other_outside} between nodes) "
    "where this sends {sent} ({outside})",
    "tie": "; less than the model can tell apart: take the plainer",
}
"""The sentences of a reason, as the page of the planner tells it too."""
TIE = 1.02  # times as long, up to which the best of another form is as good


def _reason(best: Cost, costs: list[Cost], fitting: list[Cost], machine: Machine, layers: int) -> str:
    """Why, in words."""
    other = next((c for c in fitting if c.form != best.form), None)
    told = {
        "best": True,
        "nothing fits": not fitting,
        "quicker": bool(fitting) and costs[0] is not best,
        "other": other is not None,
        "tie": other is not None and other.seconds < TIE * best.seconds,
    }
    quickest, against = costs[0], other or best
    numbers = {
        "seconds": 1e3 * best.seconds,
        "compute": 1e3 * best.compute,
        "transfer": 1e3 * best.transfer,
        "latency": 1e3 * best.latency,
        "kept": layers * best.saved_bytes / 1e9,
        "memory": (machine.memory or 0) / 1e9,
        "quickest_seconds": 1e3 * quickest.seconds,
        "ratio": against.seconds / best.seconds,
        "other_sent": against.sent_bytes / 1e6,
        "other_outside": against.inter_node_bytes / 1e6,
        "sent": best.sent_bytes / 1e6,
        "outside": best.inter_node_bytes / 1e6,
    }
    values = {name: f"{value:,.2f}" for name, value in numbers.items()}
    values |= {"best": str(best), "quickest": str(quickest), "other": str(other)}
    return "".join(text for name, text in REASON.items() if told[name]).format(**values)
