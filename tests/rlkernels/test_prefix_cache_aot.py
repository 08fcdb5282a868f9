"""The Triton kernels of paged attention compile for GPUs that are not here."""

import importlib.util

import pytest
from aot_kernels import ATTEND, FLOATS, PAGED, STRIDES, UNIT, WRITE_STRIDES, WRITE_UNITS
from support import lacks
from triton_aot import Kernel, compile_for


def attend(dim, block_m, block_n, dtype="*bf16", warps=4, stages=3, **settings):
    tile = {"DIM": dim, "BLOCK_D": 1 << (dim - 1).bit_length(), "BLOCK_M": block_m, "BLOCK_N": block_n}
    constexprs = {"CAUSAL": True, "GROUP": 6, "BLOCK_SIZE": 16, "UPCAST": False, **tile, **UNIT, **settings}
    signature = ATTEND | dict.fromkeys(FLOATS, dtype)
    aligned = [name for name in signature if signature[name].startswith("*") or name in STRIDES]
    return Kernel(f"{PAGED}_attend_kernel", signature, constexprs, aligned, ["sources", "part_rows", "table_width"],
                  num_warps=warps, num_stages=stages)  # fmt: skip


@pytest.fixture(autouse=True)
def triton():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")


def test_attention_compiles_ahead_of_time():
    built = compile_for([
        attend(128, 16, 64),  # decoding
        attend(128, 128, 64, warps=8, stages=2, CAUSAL=False),  # a shared prefix
        attend(80, 64, 64, "*fp16", warps=8),
        attend(256, 64, 32, warps=8),
        attend(128, 16, 32, "*fp32", warps=8),
    ])  # fmt: skip
    assert len(built) == 10 and all(b.shared_bytes <= 100 * 1024 for b in built), built
    assert all(b.stack_bytes <= (64 if b.arch == 80 else 0) for b in built), built


def test_merging_and_writing_compile_ahead_of_time():
    floats, lses = ("first_out", "rest_out"), ("first_lse", "rest_lse", "lse")
    merge = {**dict.fromkeys((*floats, *lses), "*fp32"), "out": "*bf16", "rows": "i32", "rest": "i32"}
    write = {
        **dict.fromkeys(("key", "value"), "*fp32"),
        **dict.fromkeys(("key_cache", "value_cache"), "*bf16"),
        "slots": "*i64",
        **dict.fromkeys(("count", "heads", "total", *WRITE_STRIDES), "i32"),
    }
    built = compile_for([
        Kernel(f"{PAGED}_merge_kernel", merge, {"DIM": 80, "BLOCK_R": 8, "BLOCK_D": 128}, varying=["rows", "rest"]),
        Kernel(f"{PAGED}_write_kernel", write,
               {"DIM": 80, "BLOCK_SIZE": 16, "BLOCK_R": 16, "BLOCK_D": 128, **WRITE_UNITS}, varying=["count", "total"]),
    ])  # fmt: skip
    assert len(built) == 4 and all(b.stack_bytes == 0 for b in built), built
