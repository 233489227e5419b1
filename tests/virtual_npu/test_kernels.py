"""PyTorch's ops on the NPU key against the CPU's, and what happens to ops that nobody has a kernel for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_npu
from hypothesis import given
from hypothesis import strategies as st

from npu_ops.virtual_npu.values import VALUES

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool]
shapes = st.lists(st.integers(0, 4), min_size=0, max_size=3).map(tuple)
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.eq, torch.lt, torch.atan2, torch.fmod, torch.logical_and]
UNARY = [
    torch.neg, torch.abs, torch.exp, torch.relu, torch.sigmoid, torch.isnan, torch.sign, torch.clone, torch.cos,
    torch.nn.functional.silu, torch.nn.functional.gelu,
]  # fmt: skip
REDUCTIONS = [torch.sum, torch.amax, torch.argmax, torch.any, torch.cumsum, torch.softmax, torch.sort, torch.logsumexp]


def make(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def same(call, *tensors, device):
    """The call gives the same on both devices: values, dtypes and strides, or the same kind of error."""
    try:
        wanted = call(*tensors)
    except (RuntimeError, IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            call(*(t.to(device) for t in tensors))
        return
    got = call(*(t.to(device) for t in tensors))
    if isinstance(wanted, torch.Tensor):
        wanted, got = [wanted], [got]
    for a, b in zip(wanted, got, strict=True):
        assert b.device.type == device
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(b.cpu(), a, rtol=0, atol=0, equal_nan=True)


@given(op=st.sampled_from(UNARY), shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_unary(device, op, shape, dtype, seed):
    same(op, make(shape, dtype, seed), device=device)


@given(op=st.sampled_from(BINARY), shape=shapes, keep=st.integers(0, 3), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_binary_with_broadcast(device, op, shape, keep, dtype, seed):
    same(op, make(shape, dtype, seed), make(shape[max(0, len(shape) - keep) :], dtype, seed + 1), device=device)


@given(
    op=st.sampled_from(REDUCTIONS), shape=shapes, dim=st.integers(-3, 2), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9)
)
def test_along_a_dim(device, op, shape, dim, dtype, seed):
    same(lambda x: op(x, dim), make(shape, dtype, seed), device=device)


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
    permutation=st.permutations(range(3)),
    start=st.integers(0, 4),
    step=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_views_stay_views(device, shape, permutation, start, step, seed):
    def write(x):
        base = x.clone()
        view = base.permute(permutation)[start::step]
        view += 1
        view.unsqueeze(0).squeeze(0).transpose(0, -1).mul_(2)
        view[..., :1].fill_(7)
        return base, view, view.contiguous(), view.reshape(-1), view.expand(2, *view.shape)

    same(write, make(shape, torch.float32, seed), device=device)


@given(rows=st.integers(1, 6), picks=st.lists(st.integers(-6, 5), max_size=6), seed=st.integers(0, 9), accumulate=st.booleans())
def test_indexing(device, rows, picks, seed, accumulate):
    index = torch.tensor(picks, dtype=torch.int64).clamp(-rows, rows - 1)

    def use(x, i):
        y = x.clone()
        y.index_put_((i,), torch.ones(len(i), 3, device=x.device), accumulate=accumulate)
        z = x.clone()
        z[i[:1]] = 5
        return x[i], y if accumulate else x, z, x.index_select(0, i % rows), torch.where(x > 0, x, -1.0), x[x > 0]

    same(use, make((rows, 3), torch.float32, seed), index, device=device)


def test_out_and_in_place(device):
    def use(a, b):
        kept, empty = torch.zeros_like(a), a.new_empty(0)
        torch.add(a, b, out=kept)
        torch.matmul(a, b.t(), out=empty)
        values, indices = a.new_empty(0), a.new_empty(0, dtype=torch.int64)
        torch.max(a, 1, out=(values, indices))
        part = torch.zeros(6, 4, device=a.device)
        torch.mul(a, b, out=part[::2])
        return kept, empty, values, indices, part, a.clone().add_(b).mul_(2).clamp_(min=0)

    same(use, make((3, 4), torch.float32, 0), make((3, 4), torch.float32, 1), device=device)


def test_families_that_vllms_runner_uses(device):
    def use(x, ids):
        weight = torch.nn.functional.embedding(ids, x)
        linear = torch.nn.functional.linear(weight, x)
        logprobs = linear.log_softmax(-1)
        top = logprobs.topk(3, -1)
        slots = torch.arange(6, device=x.device, dtype=torch.int32)
        table = torch.zeros(3, 8, dtype=torch.int32, device=x.device)
        table[1, 2:5] = slots[:3]
        table[:2].copy_(table[1:].clone())
        starts = torch.cumsum(torch.tensor([2, 1, 3], device=x.device), 0)
        where = torch.searchsorted(starts, torch.arange(6, device=x.device), right=True)
        scattered = torch.zeros(4, 8, device=x.device).scatter_(0, ids[None] % 4, weight[:1, :4].repeat(1, 2)[:, :4])
        masked = linear.masked_fill(linear > 0, float("-inf"))
        parts = torch.cat([torch.stack(x.chunk(2, -1)).flatten(0, 1), x[:, :4]], 0).split(3)
        return (
            linear, logprobs, *top, table, where, scattered, masked, *parts, x.repeat_interleave(2, 0), torch.bincount(ids),
            *torch.var_mean(x, -1), torch.einsum("ij,kj->ik", x, x), x.square().mean(-1, keepdim=True).rsqrt(), ids.unique(),
            x.diff(dim=0),
        )  # fmt: skip

    same(use, make((8, 8), torch.float32, 2), torch.tensor([1, 0, 7, 7]), device=device)


MODULES = {
    "conv": (torch.nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 8)),
    "batch_norm": (torch.nn.BatchNorm2d(3), (2, 3, 8, 8)),
    "group_norm": (torch.nn.GroupNorm(2, 4), (3, 4, 5)),
    "pool": (torch.nn.MaxPool2d(2), (1, 2, 6, 6)),
    "upsample": (torch.nn.Upsample(scale_factor=2), (1, 2, 3, 3)),
    "pad": (torch.nn.ReflectionPad1d(2), (2, 3, 5)),
    "glu": (torch.nn.GLU(), (3, 8)),
    "softmax": (torch.nn.LogSoftmax(0), (3, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_gradients(device, name):
    module, shape = MODULES[name]
    twin = copy.deepcopy(module).to(device)
    here, there = (make(shape, torch.float32, 4).to(d).requires_grad_() for d in ("cpu", device))
    wanted, got = module(here), twin(there)
    wanted.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(got.cpu(), wanted)
    torch.testing.assert_close(there.grad.cpu(), here.grad)


@pytest.mark.parametrize(
    "call",
    [
        torch.linalg.inv,  # torch_npu has no kernel for it and falls back to the CPU itself
        torch.linalg.svdvals,
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.histc(x, 4),
        lambda x: torch.zeros_like(x).scatter_reduce(0, (x > 0).long(), x, "sum"),
        lambda x: x.to(torch.float8_e4m3fn).float(),
        torch.vmap(torch.sin),
        torch.func.grad(lambda y: y.square().sum()),
        torch.compile(lambda x: x * 2 + 1, backend="eager"),
    ],
    ids=["inverse", "svd", "fft", "histogram", "scatter_reduce", "float8", "vmap", "grad", "dynamo"],
)
def test_rarer_families(device, call):
    same(call, make((4, 4), torch.float32, 5) + 4 * torch.eye(4), device=device)


BAND = torch.ones(5, 7, dtype=torch.bool).tril(2)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": BAND}], ids=["full", "causal", "mask"])
def test_scaled_dot_product_attention(device, options):
    q, k, v = (make((2, 4, rows, 16), torch.float32, seed) for seed, rows in enumerate((5, 7, 7)))
    there = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(q.to(device), k.to(device), v.to(device), **there).cpu(), attend(q, k, v, **options))


def test_scalars_and_questions(device):
    x = torch.tensor([1.5, -2.0], device=device)
    assert x.max().item() == 1.5
    assert torch.equal(x, x.clone())
    assert torch.allclose(x, x + 1e-9)
    assert bool((x > 0).any())
    assert [row.tolist() for row in x.nonzero()] == [[0], [1]]
    assert f"{x}".startswith("tensor([ 1.5000, -2.0000], device='npu:0')")
    assert torch.sum(x).cpu() == -0.5
    assert x.view(torch.int32).view(torch.float32).tolist() == x.tolist()
    assert torch.complex(x, x).abs().cpu().allclose(torch.complex(x.cpu(), x.cpu()).abs())


def test_foreach_and_nested_lists(device):
    tensors = [torch.ones(2, device=device), torch.full((3,), 2.0, device=device)]
    assert [t.tolist() for t in torch._foreach_add(tensors, 1.0)] == [[2, 2], [3, 3, 3]]
    torch._foreach_mul_(tensors, 3.0)
    assert [t.tolist() for t in tensors] == [[3, 3], [6, 6, 6]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (torch_npu.npu_gelu, "npu::npu_gelu"),
        (lambda x: torch_npu.npu_moe_gating_top_k_softmax(x, k=2), "npu::npu_moe_gating_top_k_softmax"),
        (lambda x: torch.ops.atb._npu_reshape_and_cache(x, x, x, x, x), "atb::_npu_reshape_and_cache"),
    ],
)
def test_an_op_that_is_not_known_is_named(device, call, name):
    with pytest.raises(NotImplementedError, match=f"{name}: the virtual NPU does not know what this op computes"):
        call(torch.ones(4, 4, device=device))


def test_an_operator_call_past_the_dispatcher_is_named(in_process):
    said = in_process(
        "import ctypes, npu_ops.virtual_npu as v\n"
        "library = ctypes.CDLL(v._enabled[0] + '/libascendcl.so')\n"
        "zero = (ctypes.c_uint64 * 2)()\n"
        "assert library.aclnnSiluGetWorkspaceSize(None, None, zero) != 0\n"
        "library.aclGetRecentErrMsg.restype = ctypes.c_char_p\n"
        "raise SystemExit(library.aclGetRecentErrMsg().decode())",
        check=False,
    )
    assert "the virtual NPU does not compute aclnnSiluGetWorkspaceSize, which torch_npu calls past PyTorch's dispatcher" in said


def test_ops_of_ours_are_known():
    for name in ("npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_attention_update",
                 "npu_scatter_pa_kv_cache", "npu_gather_pa_kv_cache", "npu_fused_infer_attention_score_v2"):  # fmt: skip
        assert f"npu::{name}" in VALUES


def test_device_kinds_do_not_mix_silently(device):
    here, there = torch.ones(3), torch.ones(3, device=device)
    for call in (lambda: there + here, lambda: torch.cat([there, here]), lambda: here.add_(there), lambda: there @ here):
        with pytest.raises(RuntimeError):
            call()
    assert (there + torch.tensor(2.0)).tolist() == [3, 3, 3]  # a number in a tensor goes everywhere
    assert there[torch.tensor([0, 2])].tolist() == [1, 1]
