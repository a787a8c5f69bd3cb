"""The NPU kernel's call, made to an operator that has the real one's schema and enforces its documented limits.

The operator's arithmetic here is a float64 reference on the CPU, which autograd differentiates; on an NPU the operator
brings its own gradient.
"""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from test_kernels import definition, run, tensors, worst
from torch import Tensor

from laga_core import kernels
from laga_core.kernels import attention, choose, npu

# As in torch_npu 2.13.0, npu_native_functions_by_codegen.yaml.
SCHEMA = (
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, "
    "Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
_library = torch.library.Library("npu", "FRAGMENT")  # keeps the operator registered while the module lives
calls: list[dict[str, object]] = []


def reference(query, key, value, head_num, input_layout, *rest, **options):
    names = ["pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise"]
    names += ["prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"]
    given = dict(zip(names, rest, strict=False)) | options
    calls.append(given)
    mask, scale = given.get("atten_mask"), given.get("scale", 1.0)
    batch, s_q, heads, dim = query.shape
    s_k, kv_heads = key.shape[1:3]
    dim_v = value.shape[-1]
    assert input_layout == "BSND" and head_num == heads
    assert query.dtype == key.dtype == value.dtype and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    assert key.shape == (batch, s_k, kv_heads, dim) and value.shape[:3] == key.shape[:3]
    assert 1 <= dim_v <= dim <= 768 and heads <= 256 and heads % kv_heads == 0
    assert given.get("keep_prob", 1.0) == 1.0
    for unused in ("pse", "padding_mask", "prefix", "actual_seq_qlen", "actual_seq_kvlen"):
        assert given.get(unused) is None
    hidden = torch.zeros(s_q, s_k, dtype=torch.bool)
    if mask is not None:  # without one sparse_mode is ignored: everything is seen
        assert given["sparse_mode"] == 3 and mask.dtype == torch.bool and mask.shape == (2048, 2048)
        assert torch.equal(mask, torch.ones(2048, 2048).triu(1).bool())
        hidden = torch.ones(s_q, s_k).triu(s_k - s_q + 1).bool()  # aligned at the lower right corner
    q, k, v = (x.double().repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key, value))
    scores = (torch.einsum("bihd,bjhd->bhij", q, k) * scale).masked_fill(hidden, float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).to(query.dtype)
    statistic = torch.empty(batch, heads, s_q, 8)
    return out, statistic, statistic, torch.empty(0), 0, 0, 0


_library.define(SCHEMA)
_library.impl("npu_fusion_attention", reference, "CompositeImplicitAutograd")


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    module = types.ModuleType("torch_npu")
    module.npu_fusion_attention = torch.ops.npu.npu_fusion_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(npu, "DEVICE", "cpu")
    calls.clear()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(1, 9, 9, 2, 2, 192, 128), (2, 5, 12, 4, 4, 12, 8), (2, 6, 6, 4, 1, 12, 8), (1, 7, 9, 3, 1, 16, 16)],
    ids=str,
)
def test_equal_to_the_definition(shape, causal):
    q, k, v, dout = tensors(shape, torch.float32)
    got = run(lambda *x: attention(*x, scale=0.2, causal=causal, kernel="npu"), q, k, v, dout)
    want = run(lambda *x: definition(*x, 0.2, causal), *(x.double() for x in (q, k, v, dout)))
    assert worst(got, want) < 1e-5
    assert len(calls) == 1
    assert (calls[0].get("atten_mask") is not None) == causal


def test_half_precision_passes_through():
    q, k, v, dout = tensors((1, 9, 9, 2, 2, 192, 128), torch.bfloat16)
    out, *grads = run(lambda *x: attention(*x, scale=0.2, causal=True, kernel="npu"), q, k, v, dout)
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
    assert out.shape == (1, 9, 2, 128)


def test_the_mask_is_made_once():
    q, k, v, _ = tensors((1, 9, 9, 2, 2, 8, 8), torch.float32)
    for _ in range(2):
        attention(q, k, v, scale=0.2, causal=True, kernel="npu")
    assert calls[0]["atten_mask"].data_ptr() == calls[1]["atten_mask"].data_ptr()  # type: ignore[attr-defined]


def zeros(dim: int, dim_v: int, heads: int = 2, kv_heads: int = 2, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    return [torch.zeros(1, 4, *size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize(
    "qkv, words",
    [
        (zeros(576, 512, kv_heads=1), "576/512"),
        (zeros(8, 16), "must not exceed"),
        (zeros(8, 8, dtype=torch.float64), "float64"),
        (zeros(8, 8, heads=257, kv_heads=1), "256 heads"),
    ],
    ids=["absorbed", "value wider than key", "float64", "heads"],
)
def test_what_it_cannot_do_is_refused_and_auto_takes_tiled(qkv, words):
    with pytest.raises(ValueError, match=words):
        attention(*qkv, scale=1.0, causal=True, kernel="npu")
    assert not calls
    choice = choose(*qkv, causal=True)
    assert choice.kernel == "tiled" and words.split()[-1] in choice.reason
    attention(*qkv, scale=1.0, causal=True, kernel="auto")


def test_auto_takes_the_operator_for_unpadded_mla():
    said: list[str] = []
    attention(*zeros(192, 128), scale=1.0, causal=True, kernel="auto", explain=said.append)
    assert len(calls) == 1
    assert said == ["attention kernel: npu (the NPU's fused attention takes 192/128)"]


def test_refused_off_the_device(monkeypatch):
    monkeypatch.setattr(npu, "DEVICE", "npu")
    with pytest.raises(ValueError, match="not on an Ascend NPU; use kernel='tiled'"):
        attention(*zeros(8, 8), scale=1.0, causal=True, kernel="npu")


def test_importing_the_package_does_not_import_torch_npu():
    code = "import sys, laga_core.kernels; sys.exit('torch_npu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_a_wrong_keyword_would_fail():
    q, k, v = zeros(8, 8)
    with pytest.raises(RuntimeError, match="pre_tokens"):
        torch.ops.npu.npu_fusion_attention(q, k, v, head_num=2, input_layout="BSND", pre_tokens=1)
    assert "npu" in kernels.KERNELS
