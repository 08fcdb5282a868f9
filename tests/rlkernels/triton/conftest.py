"""Triton kernels run on a GPU, or anywhere through the interpreter, which is chosen when triton is imported."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="this process lacks TRITON_INTERPRET=1 (`make test` runs them in one that has it)")
    for item in items:
        if "rlkernels/triton/" in item.path.as_posix():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def tensors_on_the_gpu():
    """Make tensors without a named device on the GPU where the kernels are compiled."""
    compiled = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    with torch.device("cuda" if compiled else "cpu"):
        yield
