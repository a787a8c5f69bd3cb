"""Each collective on its own: where every element goes, and that backward is the adjoint of forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from torch import Tensor, nn

from laga_core import all_reduce_gradients
from laga_core.parallel import agree, gather_sequence, heads_to_sequence, record_bytes, sequence_to_heads

BATCH, SEQ, HEADS, DIM = 3, 8, 8, 5
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FUNCTIONS = {
    "sequence_to_heads": (sequence_to_heads, ("seq", "heads")),
    "heads_to_sequence": (heads_to_sequence, ("heads", "seq")),
    "gather_sequence": (gather_sequence, ("seq", None)),
}


def whole(name: str, seed: int = 0) -> Tensor:
    shape = (BATCH, SEQ, DIM) if name == "gather_sequence" else (BATCH, SEQ, HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def share(x: Tensor, axis: str | None, group) -> Tensor:
    """This rank's part of the whole, along the sequence or the heads; ``None``: every rank has it all."""
    if axis is None:
        return x
    return x.chunk(group.size(), dim={"seq": 1, "heads": 2}[axis])[group.rank()]


def strides(x: Tensor) -> list[Tensor]:
    """The same values under several memory layouts."""
    flipped = x.transpose(0, -1).contiguous().transpose(0, -1)
    spaced = torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
    repeated = torch.cat((x, x), 1)[:, : x.shape[1]]
    return [x, flipped, spaced, repeated]


def moves(group) -> list[str]:
    """Every element must land where the definition says, whatever the layout and dtype; the input stays as it was."""
    wrong = []
    for name, (function, (before, after)) in FUNCTIONS.items():
        for dtype in DTYPES:
            full = whole(name).to(dtype)
            for layout, x in enumerate(strides(share(full, before, group))):
                kept = x.clone()
                y = function(x, group)
                if y.dtype != dtype or not torch.equal(y, share(full, after, group)) or not torch.equal(x, kept):
                    wrong.append(f"{name} {dtype} layout {layout}")
    return wrong


def adjoint(group) -> dict[str, float]:
    """<A x, y> - <x, A' y> summed over the ranks, relative; A' is what autograd runs."""
    found = {}
    for name, (function, (before, _)) in FUNCTIONS.items():
        for layout in range(4):
            x = share(whole(name), before, group).requires_grad_()
            y = function(strides(x)[layout], group)
            z = torch.randn(y.shape, generator=torch.Generator().manual_seed(7 + group.rank()), dtype=y.dtype)
            (back,) = torch.autograd.grad(y, x, strides(z)[layout])
            products = torch.stack([(y * z).sum(), (x * back).sum()]).detach()
            dist.all_reduce(products, group=group)
            found[f"{name} {layout}"] = ((products[0] - products[1]) / products[0]).abs().item()
    return found


def round_trip(group) -> bool:
    x = share(whole("sequence_to_heads"), "seq", group)
    return torch.equal(heads_to_sequence(sequence_to_heads(x, group), group), x)


def check_all(group) -> tuple[list[str], dict[str, float], bool]:
    return moves(group), adjoint(group), round_trip(group)


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_elements_land_where_they_belong_and_backward_is_the_adjoint(sp: int) -> None:
    for wrong, errors, same in on_ranks(check_all, sp=sp):
        assert wrong == []
        assert max(errors.values()) <= 1e-13, errors
        assert same


