"""Which of four ranks holds which part of which tensor, step by step through a forward pass of each member."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import MLAConfig
from ..costs import substitutions, transfers
from ..costs.symbols import NODE
from ..sharding import sequence_positions

RANKS, PER_NODE = 4, 2
STEPS = 6


@dataclass(frozen=True)
class Tensor:
    """A tensor of the forward pass: whose ``tokens`` a rank holds, and the steps at which it does.

    ``tokens`` is ``"own"``, ``"counterparts"`` (its own and those of the ranks with the same heads), ``"group"`` (those
    of the ranks it shares the heads with) or ``"all"``. ``heads`` is ``"all"``, ``"own"``, or none where the tensor has
    no heads. ``dim`` is its elements of a token (and head).
    """

    name: str
    tokens: str
    heads: str
    dim: int
    first: int
    last: int

    @property
    def row(self) -> str:
        """What shares a row of the picture: a query takes the place of its latent."""
        return self.name.removesuffix(" latent")


@dataclass(frozen=True)
class Member:
    """A form with its options: what happens at each step, in words, and the tensors sent at it."""

    label: str
    form: str
    steps: tuple[str, ...]
    sent: dict[int, tuple[str, ...]]  # step -> names in laga_core.costs.transfers
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """R; the ranks share the heads in groups of RANKS / R neighbours."""
        return int(self.options.get("context", 1))

    @property
    def layout(self) -> str:
        """How the tokens lie over the ranks."""
        return str(self.options.get("layout", "contiguous"))


_START = "Each rank holds the hidden states of its own tokens."
_PROJECT = "Project: query, latent and rotary key of this rank's own tokens."
_GATHER = "All-to-all of the query; all-gather of latent and rotary key."
_ATTEND = "Attention over all tokens, for this rank's heads."
_BACK = "All-to-all back: every rank gets all heads of its own tokens."
_END = "Output projection. Every rank holds its own tokens again."

MEMBERS = {
    "explicit": Member(
        "Explicit",
        "explicit",
        (
            _START,
            _PROJECT,
            "Unfold the latent: keys and values of all heads, own tokens.",
            "All-to-all of query, key and value: own heads, all tokens.",
            _ATTEND,
            _BACK,
            _END,
        ),
        {3: ("query", "key", "value"), 5: ("output",)},
    ),
    "absorbed": Member(
        "Absorbed",
        "absorbed",
        (
            _START,
            _PROJECT,
            _GATHER,
            "Absorb: the query takes in the key half of the up-projection.",
            "Attention in the latent; what a head accumulates is unfolded last.",
            _BACK,
            _END,
        ),
        {2: ("query", "latent"), 5: ("output",)},
    ),
    "laga": Member(
        "Laga",
        "laga",
        (_START, _PROJECT, _GATHER, "Unfold the gathered latent: all tokens, this rank's heads.", _ATTEND, _BACK, _END),
        {2: ("query", "latent"), 5: ("output",)},
    ),
    "query": Member(
        "Query latent",
        "laga",
        (
            _START,
            "Project: the query's latent, the key's, and the rotary key of own tokens.",
            "One all-gather of all of them. No query is sent.",
            "Unfold both latents: all tokens, this rank's heads.",
            _ATTEND,
            _BACK,
            _END,
        ),
        {2: ("query latent", "latent"), 5: ("output",)},
        {"query": "latent"},
    ),
    "context": Member(
        "R = 2",
        "laga",
        (
            "Each rank holds its own tokens, dealt out to the nodes in zigzag.",
            _PROJECT,
            "Counterparts on the two nodes exchange their latents.",
            "Inside a node: all-to-all of the query, all-gather of the latents.",
            "Unfold: the keys and values of all tokens, for this rank's half of the heads.",
            "Attention from the node's tokens to all tokens, for this rank's heads.",
            "All-to-all back, inside the node; then the output projection.",
        ),
        {2: ("latent across",), 3: ("query", "latent"), 6: ("output",)},
        {"context": 2, "layout": "zigzag"},
    ),
}
"""The members that can be stepped through, by name."""


def tensors(member: Member, config: MLAConfig) -> list[Tensor]:
    """The tensors of a member's forward pass, in the order in which they are drawn."""
    made = _unfolded_first(config) if member.form == "explicit" else _gathered_first(member, config)
    return [Tensor("hidden", "own", "", config.hidden_size, 0, STEPS), *made]


