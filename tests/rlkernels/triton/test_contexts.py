"""The Triton launchers state the dtype of all that they allocate."""

import op_calls
import pytest
import torch
from op_calls import CONTEXTS

from bench._calls import inputs
from rlkernels.backend import OPS


@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].triton])
def test_launchers_depend_on_no_default_dtype(op):
    given = inputs()[op]
    expected = op_calls.run(op, given, "triton")
    for name in ("default torch.float64", "default torch.float16"):
        with CONTEXTS[name]():
            found = op_calls.run(op, given, "triton")
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
