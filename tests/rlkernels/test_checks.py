"""The checks that a GPU's tests share make their tensors on the default device: tried on a GPU that is not there."""

from functools import partial

import paged_problems as problems
import pytest
import torch
from pretend_gpu import pretended
from rank1_cases import check_in_place, check_statuses
from sampling_cases import check_no_gradient

from rlkernels import TreeLayout, tree_attention


def attends(backend):
    problem = problems.paged([5, 17], [1, 3])
    problems.check_attention("paged_attention", problem.args(), problem.scale, backend)
    shared, _, scale = problems.shared_prefix([(20, [9, 24], [1, 1])], torch.float32, heads=6, kv_heads=2, dim=24)
    problems.check_attention("shared_prefix_attention", shared, scale, backend)


def attends_in_a_tree(backend):
    layout = TreeLayout.from_sequences([[1, 2, 3], [1, 2, 4, 5], [1, 6]])
    problems.check_tree(partial(tree_attention, return_lse=True, backend=backend), layout, 4, 2, 16, torch.float32)


def moves(backend):
    problems.check_merge(backend, 9, 3, 16, torch.float32)
    problems.check_write_kv(backend, 6, torch.float32, torch.float32)


CHECKS = [attends, attends_in_a_tree, moves, problems.check_change, problems.check_grouped_without_tokens_or_gradients,
          check_in_place, check_statuses, check_no_gradient]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS)
def test_every_tensor_is_on_the_default_device(check):
    with pretended(), torch.device("cuda"):
        check("torch")
