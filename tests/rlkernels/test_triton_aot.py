"""The ahead-of-time compiler that the tests of Triton kernels use."""

import importlib.util

import pytest
from support import lacks
from triton_aot import Kernel, compile_for, overtakes

SIGNATURE = {"x": "*bf16", "out": "*fp32", "n": "i32", "factor": "fp32"}


@pytest.fixture(autouse=True)
def triton():
    if importlib.util.find_spec("triton") is None:
        lacks("triton")


def test_compiles_for_every_target():
    built = compile_for([Kernel("aot_example:scale_kernel", SIGNATURE, {"BLOCK": 256})])
    assert [b.arch for b in built] == [80, 90]
    assert all(b.registers > 0 and b.stack_bytes == 0 and b.shared_bytes == 0 for b in built)


def test_a_broken_kernel_fails_with_its_name():
    with pytest.raises(AssertionError, match="aot_example:broken_kernel does not compile for sm_80"):
        compile_for([Kernel("aot_example:broken_kernel", {"x": "*i32"}, {"BLOCK": 16})])


def test_an_argument_that_varies_must_not_be_specialised_on():
    with pytest.raises(AssertionError, match=r"scale_kernel must have do_not_specialize=\['n'\]"):
        compile_for([Kernel("aot_example:scale_kernel", SIGNATURE, {"BLOCK": 256}, varying=["n"])])


LOOP = """
$L__BB0_1:
  {first}
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r1}}, %rd1, %rd2, 1, 1, 1, 0, 1;
  wgmma.commit_group.sync.aligned;
  wgmma.wait_group.sync.aligned {running};
  {then}
  @%p1 bra $L__BB0_1;
  cp.async.cg.shared.global [ %r9 + 0 ], [ %rd8 + 0 ], 0x10;
"""
COPY = "cp.async.cg.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x10;"


def test_copies_that_overtake_running_products_are_found():
    for places in ({"first": COPY, "then": ""}, {"first": "", "then": COPY}):
        assert overtakes(LOOP.format(running=3, **places)) == COPY
        assert overtakes(LOOP.format(running=0, **places)) is None
    assert overtakes(LOOP.format(running=3, first="", then="cp.async.wait_group 0;")) is None


def test_forgotten_argument_is_named():
    with pytest.raises(AssertionError, match="factor must be in both"):
        compile_for([Kernel("aot_example:scale_kernel", {"x": "*bf16", "out": "*fp32", "n": "i32"}, {"BLOCK": 256})])
