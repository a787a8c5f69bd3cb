"""Algorithm 1 stepped through: which rank holds which part of which tensor, for each form."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import altair as alt
import torch

from ..config import MLAConfig
from ..costs import transfers
from ..costs.symbols import substitutions

RANKS = 4
STEPS = 6
_SEQUENCE_COLOURS = ["#332288", "#44AA99", "#DDCC77", "#AA4499"]  # Paul Tol's muted scheme
_ROW = 6.2  # from one tensor to the next, in quarters of the heads
_WIDTH, _GAP = 4.0, 1.2  # a rank's column is four quarters of the sequence wide


@dataclass(frozen=True)
class Tensor:
    """A tensor of the forward pass: how it is split over the ranks, and the steps at which a rank holds it.

    ``heads`` is the elements of one head, ``shared`` those of a token without heads.
    """

    name: str
    split: str  # "sequence": this rank's tokens, all heads; "heads": all tokens, this rank's heads; "whole": all tokens
    first: int
    last: int
    heads: int = 0
    shared: int = 0


def steps(form: str) -> list[str]:
    """What happens at each step of a form, in words."""
    project = "Project: query, latent and rotary key of this rank's own tokens."
    back = "All-to-all back: every rank gets all heads of its own tokens."
    finish = "Output projection. Every rank holds its own tokens again."
    middle = {
        "explicit": [
            "Unfold the latent: keys and values of all heads, own tokens.",
            "All-to-all of query, key and value: own heads, all tokens.",
            "Attention over all tokens, for this rank's heads.",
        ],
        "absorbed": [
            "All-to-all of the query; all-gather of latent and rotary key.",
            "Absorb: the query takes in the key half of the up-projection.",
            "Attention in the latent: each head accumulates a vector of the latent's size.",
        ],
        "laga": [
            "All-to-all of the query; all-gather of latent and rotary key.",
            "Unfold the gathered latent: all tokens, this rank's heads.",
            "Attention over all tokens, for this rank's heads.",
        ],
    }
    return ["Each rank holds the hidden states of its own tokens.", project, *middle[form], back, finish]


def tensors(form: str, config: MLAConfig) -> list[Tensor]:
    """The tensors of a form's forward pass, in the order in which they are drawn."""
    c = config
    start = [Tensor("hidden", "sequence", 0, 6, shared=c.hidden_size)]
    end = [Tensor("output", "heads", 4, 4, heads=c.v_head_dim), Tensor("output", "sequence", 5, 5, heads=c.v_head_dim)]
    latent, query = c.latent_dim, c.qk_head_dim
    if form == "explicit":
        held = [
            Tensor("query", "sequence", 1, 2, heads=query),
            Tensor("query", "heads", 3, 4, heads=query),
            Tensor("latent", "sequence", 1, 2, shared=latent),
            Tensor("key", "sequence", 2, 2, heads=query),
            Tensor("key", "heads", 3, 4, heads=query),
            Tensor("value", "sequence", 2, 2, heads=c.v_head_dim),
            Tensor("value", "heads", 3, 4, heads=c.v_head_dim),
        ]
        return start + held + end
    gathered = [
        Tensor("query", "sequence", 1, 1, heads=query),
        Tensor("query", "heads", 2, 4 if form == "laga" else 2, heads=query),
        Tensor("latent", "sequence", 1, 1, shared=latent),
        Tensor("latent", "whole", 2, 4, shared=latent),
    ]
    if form == "absorbed":
        absorbed = [Tensor("absorbed query", "heads", 3, 4, heads=latent)]
        accumulator = [Tensor("accumulator", "heads", 4, 4, heads=c.kv_lora_rank)]
        return start + gathered + absorbed + accumulator + end[1:]
    rebuilt = [
        Tensor("key", "heads", 3, 4, heads=query),
        Tensor("value", "heads", 3, 4, heads=c.v_head_dim),
    ]
    return start + gathered + rebuilt + end


