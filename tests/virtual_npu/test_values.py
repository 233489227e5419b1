"""npu:: ops: what they compute, that results have the shapes that torch_npu's own meta functions promise, and the records."""

from __future__ import annotations

import math

import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from npu_ops import fused_infer_attention as fia
from npu_ops import virtual_npu
from npu_ops.reference import fused_infer_attention as reference
from npu_ops.virtual_npu.recording import AclTensor

T, N, KN, D = 6, 4, 2, 128


def rand(device, *shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def ints(device, values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def mask(device):
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1).to(device)


def attention(device, layout="TND", **changes):
    options = {"num_query_heads": N, "num_key_value_heads": KN, "softmax_scale": 0.1, "input_layout": layout}
    return options | {"return_softmax_lse": True} | changes


def paged(device):
    """Caches [blocks, 128, KN * D] of requests with 3 and 130 keys."""
    return {
        "key": rand(device, 4, 128, KN * D),
        "value": rand(device, 4, 128, KN * D, seed=1),
        "block_table": ints(device, [[3, 0], [1, 2]]),
        "block_size": 128,
        "actual_seq_kvlen": [3, 130],
    }


def calls(device):
    x, rope = rand(device, T, 256), rand(device, 1, T, N, 64)
    cos = rand(device, 1, T, 1, 64)
    rows, cache = rand(device, T, KN, D), rand(device, 2, 128, KN, D)
    packed = {"key": rand(device, 9, KN, D), "value": rand(device, 9, KN, D, seed=1), "actual_seq_kvlen": [3, 9]}
    ends = {"actual_seq_qlen": [2, T]}
    causal = {"atten_mask": mask(device), "sparse_mode": 3}
    v2 = torch_npu.npu_fused_infer_attention_score_v2
    latent = rand(device, 4, 1, 128, 512)
    mla = {**paged(device), "key": latent, "value": latent, "key_rope": rand(device, 4, 1, 128, 64)}
    one = {**attention(device), "num_key_value_heads": 1}
    decode = {**paged(device), "query": rand(device, 2, 1, N, D)}
    return {
        "rms_norm": (torch_npu.npu_rms_norm, (x, rand(device, 256), 1e-6), {}),
        "rms_norm_2d": (torch_npu.npu_rms_norm, (rand(device, T, 4, 8), rand(device, 4, 8), 1e-6), {}),
        "add_rms_norm": (torch_npu.npu_add_rms_norm, (x, rand(device, T, 256, seed=1), rand(device, 256), 1e-5), {}),
        "swiglu": (torch_npu.npu_swiglu, (x,), {}),
        "swiglu_dim": (torch_npu.npu_swiglu, (rand(device, 2, 8, 4),), {"dim": 1}),
        "rotary": (torch_npu.npu_rotary_mul, (rope, cos, cos), {}),
        "rotary_interleave": (torch_npu.npu_rotary_mul, (rope, cos, cos, "interleave"), {}),
        "update": (torch_npu.npu_attention_update,
                   ([rand(device, T, dtype=torch.float32, seed=i) for i in (0, 1)],
                    [rand(device, T, 64, seed=i) for i in (0, 1)], 1), {}),
        "gather": (torch_npu.npu_gather_pa_kv_cache,
                   (cache, cache.clone(), ints(device, [[1], [0]]), ints(device, [2, 4]), rows, rows.clone()), {}),
        "scatter": (torch_npu.npu_scatter_pa_kv_cache,
                    (rows, rows, cache, cache.clone(), ints(device, [0, 200, 7, 8, 9, 255])), {"cache_mode": "Norm"}),
        "fia_packed": (v2, (rand(device, T, N, D),), {**packed, **ends, **attention(device)}),
        "fia_causal": (v2, (rand(device, T, N, D),), {**packed, **ends, **causal, **attention(device)}),
        "fia_no_lse": (v2, (rand(device, T, N, D),), {**packed, **ends, **attention(device, return_softmax_lse=False)}),
        "fia_paged": (v2, (rand(device, T, N, D),), {**paged(device), **ends, **causal, **attention(device)}),
        "fia_bsnd": (v2, (), {**decode, **attention(device, "BSND")}),
        "fia_bnsd": (v2, (), {**decode, "query": rand(device, 2, N, 1, D), **attention(device, "BNSD")}),
        "fia_bsh": (v2, (), {**decode, "query": rand(device, 2, 1, N * D), **attention(device, "BSH")}),
        "fia_latent": (v2, (rand(device, T, N, 512),), {**mla, **ends, **causal, "query_rope": rand(device, T, N, 64), **one}),
        "fia_latent_bnsd": (v2, (rand(device, 2, N, 1, 512),),
                            {**mla, "query_rope": rand(device, 2, N, 1, 64), **one, "input_layout": "BNSD"}),
        "fia_v1": (torch_npu.npu_fused_infer_attention_score, (rand(device, T, N, D),),
                   {"key": packed["key"], "value": packed["value"], "actual_seq_lengths": [2, T],
                    "actual_seq_lengths_kv": [3, 9], "num_heads": N, "num_key_value_heads": KN, "scale": 0.1,
                    "input_layout": "TND", "softmax_lse_flag": True}),
    }  # fmt: skip


NAMES = list(calls("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_those_of_torch_npus_meta_functions(device, name):
    function, args, kwargs = calls(device)[name]
    with FakeTensorMode() as mode:
        fake_args, fake_kwargs = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        promised = function(*fake_args, **fake_kwargs)
    got = function(*args, **kwargs)
    promised, got = ([(tuple(x.shape), x.dtype) for x in tree_flatten(r)[0] if x is not None] for r in (promised, got))
    assert promised == got


@pytest.mark.parametrize("name", NAMES)
def test_torch_npus_host_code_accepts_and_is_recorded(device, name):
    function, args, kwargs = calls(device)[name]
    before = function(*args, **kwargs)
    with virtual_npu.record() as records:
        after = function(*args, **kwargs)
    assert records
    assert all(record.source.startswith("npu::") for record in records)
    assert records[-1].op.startswith("aclnn")
    # Recording changes no value.
    for a, b in zip(tree_flatten(before)[0], tree_flatten(after)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_record_has_every_argument(device):
    function, args, kwargs = calls(device)["fia_paged"]
    with virtual_npu.record() as records:
        function(*args, **kwargs)
        torch.ones(2, device=device) + 1
    (record,) = records
    assert record.op.startswith("aclnnFusedInferAttentionScoreV")
    assert record.source == "npu::npu_fused_infer_attention_score_v2"
    tensors = [a for a in record.arguments if isinstance(a, AclTensor)]
    assert tensors[0] == AclTensor((T, N, D), "bfloat16", "NCL", (N * D, D, 1), 0, (T * N * D,))
    assert AclTensor((2, 2), "int32", "ND", (2, 1), 0, (4,)) in tensors
    assert (2, T) in record.arguments
    assert (3, 130) in record.arguments
    assert "TND" in record.arguments
    assert record.floats == (0.1,)
    assert next(a for a in record.arguments if a in (N, 128)) == N
    again = [virtual_npu.record() for _ in range(2)]
    results = []
    for block in again:
        with block as records:
            function(*args, **kwargs)
        results.append(records)
    assert results[0] == results[1] == [record]


def test_aten_calls_are_recorded_on_request(device):
    x = torch.ones(2, 3, device=device)
    with virtual_npu.record(aten=True) as records:
        y = torch.add(x, x, alpha=2)
        z = x @ y.t()
    assert records[0].source == "aten::add"
    assert "aclnnAdd" in records[0].op
    assert {record.source for record in records} >= {"aten::add", "aten::matmul"}
    assert z.tolist() == [[9, 9], [9, 9]]


def test_recordings_do_not_nest():
    with virtual_npu.record(), pytest.raises(RuntimeError, match="a recording is going on already"), virtual_npu.record():
        pass


def test_the_hosts_checks_apply_while_recording(device):
    x = rand(device, T, N, D)
    with virtual_npu.record(), pytest.raises(RuntimeError):
        torch_npu.npu_fused_infer_attention_score_v2(x, x, x, **attention(device, "XYZ"))


BATCHES = {  # (query rows, keys) of each request
    "prefill": [(5, 5), (130, 130), (1, 1)],
    "chunk": [(7, 200), (128, 300)],
    "decode": [(1, 1), (1, 129), (1, 256)],
    "mixed": [(1, 90), (17, 40), (0, 0), (3, 128)],
    "unseen": [(9, 4), (2, 2)],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sink", [False, True])
def test_our_mapping_through_cann_equals_the_reference(device, name, dtype, window, sink):
    """16-bit types at Ascend's block size of 128: the calls that npu_ops.ascend makes of torch_npu."""
    batch = BATCHES[name]
    qlens, klens = [q for q, _ in batch], [k for _, k in batch]
    ends = torch.tensor(qlens).cumsum(0).tolist()
    query = rand(device, ends[-1] + 3, N, 64, dtype=dtype)
    caches = [rand(device, 12, 128, KN, 64, dtype=dtype, seed=s) for s in (1, 2)]
    table = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i))[:3] for i in range(len(batch))])
    options = {
        "actual_seq_qlen": ends, "actual_seq_kvlen": klens, "num_query_heads": N, "num_key_value_heads": KN,
        "softmax_scale": 0.125, "block_size": 128, "sparse_mode": 3 if window is None else 4, "return_softmax_lse": True,
    } | ({} if window is None else {"pre_tokens": window, "next_tokens": 0})  # fmt: skip
    tensors = {
        "query_start_loc": torch.tensor([0, *ends], dtype=torch.int32), "seq_lens": torch.tensor(klens, dtype=torch.int32),
        "block_table": table.int(), "learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0]) if sink else None,
    }  # fmt: skip
    there = {key: x if x is None else x.to(device) for key, x in tensors.items()}
    out, lse = fia.fused_infer_attention(query, *caches, **options, **there)
    wanted, wanted_lse = reference.fused_infer_attention(*(x.float().cpu() for x in (query, *caches)), **options, **tensors)
    torch.testing.assert_close(out.float().cpu(), wanted, atol=4e-3, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), wanted_lse, atol=1e-3, rtol=1e-3)


