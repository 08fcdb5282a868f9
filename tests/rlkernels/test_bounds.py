"""Compiled ops touch nothing beside their tensors, which here lie next to memory that nobody may read or write."""

import ctypes
import faulthandler
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from support import every_isa, run_python
from test_compiled_ops import problems

pytestmark = pytest.mark.usefixtures("compiled")
FAULT = -11  # what a process that touches such memory ends with


def fenced(value, at_end):
    """A copy of a tensor that ends where unreadable memory begins, or starts where it ends; lists one by one."""
    if isinstance(value, (list, tuple)):
        return [fenced(v, at_end) for v in value]
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    page = mmap.PAGESIZE
    room = -(-value.nbytes // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (first, first + page + room):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    offset = page + (room - value.nbytes if at_end else 0)
    copy = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=offset).view(value.shape)
    return copy.copy_(value)


def run_all():
    for isa in every_isa():
        for dim in (5, 19, 32):
            for name, args in problems(dim).items():
                for at_end in (False, True):
                    print(isa, dim, name, at_end, flush=True)
                    op = getattr(torch.ops.rlkernels, name)
                    given = fenced(args, at_end)
                    found = op(*given), given
                    torch.testing.assert_close(found, (op(*args), list(args)), equal_nan=True)
                    args = problems(dim)[name]  # some write to them


def test_ops_stay_inside():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run_python("import test_bounds; test_bounds.run_all()", PYTHONPATH=path)


@pytest.mark.parametrize("at_end", [False, True])
def test_the_fence_is_noticed(at_end):
    memory = fenced(torch.ones(3), at_end)
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(memory.data_ptr() + (memory.nbytes if at_end else -1), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FAULT
