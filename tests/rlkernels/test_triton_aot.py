"""The ahead-of-time compiler that the tests of Triton kernels use."""

import importlib.util

import pytest
from support import lacks
from triton_aot import Kernel, compile_for

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


def test_forgotten_argument_is_named():
    with pytest.raises(AssertionError, match="factor must be in both"):
        compile_for([Kernel("aot_example:scale_kernel", {"x": "*bf16", "out": "*fp32", "n": "i32"}, {"BLOCK": 256})])