def test_rope_parts_and_narrow_values(device):
    """FIA with the rope part of its own equals one call on whole heads."""
    nope, rope, value = rand(device, T, N, 128), rand(device, T, N, 64, seed=3), rand(device, T, N, 128, seed=5)
    options = attention(device, num_key_value_heads=N, actual_seq_qlen=[T], actual_seq_kvlen=[T])
    v2 = torch_npu.npu_fused_infer_attention_score_v2
    split, lse = v2(nope, nope, value, query_rope=rope, key_rope=rope, **options)
    whole = torch.cat((nope, rope), -1).float().cpu().transpose(0, 1)
    scores = whole @ whole.transpose(1, 2) * 0.1
    torch.testing.assert_close(lse[..., 0].cpu(), scores.logsumexp(-1).t(), atol=1e-3, rtol=1e-3)
    wanted = (scores.softmax(-1) @ value.float().cpu().transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(split.float().cpu(), wanted, atol=4e-3, rtol=2e-2)


def test_rows_that_cann_leaves_open_are_no_numbers(device):
    function, _, kwargs = calls(device)["fia_causal"]
    kwargs = {**kwargs, "actual_seq_kvlen": [1, 9]}
    out, lse = function(rand(device, T, N, D), **kwargs)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    out, lse = function(rand(device, T, N, D), **kwargs, inner_precise=2)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fia_packed", {"pse_shift": 1}, "does not compute with pse_shift"),
        ("fia_packed", {"learnable_sink": None, "quant_scale_out": 1}, "does not compute with quant_scale_out"),
        ("scatter", {"cache_mode": "PA_NZ"}, "knows cache_mode 'Norm'"),
    ],
)
def test_what_is_not_computed_is_refused(device, name, changes, message):
    function, args, kwargs = calls(device)[name]
    changes = {key: rand(device, 2, 2) if value == 1 else value for key, value in changes.items()}
    with pytest.raises((NotImplementedError, ValueError), match=message):
        function(*args, **{**kwargs, **changes})


def test_slots_outside_of_the_cache_are_refused(device):
    function, args, kwargs = calls(device)["scatter"]
    with pytest.raises(ValueError, match=r"CANN requires slots in \[0, blocks \* block_size\), got -1"):
        function(*args[:4], ints(device, [0, 200, 7, 8, 9, -1]), **kwargs)