def _unfolded_first(c: MLAConfig) -> list[Tensor]:
    return [
        Tensor("query", "own", "all", c.qk_head_dim, 1, 2),
        Tensor("query", "all", "own", c.qk_head_dim, 3, 4),
        Tensor("latent", "own", "", c.latent_dim, 1, 2),
        Tensor("key", "own", "all", c.qk_head_dim, 2, 2),
        Tensor("key", "all", "own", c.qk_head_dim, 3, 4),
        Tensor("value", "own", "all", c.v_head_dim, 2, 2),
        Tensor("value", "all", "own", c.v_head_dim, 3, 4),
        Tensor("output", "all", "own", c.v_head_dim, 4, 4),
        Tensor("output", "own", "all", c.v_head_dim, 5, 5),
    ]


def _gathered_first(member: Member, c: MLAConfig) -> list[Tensor]:
    across = member.context > 1
    here = "group" if across else "all"  # the tokens from which a rank attends
    ready = 3 if across else 2  # the step at which all has arrived; then comes unfolding, then attention
    if member.options.get("query") == "latent":
        assert c.q_lora_rank is not None
        found = [
            Tensor("query latent", "own", "", c.q_lora_rank, 1, 1),
            Tensor("query latent", here, "", c.q_lora_rank, ready, ready),
            Tensor("query", here, "own", c.qk_head_dim, ready + 1, ready + 2),
        ]
    else:
        until = ready if member.form == "absorbed" else ready + 2
        found = [
            Tensor("query", "own", "all", c.qk_head_dim, 1, ready - 1),
            Tensor("query", here, "own", c.qk_head_dim, ready, until),
        ]
    found.append(Tensor("latent", "own", "", c.latent_dim, 1, 1))
    if across:
        found.append(Tensor("latent", "counterparts", "", c.latent_dim, 2, 2))
    found.append(Tensor("latent", "all", "", c.latent_dim, ready, ready + 2))
    if member.form == "absorbed":
        found += [
            Tensor("absorbed query", "all", "own", c.latent_dim, ready + 1, ready + 2),
            Tensor("accumulator", "all", "own", c.kv_lora_rank, ready + 2, ready + 2),
        ]
    else:
        found += [
            Tensor("key", "all", "own", c.qk_head_dim, ready + 1, ready + 2),
            Tensor("value", "all", "own", c.v_head_dim, ready + 1, ready + 2),
        ]
    return [
        *found,
        Tensor("output", here, "own", c.v_head_dim, ready + 2, ready + 2),
        Tensor("output", "own", "all", c.v_head_dim, ready + 3, ready + 3),
    ]


def shape(tensor: Tensor, member: Member, config: MLAConfig, seq: int) -> tuple[int, ...]:
    """The tensor's shape on one rank: tokens, heads where it has them, elements."""
    tokens = seq // RANKS * len(quarters(tensor, member, 0))
    if not tensor.heads:
        return tokens, tensor.dim
    return tokens, config.num_attention_heads // (sharing(member) if tensor.heads == "own" else 1), tensor.dim


def quarters(tensor: Tensor, member: Member, rank: int) -> list[int]:
    """The quarters of the sequence whose tokens ``rank`` holds of the tensor."""
    within = sharing(member)
    own = sequence_positions(RANKS, member.layout, member.context).tolist()
    holders = {
        "own": [rank],
        "counterparts": range(rank % within, RANKS, within),
        "group": range(rank - rank % within, rank - rank % within + within),
        "all": range(RANKS),
    }[tensor.tokens]
    return sorted(own[each] for each in holders)


def sent_bytes(member: Member, step: int, config: MLAConfig, seq: int) -> tuple[int, int]:
    """Wire bytes that one rank sends at a step in bf16: in all, and to the other node."""
    numbers = substitutions(config, seq=seq, sp=RANKS, batch=1, dtype=torch.bfloat16, context=member.context)
    moved = [t for t in transfers(member.form, **member.options) if t.tensor in member.sent.get(step, ())]
    total = sum(int(t.bytes_sent("wire").subs(numbers)) for t in moved)
    return total, sum(int(t.bytes_between_nodes().subs({**numbers, NODE: PER_NODE})) for t in moved)


def sharing(member: Member) -> int:
    """The ranks that the heads are split over."""
    return RANKS // member.context
