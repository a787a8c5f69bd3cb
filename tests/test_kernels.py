"""Attention kernels against attention written as its definition, in float64."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from laga_core import kernels
from laga_core.kernels import attention, choose, products, sdpa, tiled

KERNELS = ["eager", "tiled", "sdpa", "auto"]
# batch, s_q, s_k, heads, kv_heads, dim, dim_v
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (2, 7, 7, 3, 3, 6, 4),
    (2, 5, 19, 4, 1, 6, 5),
    (1, 130, 257, 2, 2, 12, 8),
    (2, 129, 129, 5, 1, 9, 8),
    (1, 20, 20, 16, 1, 72, 64),
]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def definition(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention row by row, in the dtype given."""
    rows = []
    s_q, s_k = q.shape[1], k.shape[1]
    for i in range(s_q):
        seen = i + s_k - s_q + 1 if causal else s_k
        scores = (q[:, i, None] * k[:, :seen]).sum(-1) * scale  # [batch, seen, heads]
        weights = (scores - scores.amax(1, keepdim=True).detach()).exp()
        weights = weights / weights.sum(1, keepdim=True)
        rows.append((weights.unsqueeze(-1) * v[:, :seen]).sum(1))
    return torch.stack(rows, dim=1)


def tensors(shape: tuple[int, ...], dtype: torch.dtype, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, s_q, s_k, heads, kv_heads, dim, dim_v = shape
    sizes = [(s_q, heads, dim), (s_k, kv_heads, dim), (s_k, kv_heads, dim_v), (s_q, heads, dim_v)]
    generator = torch.Generator().manual_seed(sum(shape))
    q, k, v, dout = (torch.randn(batch, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return tuple(x.to(dtype) for x in (q * spread, k, v, dout))  # type: ignore[return-value]


def run(function, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Output and the three gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    """Largest difference, relative to the largest entry of each tensor (a gradient that is zero: of all)."""
    top = max(b.abs().max() for b in want).item()
    sizes = [size if (size := b.abs().max().item()) > 1e-9 * top else top for b in want]
    return max((a.double() - b).abs().max().item() / size for a, b, size in zip(got, want, sizes, strict=True))


def difference(kernel: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool, spread: float = 1.0) -> float:
    q, k, v, dout = tensors(shape, dtype, spread)
    scale = shape[5] ** -0.5
    got = run(lambda *x: attention(*x, scale=scale, causal=causal, kernel=kernel), q, k, v, dout)
    want = run(lambda *x: definition(*x, scale, causal), *(x.double() for x in (q, k, v, dout)))
    assert all(x.dtype == dtype for x in got)
    return worst(got, want)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of a few rows and keys, so that short sequences cross many of them."""
    for name in ("_TILE_MKL", "_TILE_ONEDNN", "_TILE_ACCELERATOR"):
        monkeypatch.setattr(tiled, name, 128)
    monkeypatch.setattr(tiled, "_ROWS", 8)
    monkeypatch.setattr(tiled, "_KEYS", 8)
    monkeypatch.setattr(tiled, "_DIAGONAL", 4)
    monkeypatch.setattr(tiled, "_DIAGONAL_MKL", 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_equal_to_the_definition_in_float64(kernel, shape, causal):
    assert difference(kernel, shape, torch.float64, causal) < 1e-12


@pytest.fixture(params=[(True, True), (False, True), (False, False)], ids=["half and AVX-512", "AVX-512", "neither"])
def half_precision(request, monkeypatch):
    """As on CPUs with and without instructions for half precision and AVX-512: oneDNN multiplies, or MKL."""
    half, avx512 = request.param
    monkeypatch.setattr(products, "has_instructions", lambda dtype: half)
    monkeypatch.setattr(tiled, "_AVX512", avx512)


@pytest.mark.usefixtures("half_precision")
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_tiled_in_lower_precision(shape, dtype, limit):
    for causal in (True, False):
        assert difference("tiled", shape, dtype, causal) < limit


@pytest.mark.usefixtures("half_precision")
def test_tiled_does_not_suffer_from_large_scores():
    # Scores of about 30: rounded to bfloat16 as they are, each would be off by 0.1 and each probability by a tenth.
    shape = (1, 200, 200, 2, 2, 64, 32)
    ours = difference("tiled", shape, torch.bfloat16, True, spread=10.0)
    assert ours < 2e-2
    assert ours < difference("eager", shape, torch.bfloat16, True, spread=10.0) / 2


@pytest.mark.parametrize(("score", "limit"), [(1e2, 2e-5), (1e4, 2e-3), (1e9, math.inf)])
def test_probabilities_stay_probabilities_however_large_the_scores(score, limit):
    """All scores equal: every probability is one over the keys seen. Backward has them from two large numbers."""
    q, k = torch.full((1, 40, 2, 1), score, requires_grad=True), torch.ones(1, 40, 2, 1, requires_grad=True)
    v = torch.randn(1, 40, 2, 6, requires_grad=True)
    out = attention(q, k, v, scale=1.0, causal=True, kernel="tiled")
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    seen = torch.arange(1, 41)
    want = (1 / seen).flip(0).cumsum(0).flip(0)[:, None, None].expand(40, 2, 6)
    assert dq.isfinite().all() and dk.isfinite().all()
    assert (dv[0] <= seen.flip(0)[:, None, None]).all()  # no query gives a key more than 1
    assert ((dv[0] - want).abs() <= limit * want).all()


sizes = st.integers(1, 40)


@pytest.mark.usefixtures("small_tiles")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_tiled_for_any_shape(data):
    causal = data.draw(st.booleans())
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    s_q = data.draw(sizes)
    s_k = s_q + data.draw(st.integers(0, 30)) if causal else data.draw(sizes)
    kv_heads = data.draw(st.sampled_from([1, heads]))
    shape = (batch, s_q, s_k, heads, kv_heads, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12)))
    assert difference("tiled", shape, torch.float64, causal) < 1e-11


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("s_q, s_k", [(7, 8), (8, 8), (9, 9), (16, 17), (3, 20), (4, 12), (15, 32)])
def test_tiled_at_the_borders_of_tiles(s_q, s_k):
    for kv_heads in (1, 4):
        assert difference("tiled", (2, s_q, s_k, 4, kv_heads, 6, 5), torch.float64, True) < 1e-12


def test_tiled_gradcheck():
    q, k, v, _ = (x.requires_grad_() for x in tensors((1, 4, 6, 2, 1, 3, 2), torch.float64))
    for causal in (True, False):
        assert torch.autograd.gradcheck(lambda *x: tiled.attend(*x, scale=0.7, causal=causal), (q, k, v))  # noqa: B023


def test_value_may_be_a_view_of_the_key():
    # Absorbed MLA: the value is the first columns of the one shared key, and the gradient of both is the key's.
    q, k, _, _ = tensors((2, 9, 9, 4, 1, 12, 8), torch.float64)
    dout = torch.randn(2, 9, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradients(attend):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        out = attend(leaves[0], leaves[1], leaves[1][..., :8])
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    got = gradients(lambda *x: tiled.attend(*x, scale=0.3, causal=True))
    assert worst(got, gradients(lambda *x: definition(*x, 0.3, True))) < 1e-12


def test_inputs_need_not_be_contiguous():
    q, k, v, dout = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors((2, 33, 50, 4, 4, 6, 5), torch.float64)
    )
    got = run(lambda *x: tiled.attend(*x, scale=0.4, causal=True), q, k, v, dout)
    assert worst(got, run(lambda *x: definition(*x, 0.4, True), q, k, v, dout)) < 1e-12


def test_backward_needs_row_sums_and_no_output():
    q, k, v, dout = tensors((1, 20, 30, 3, 3, 6, 5), torch.float64)
    out, lse = tiled.forward(q, k, v, 0.4, True)
    want = run(lambda *x: definition(*x, 0.4, True), q, k, v, dout)
    got = [out, *tiled.backward(dout, q, k, v, (out * dout).sum(-1), lse, 0.4, True)]
    assert worst(got, want) < 1e-12
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * 0.4
    scores.masked_fill_(torch.ones(20, 30).triu(11).bool()[:, None], -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1) / math.log(2))


def test_only_inputs_output_and_log_sum_exp_are_saved():
    q, k, v, _ = (x.requires_grad_() for x in tensors((1, 64, 64, 2, 2, 8, 4), torch.float32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = tiled.attend(q, k, v, scale=1.0, causal=True)
    assert [x.shape for x in saved] == [q.shape, k.shape, v.shape, out.shape, (1, 64, 2)]


def peak_extra_bytes(seq: int, kernel: str) -> int:
    """Most bytes held at once by forward and backward above the inputs, from the allocator's own events."""
    leaves = [x.requires_grad_() for x in tensors((1, seq, seq, 2, 2, 24, 16), torch.float32)[:3]]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = attention(*leaves, scale=0.2, causal=True, kernel=kernel)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    events = profile.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_memory_grows_with_the_sequence_not_its_square(monkeypatch):
    for name in ("_TILE_MKL", "_TILE_ONEDNN"):
        monkeypatch.setattr(tiled, name, 1 << 12)
    monkeypatch.setattr(tiled, "_KEYS", 64)
    short, long = peak_extra_bytes(256, "tiled"), peak_extra_bytes(1024, "tiled")
    assert long < 4.2 * short
    assert peak_extra_bytes(1024, "eager") > 10 * long


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_runs_on_fake_tensors(dtype):
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, 1500, h, d, dtype=dtype, requires_grad=True) for h, d in ((4, 576), (1, 576), (1, 512))
        )
        out = tiled.attend(q, k, v, scale=0.1, causal=True)
        out.backward(torch.empty_like(out))
    assert out.shape == (1, 1500, 4, 512)
    assert k.grad is not None and k.grad.shape == k.shape and k.grad.dtype == dtype


def test_autocast_changes_nothing():
    q, k, v, dout = tensors((1, 20, 20, 2, 2, 6, 5), torch.float32)
    plain = run(lambda *x: tiled.attend(*x, scale=0.4, causal=True), q, k, v, dout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(lambda *x: tiled.attend(*x, scale=0.4, causal=True), q, k, v, dout)
    assert worst(cast, plain) == 0


def test_deterministic():
    q, k, v, dout = tensors((1, 300, 300, 2, 2, 24, 16), torch.bfloat16)
    once, again = (run(lambda *x: tiled.attend(*x, scale=0.2, causal=True), q, k, v, dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("kernel", ["tiled", "sdpa", "auto"])
def test_parts_are_summed(kernel):
    q, k, v, dout = tensors((1, 12, 12, 2, 1, 10, 6), torch.float64)
    options = {"scale": 0.4, "causal": True, "kernel": kernel}
    parts = run(lambda q, k, v: attention(q.split([7, 3], -1), k.split([7, 3], -1), v, **options), q, k, v, dout)
    assert worst(parts, run(lambda *x: definition(*x, 0.4, True), q, k, v, dout)) < 1e-12


def test_auto_says_what_it_chose_and_why(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_said", set())
    q, k, v, _ = tensors((1, 8, 8, 2, 2, 6, 4), torch.float32)
    said: list[str] = []
    with caplog.at_level(logging.INFO, logger="laga_core.kernels"):
        for _ in range(2):
            attention(q, k, v, scale=1.0, causal=True, kernel="auto", explain=said.append)
    choice = choose(q, k, v, causal=True)
    assert choice.kernel == "tiled"
    assert len(said) == 2 and choice.reason in said[0]
    assert [record.getMessage() for record in caplog.records] == said[:1]  # logged once


def test_auto_on_a_device_leaves_pytorch_what_it_has_a_fused_kernel_for(monkeypatch):
    mla, square = tensors((1, 8, 8, 2, 2, 6, 4), torch.float32), tensors((1, 8, 8, 2, 2, 4, 4), torch.float32)
    assert sdpa.fused_backend(*mla[:3], causal=True) is None  # on a CPU, where the head sizes differ
    assert sdpa.fused_backend(*square[:3], causal=True) == "flash_attention"
    assert sdpa.fused_backend(*square[:3], causal=False) == "flash_attention"
    device = [x.to("meta") for x in mla[:3]]
    assert choose(*device, causal=True).kernel == "tiled"
    monkeypatch.setattr(sdpa, "fused_backend", lambda *x, causal: "cudnn_attention")
    assert choose(*device, causal=True) == ("sdpa", "PyTorch's cudnn_attention kernel takes head sizes 6/4 on meta")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "change, words",
    [
        ({"k": (1, 8, 2, 5)}, "fit together"),
        ({"v": (1, 7, 2, 4)}, "fit together"),
        ({"q": (2, 8, 2, 6)}, "fit together"),
        ({"q": (1, 8, 4, 6)}, "4 heads or 1"),
        ({"q": (8, 2, 6)}, "four dimensions"),
        ({"q": (1, 9, 2, 6)}, "at least as many keys"),
        ({"v": (1, 8, 2, 0)}, "empty"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(kernel, change, words):
    shapes = {"q": (1, 8, 2, 6), "k": (1, 8, 2, 6), "v": (1, 8, 2, 4), **change}
    q, k, v = (torch.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, scale=1.0, causal=True, kernel=kernel)


def test_mixed_dtypes_and_unknown_kernels():
    q = torch.zeros(1, 8, 2, 6)
    with pytest.raises(ValueError, match=r"dtypes .* differ"):
        attention(q, q.double(), q, scale=1.0, causal=True, kernel="tiled")
    with pytest.raises(ValueError, match="known: eager, tiled"):
        attention(q, q, q, scale=1.0, causal=True, kernel="flash")


def test_second_derivatives_are_refused():
    q, k, v, _ = (x.requires_grad_() for x in tensors((1, 4, 4, 1, 1, 3, 2), torch.float64))
    out = tiled.attend(q, k, v, scale=1.0, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


# --- products in half precision


@pytest.fixture
def widened(monkeypatch):
    """Every product is taken for one that this CPU has no instructions for."""
    monkeypatch.setattr(products, "slow", lambda x: True)


PAIRS = [((5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3)), ((2, 3, 5, 7), (2, 3, 7, 4))]


def pair(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("shapes", PAIRS, ids=str)
def test_widened_products_in_float64(shapes):
    a, b = pair(shapes, torch.float64)
    torch.testing.assert_close(products.matmul(a, b), a @ b)
    assert torch.autograd.gradcheck(products.matmul, (a, b))
    # Operands that are views, as the forms hand them over.
    x, y = pair([(*shapes[0][:-2], *shapes[0][:-3:-1]), shapes[1]], torch.float64)
    assert torch.autograd.gradcheck(lambda x, y: products.matmul(x.mT, y), (x, y))


@pytest.mark.usefixtures("widened")
def test_a_widened_linear_layer_in_float64():
    x, weight = pair([(2, 3, 5), (4, 5)], torch.float64)
    torch.testing.assert_close(products.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.autograd.gradcheck(products.linear, (x, weight))


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_widened_product_is_rounded_once_and_keeps_nothing_wide(dtype, step):
    x, weight = pair([(2, 30, 400), (50, 400)], dtype)
    dout = pair([(2, 30, 50)], dtype)[0].detach()
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        out = products.linear(x, weight)
    got = [out, *torch.autograd.grad(out, (x, weight), dout)]
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = torch.nn.functional.linear(*exact)
    for one, true in zip(got, [want, *torch.autograd.grad(want, exact, dout.double())], strict=True):
        assert one.dtype == dtype
        assert ((one.double() - true).abs() <= step * true.abs() + 1e-4).all()
    assert {t.dtype for t in saved} == {dtype}


def test_products_are_pytorchs_own_where_they_are_quick(monkeypatch):
    monkeypatch.setattr(products, "has_instructions", lambda dtype: dtype == torch.float16)
    asked = {dtype: products.slow(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)}
    assert asked == {torch.bfloat16: True, torch.float16: False}
    assert not products.slow(torch.zeros(1)) and not products.slow(torch.zeros(1).double())
    assert not products.slow(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
    x, weight = pair([(3, 5), (4, 5)], torch.float16)
    assert "Widened" not in products.linear(x, weight).grad_fn.name()