def elements(tensor: Tensor, config: MLAConfig, seq: int, sp: int) -> int:
    """Elements of the tensor on one rank."""
    heads = config.num_attention_heads
    tokens = seq // sp if tensor.split == "sequence" else seq
    per_token = tensor.shared or tensor.heads * (heads // sp if tensor.split == "heads" else heads)
    return tokens * per_token


def stepper(model: str = "deepseek-v3", seq: int = 16384) -> alt.LayerChart:
    """Tiles of four ranks under a step control and a form control; sizes for ``model`` at ``seq`` tokens in bf16."""
    config = MLAConfig.preset(model)
    tiles, labels, captions = [], [], []
    for form in _FORMS:
        rows = {name: row for row, name in enumerate(dict.fromkeys(t.name for t in tensors(form, config)))}
        for tensor in tensors(form, config):
            common = {"form": form, "first": tensor.first, "last": tensor.last}
            top = _ROW * rows[tensor.name]
            tiles += [common | tile for tile in _tiles(tensor, top)]
            size = elements(tensor, config, seq, RANKS) * 2 / 1e6
            text = f"{tensor.name}: {_shape(tensor, config, seq)}, {size:,.0f} MB"
            labels.append(common | {"x": 0, "y": top - 0.8, "text": text})
        for step, text in enumerate(steps(form)):
            told = "\n".join(textwrap.wrap(f"{step}. {text}", 44))
            caption = {"x": 0, "y": -8, "text": told, "sent": _sent(form, step, config, seq)}
            captions.append({"form": form, "first": step, "last": step} | caption)
    return _draw(tiles, labels, captions)


_FORMS = ("explicit", "absorbed", "laga")
_SENDING = {"explicit": {3: ("query", "key", "value"), 5: ("output",)}}
_SENDING_LATENT = {2: ("query", "latent"), 5: ("output",)}


def sent_bytes(form: str, step: int, config: MLAConfig, seq: int) -> int:
    """Wire bytes that one of the four ranks sends at a step."""
    moved = _SENDING.get(form, _SENDING_LATENT).get(step, ())
    values = substitutions(config, seq=seq, sp=RANKS, batch=1, dtype=torch.bfloat16)
    return sum(int(t.bytes_sent("wire").subs(values)) for t in transfers(form) if t.tensor in moved)


def _sent(form: str, step: int, config: MLAConfig, seq: int) -> str:
    sent = sent_bytes(form, step, config, seq)
    return f"Each rank sends {sent / 1e6:,.0f} MB." if sent else "Nothing is sent."


def _shape(tensor: Tensor, config: MLAConfig, seq: int) -> str:
    tokens = seq // RANKS if tensor.split == "sequence" else seq
    if tensor.shared:
        return f"{tokens:,} × {tensor.shared:,}"
    heads = config.num_attention_heads // (RANKS if tensor.split == "heads" else 1)
    return f"{tokens:,} × {heads} × {tensor.heads}"


def _tiles(tensor: Tensor, top: float) -> list[dict[str, float]]:
    """Rectangles: across, the quarter of the sequence; down, the quarter of the heads; one grid for each rank."""
    tiles = []
    for rank in range(RANKS):
        left = rank * (_WIDTH + _GAP)
        quarters = [rank] if tensor.split == "sequence" else range(RANKS)
        if tensor.shared:
            y, height = top + 1.4, 1.2
        elif tensor.split == "heads":
            y, height = top + rank, 1
        else:
            y, height = top, 4
        frame = {"left": left, "right": left + _WIDTH, "top": top, "bottom": top + 4}
        tiles += [frame | {"x": left + q, "x2": left + q + 1, "y": y, "y2": y + height, "quarter": q} for q in quarters]
    return tiles


def _draw(tiles: list[dict], labels: list[dict], captions: list[dict]) -> alt.LayerChart:
    form = alt.param(
        name="form",
        value="laga",
        bind=alt.binding_radio(options=list(_FORMS), labels=["Explicit", "Absorbed", "Laga"], name="Form "),
    )
    step = alt.param(name="step", value=2, bind=alt.binding_range(min=0, max=STEPS, step=1, name="Step "))
    x = alt.X("x:Q", scale=alt.Scale(domain=[0, RANKS * (_WIDTH + _GAP)], nice=False), axis=None)
    down = alt.Scale(domain=[-9, _ROW * 6 - 1], reverse=True, nice=False)
    y = alt.Y("y:Q", scale=down, axis=None)
    now = "datum.form == form && datum.first <= step && step <= datum.last"
    colour = alt.Color(
        "quarter:O",
        scale=alt.Scale(domain=list(range(RANKS)), range=_SEQUENCE_COLOURS),
        legend=alt.Legend(title="Tokens", labelExpr="'quarter ' + (datum.value + 1)"),
    )
    grid = alt.Chart(alt.Data(values=tiles)).transform_filter(now).encode(x=x, x2="x2", y2="y2")
    # An empty frame a rank: what it does not hold shows as clearly as what it holds.
    frames = grid.mark_rect(filled=False, stroke="currentColor", strokeOpacity=0.06).encode(
        x=alt.X("left:Q", axis=None), x2="right", y=alt.Y("top:Q", scale=down, axis=None), y2="bottom"
    )
    cells = grid.mark_rect(stroke="white", strokeWidth=0.5).encode(y=y, color=colour)
    names = (
        alt.Chart(alt.Data(values=labels))
        .transform_filter(now)
        .mark_text(align="left", fontSize=12)
        .encode(x=x, y=y, text="text:N")
    )
    ranks = [{"x": r * (_WIDTH + _GAP) + _WIDTH / 2, "y": -2.3, "text": f"rank {r}"} for r in range(RANKS)]
    heads = alt.Chart(alt.Data(values=ranks)).mark_text(fontWeight="bold").encode(x=x, y=y, text="text:N")
    told = alt.Chart(alt.Data(values=captions)).transform_filter(now).encode(x=x, y=y)
    text = told.mark_text(align="left", fontSize=13, lineBreak="\n").encode(text="text:N")
    sent = told.mark_text(align="left", dy=34, fontSize=12, fontWeight="bold").encode(text="sent:N")
    layers = alt.layer(frames, cells, names, heads, text, sent).properties(width=520, height=430)
    return layers.add_params(form, step)  # type: ignore[return-value]