def reduce_scatter_in_fp64(group) -> Tensor:
    """The gather's gradient: the sum over ranks of what each says about this rank's tokens."""
    x = torch.zeros(BATCH, SEQ // group.size(), DIM, dtype=torch.float64, requires_grad=True)
    gather_sequence(x, group).backward(whole("gather_sequence", seed=group.rank()))
    return x.grad


def test_the_gathers_backward_sums_over_the_ranks() -> None:
    sp = 4
    summed = sum(whole("gather_sequence", seed=rank) for rank in range(sp))
    assert torch.allclose(torch.cat(on_ranks(reduce_scatter_in_fp64, sp=sp), 1), summed, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_rank_gets_its_input_back_as_it_is(name: str) -> None:
    x = whole(name)
    with record_bytes() as ledger:
        assert FUNCTIONS[name][0](x, None) is x
    assert ledger.entries == []


def degree_one(group) -> list[bool]:
    return [function(x, group) is x for name, (function, _) in FUNCTIONS.items() for x in [whole(name)]]


def test_a_group_of_one_moves_nothing() -> None:
    assert on_ranks(degree_one, sp=1) == [[True, True, True]]


# --- gradients ---


class Uneven(nn.Module):
    """Rank 0 uses ``first`` alone; nobody uses ``never``; ``wide`` has a gradient with strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.both = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))


def reduced(group) -> dict:
    module, rank = Uneven(), group.rank()
    loss = (rank + 1.0) * module.both.sum()
    if rank == 0:
        loss = loss + 10.0 * module.first.sum()
    loss.backward()
    module.wide.grad = (torch.arange(12, dtype=torch.float64).view(4, 3) * (rank + 1)).t()
    storage = module.wide.grad.data_ptr()
    with record_bytes() as ledger:
        all_reduce_gradients(module, group)
    assert module.wide.grad.data_ptr() == storage, "the gradient was replaced, not summed in place"
    return {
        "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
        "sent": ledger.by_collective("wire"),
        "forward": ledger.total(direction="forward"),
    }


def test_all_reduce_gradients_gives_every_rank_the_full_gradient() -> None:
    sp = 4
    results = on_ranks(reduced, sp=sp)
    for result in results:
        grads = result["gradients"]
        assert torch.equal(grads["first"], torch.full((5,), 10.0, dtype=torch.float64))
        assert torch.equal(grads["both"], torch.full((3,), 10.0, dtype=torch.float64))  # 1 + 2 + 3 + 4
        assert torch.equal(grads["wide"], 10 * torch.arange(12, dtype=torch.float64).view(4, 3).t())
        assert grads["never"] is None and grads["frozen"] is None
        together = 2 * (sp - 1) * 8 * (5 + 3 + 12) // sp
        assert (result["sent"], result["forward"]) == ({"all_reduce": together}, 0)


def in_buckets(group) -> list:
    """Two dtypes, one of them with more than a bucket holds."""
    sizes = [(torch.float32, 7), (torch.float32, 5), (torch.float64, 3), (torch.float64, 4 << 20), (torch.float64, 2)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for dtype, n in sizes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 10 * group.rank())
    with record_bytes() as ledger:
        all_reduce_gradients(nn.ParameterList(parameters), group)
    return [[parameter.grad.unique().tolist() for parameter in parameters], [e.paper_bytes for e in ledger.entries]]


def test_gradients_travel_in_buckets_of_one_dtype() -> None:
    for values, sent in on_ranks(in_buckets, sp=2):
        assert values == [[2.0 * number + 10] for number in range(5)]
        assert sent == [4 * (7 + 5), 8 * 3, 8 * (4 << 20), 8 * 2]


def unlike(rank: int) -> dict[str, nn.Module]:
    """Modules that differ between two ranks: in size, in order alone, in dtype alone, in what is frozen, in layout."""
    frozen = nn.Linear(4, 4)
    frozen.requires_grad_(rank == 0)
    sparse = nn.Embedding(4, 4, sparse=rank == 0)
    sparse(torch.tensor([1])).sum().backward()
    return {
        "elements": nn.Linear(4, 4 + rank),
        "checksum of names, shapes and dtypes": nn.ModuleList([nn.Linear(4, 6), nn.Linear(3, 8)][:: 1 - 2 * rank]),
        "dtypes": nn.Linear(4, 4, dtype=[torch.float32, torch.float64][rank]),
        "trainable parameters": frozen,
        "rank 0: the gradient of weight is sparse": sparse,
    }


def different_modules(group) -> dict[str, str]:
    return {
        name: raised(lambda module=module: all_reduce_gradients(module, group))
        for name, module in unlike(group.rank()).items()
    }


def test_all_reduce_gradients_refuses_different_modules() -> None:
    first, second = on_ranks(different_modules, sp=2)
    assert first == second
    for says, message in first.items():
        assert message.startswith("ValueError") and says in message, message


# --- agreement ---


def agreement(group) -> list[str]:
    rank, cpu = group.rank(), torch.device("cpu")
    found = []
    for signature, problem in [
        ({"length": 4}, None),
        ({"length": 4 + (rank == 2), "batch": 1}, None),
        ({"length": 4}, "too short" if rank == 1 else None),
        ({"length": rank}, "both" if rank in (0, 3) else None),
    ]:
        try:
            agree(signature, problem, group, cpu)
            found.append("agreed")
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_agree_or_all_raise_the_same_error() -> None:
    answers = on_ranks(agreement, sp=4)
    assert all(answer == answers[0] for answer in answers)
    agreed, differ, one, two = answers[0]
    assert agreed == "agreed"
    assert "length" in differ and "5 on rank 2" in differ and "batch" not in differ
    assert one == "rank 1: too short"
    assert two == "rank 0: both; rank 3: both"
