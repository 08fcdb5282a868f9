"""The attention of processors with AMX, compiled from its source with plain C++ for the instructions that it names."""

import ctypes
import math
import shutil
import subprocess

import pytest
import torch
from accuracy import assert_as_plain
from paged_problems import paged, shared_prefix
from support import ROOT, lacks

from rlkernels.prefix_cache import reference

SOURCES = ["csrc/cpu/attention_wide.amx.cpp", "csrc/cpu/attention_merge.cpp", "tests/cpp/emulated/attention.cpp"]
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wno-psabi",
         "-D__AVX512F__", "-D__AMX_BF16__", "-DRLK_ISA=portable", "-Itests/cpp/emulated", "-Icsrc/include",
         "-include", "immintrin.h"]  # fmt: skip


class Ragged(ctypes.Structure):
    """Tables [count, width], lengths [count] and starts [count + 1], int32."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("tables", "lens", "starts")],
    ]

    @classmethod
    def of(cls, tables, lens, starts):
        return cls(len(lens), tables.shape[1], *(t.data_ptr() for t in (tables, lens, starts)))


@pytest.fixture(scope="module")
def attend(tmp_path_factory):
    """Return a function like ``paged_attention`` and, with three more tensors, ``shared_prefix_attention``."""
    if not shutil.which("g++"):
        lacks("g++")
    path = tmp_path_factory.mktemp("amx") / "attention.so"
    command = ["g++", *FLAGS, *SOURCES, "-o", str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    library = ctypes.CDLL(str(path))

    def call(query, key, value, *ragged, scale):
        sizes = (ctypes.c_int64 * 4)(query.shape[1], *key.shape[2:], key.shape[1])
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:2])
        prefixes = Ragged.of(*ragged[:3]) if len(ragged) == 6 else Ragged()
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in (query, key, value, out, lse)]
        library.attend(*addresses[:3], sizes, ctypes.c_float(scale), Ragged.of(*ragged[-3:]), prefixes, *addresses[3:])
        return out, lse

    return call


def check(op, arguments, scale, result):
    plain = getattr(reference, op)(*arguments, scale)
    exact = getattr(reference, op)(*(t.double() for t in arguments[:3]), *arguments[3:], scale)
    assert_as_plain(result, plain, exact, floor=0, relative=2**-22)


@pytest.mark.parametrize("size", [1, 6])  # of the queries: with 6 few keys take all the weight
@pytest.mark.parametrize(("lens", "queries", "heads", "kv_heads", "dim"), [
    ([1, 17, 64, 1023, 130], [1, 0, 5, 1, 130], 8, 2, 64),  # the proof's
    ([2100, 40], [1, 3], 4, 1, 96),  # stretches of 1,024 keys, merged
])  # fmt: skip
def test_attention_is_as_exact_as_plain_torch(attend, lens, queries, heads, kv_heads, dim, size):
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": 16, "dtype": torch.bfloat16}
    problem = paged(lens, queries, **sizes)
    arguments = (problem.query * size, *problem.tables())
    check("paged_attention", arguments, problem.scale, attend(*arguments, scale=problem.scale))


def test_shared_prefixes_too(attend):
    groups = [(0, [1, 18], [1, 1]), (33, [64, 1, 18], [1, 1, 2]), (1057, [20, 7], [4, 4])]
    shared, _, scale = shared_prefix(groups, torch.bfloat16, 8, 2, 64)
    check("shared_prefix_attention", shared, scale, attend(*shared, scale=scale))


def test_weights_midway_between_powers_of_two(attend):
    """One score of 4 and 511 of 3.65625, whose weights are 2^-0.496: there an approximation of 2^x is at its worst."""
    query = torch.zeros(1, 8, 32, dtype=torch.bfloat16)
    query[..., 0] = 1
    key = torch.zeros(32, 16, 1, 32, dtype=torch.bfloat16)
    key[..., 0] = 14.625
    key[0, 0, 0, 0] = 16
    tables, lens, starts = (torch.tensor(t, dtype=torch.int32) for t in ([list(range(32))], [512], [0, 1]))
    _, lse = attend(query, key, key, tables, lens, starts, scale=0.25)
    exact = 4 + math.log(1 + 511 * math.exp(-0.34375))
    assert (lse.double() - exact).abs().max() < exact * 2**-22
