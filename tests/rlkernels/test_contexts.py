"""What a public op does in every context of torch, and with every kind of tensor: one rule for all of ``OPS``."""

import op_calls
import pytest
import torch
from op_calls import CONTEXTS
from torch.utils._pytree import tree_leaves

import rlkernels
from bench._calls import inputs
from rlkernels import backend
from rlkernels.extrapolation import PREDICTORS
from rlkernels.proof.cases import SMALL

CPU = torch.device("cpu")


def layout():
    made = rlkernels.GroupedLayout([4, 2], [3, 2, 1], [0, 2, 3])
    tree = rlkernels.TreeLayout.from_sequences([[1, 2, 3], [1, 2, 4], [5]])
    return [made.position_ids, made.end, made.nodes, tree.position_ids, tree.end, tree.nodes, tree.ids, *tree.places]


def proven(problem, backend):
    """A case of the proof, which may return what it has changed."""
    if problem.reset:
        problem.reset()
    return [t.clone() for t in tree_leaves(problem.call(backend))]


def trajectory(base, direction):
    made = rlkernels.RankOneTrajectory({"w": base})
    for step in range(1, 7):
        weights = {"w": base + step * direction}
        made.track(weights, step=step, accuracy=step / 10)
    found = [rlkernels.extrapolate(made, weights, rlkernels.Target(9), predictor=p)["w"] for p in sorted(PREDICTORS)]
    found += made.state_dict().values()
    return found if rlkernels.refusal(made, "secant") is None else None


CASES = {  # what runs, and its inputs
    "layout": (layout, tuple),
    "trajectory": (trajectory, lambda: (torch.randn(20, 30), 1e-3 * torch.outer(torch.randn(20), torch.randn(30)))),
    **{f"{op} on {name}": (op_calls.run, lambda op=op, name=name: (op, inputs().get(op), name))
       for op in backend.OPS for name in op_calls.backends(op) if backend.unavailable(op, name, CPU) is None},
    **{f"{case.op}, {case.label}, on {name}": (proven, lambda case=case, name=name: (case.make(CPU), name))
       for case in SMALL for name in ("auto", "torch") if not case.op.startswith("top1")},  # they make new tensors
}  # fmt: skip


@pytest.mark.parametrize(("case", "context"), [
    (case, context) for case in CASES for context in CONTEXTS
    # torch wants backward passes outside of autocast, but a proof runs both
    if not (context == "autocast" and case.startswith("grouped_attention, "))
])  # fmt: skip
def test_nothing_depends_on_the_context(case, context):
    call, make = CASES[case]
    torch.manual_seed(0)
    inputs = make()
    expected = call(*inputs)
    with CONTEXTS[context]():
        found = call(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_every_op_is_called():
    assert {*inputs(), *op_calls.HOST} == backend.OPS.keys()
