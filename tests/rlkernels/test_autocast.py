"""Plain torch, which a GPU takes as long as nothing is proven, computes inside autocast what it computes outside."""

import pytest
import torch

import rlkernels
from rlkernels.prefix_cache.layout import GroupedLayout


def grouped():
    query, key, value = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    layout = GroupedLayout([3], [4, 4], [0, 2])
    return rlkernels.grouped_attention(query, key, value, layout, scale=0.3, backend="torch")


def paged():
    query, keys, values = torch.randn(3, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    lens, starts = torch.tensor([6, 8], dtype=torch.int32), torch.tensor([0, 1, 3], dtype=torch.int32)
    return rlkernels.paged_attention(query, keys, values, tables, lens, starts, scale=0.3, backend="torch")


def matvec():
    return rlkernels.delta_matvec(torch.randn(9, 7), torch.randn(9, 7), torch.randn(7), backend="torch")


def top1():
    update = rlkernels.top1_delta(torch.randn(20, 16), torch.randn(20, 16), backend="torch")
    return torch.cat([update.u, update.v, torch.tensor([update.sigma, update.angle_bound])])


@pytest.mark.parametrize("op", [grouped, paged, matvec, top1])
def test_autocast_changes_nothing(op):
    torch.manual_seed(0)
    expected = op()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        found = op()
    assert found.dtype == expected.dtype and torch.equal(found, expected)
