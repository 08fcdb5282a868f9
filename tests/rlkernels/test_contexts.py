"""What a public op does in every context of torch, and with every kind of tensor: one rule for all of ``OPS``."""

import sys
from contextlib import contextmanager
from dataclasses import is_dataclass
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import op_calls
import pytest
import torch
from op_calls import CONTEXTS
from support import assert_equal
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

import rlkernels
from bench._calls import GRADIENTS, inputs, public
from rlkernels import _contexts, backend, registry
from rlkernels.extrapolation import PREDICTORS
from rlkernels.prefix_cache import pack
from rlkernels.proof.cases import SMALL

CPU = torch.device("cpu")
OPS = list(inputs())
COMPOSITE = [op.name for op in registry.ALL if op.composite]
close = torch.testing.assert_close


def layout():
    grouped = rlkernels.GroupedLayout([4, 2], [3, 2, 1], [0, 2, 3])
    tree = rlkernels.TreeLayout.from_sequences([[1, 2, 3], [1, 2, 4], [5]])
    return [
        grouped.position_ids,
        grouped.end,
        grouped.nodes,
        tree.position_ids,
        tree.end,
        tree.nodes,
        tree.ids,
        *tree.places,
    ]


def packing():
    packed = [pack([[1, 2, 3], [1, 2, 4], [5]], prefix_lens=lens).to("cpu") for lens in (None, [2, 2, 1])]
    return [t for p in packed for t in (p.ids, p.rows, p.targets, p.pairs, p.position_ids)]


def proven(problem, backend):
    """Run a case of the proof, and return copies of its results, which it may have written in place."""
    if problem.reset:
        problem.reset()
    return [t.clone() for t in tree_leaves(problem.call(backend))]


def trajectory(base, direction):
    tracked = rlkernels.RankOneTrajectory({"w": base})
    for step in range(1, 7):
        weights = {"w": base + step * direction}
        tracked.track(weights, step=step, accuracy=step / 10)
    results = [
        rlkernels.extrapolate(tracked, weights, rlkernels.Target(9), predictor=p)["w"] for p in sorted(PREDICTORS)
    ]
    results += tracked.state_dict().values()
    return results if rlkernels.refusal(tracked, "secant") is None else None


CASES = {  # what runs, and its inputs
    "layout": (layout, tuple),
    "packing": (packing, tuple),
    "trajectory": (trajectory, lambda: (torch.randn(20, 30), 1e-3 * torch.outer(torch.randn(20), torch.randn(30)))),
    **{f"{op} on {name}": (op_calls.run, lambda op=op, name=name: (op, inputs().get(op), name))
       for op in [*OPS, *op_calls.HOST] for name in op_calls.backends(op)
       if backend.unavailable(op, name, CPU) is None},
    **{f"{case.op}, {case.label}, on {name}": (proven, lambda case=case, name=name: (case.make(CPU), name))
       for case in SMALL for name in ("auto", "torch")},
}  # fmt: skip


@pytest.mark.parametrize(("case", "context"), [
    (case, context) for case in CASES for context in CONTEXTS
    # torch wants backward passes outside of autocast, but a proof runs both; linear_token_logprobs casts
    if context != "autocast" or not case.startswith(("grouped_attention, ", "tree_attention, ", "linear_token"))
])  # fmt: skip
def test_nothing_depends_on_the_context(case, context):
    call, make = CASES[case]
    torch.manual_seed(0)
    kwargs = make()
    expected = call(*kwargs)
    with CONTEXTS[context]():
        result = call(*kwargs)
    assert_equal(result, expected, equal_nan=True)


def change(kwargs, function, only=None):
    """Return arguments with some tensors changed, also those inside dictionaries and trajectories."""

    def changed(name, value):
        if only not in (None, name):
            return value
        if is_dataclass(value):
            return type(value)(**{key: changed(name, item) for key, item in vars(value).items()})
        return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)

    return {name: changed(name, value) for name, value in kwargs.items()}


def with_tensors(kwargs):
    return [name for name, value in kwargs.items() if isinstance(value, (torch.Tensor, dict)) or is_dataclass(value)]


def floats(kwargs):
    """Return the names of floating point arguments."""
    return [name for name, t in kwargs.items() if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]


def outputs(op, kwargs):
    return [t for t in tree_leaves(public(op)(**kwargs)) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(("kind", "message"), [
    (torch.Tensor.to_sparse, r"must be dense, got torch\.sparse_coo: pass \S+\.to_dense\(\)"),
    (lambda t: torch.nested.nested_tensor([t]), "must have one size, got a nested tensor: pad it"),
    (lambda t: torch.nested.nested_tensor([t], layout=torch.jagged), "must have one size, got a nested tensor: pad it"),
])  # fmt: skip
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_without_one_size_in_memory_is_refused(op, kind, message):
    kwargs = inputs()[op]
    for name in with_tensors(kwargs):
        with pytest.raises(TypeError, match=message):
            public(op)(**change(kwargs, lambda t: kind(t.clone()), name))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_give_shapes(op):
    kwargs = inputs()[op]
    if registry.OPS[op].needs_values:
        with pytest.raises(TypeError, match=f"{op} needs the values of .*, got a meta tensor"):
            public(op)(**change(kwargs, lambda t: t.to("meta")))
        return
    result, expected = (outputs(op, kwargs) for kwargs in (change(kwargs, lambda t: t.to("meta")), kwargs))
    assert all(t.is_meta for t in result)
    assert [(t.shape, t.dtype) for t in result] == [(t.shape, t.dtype) for t in expected]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("op", "name"), [(o, n) for o in OPS for n in ("auto", "torch")])
def test_fake_tensors_give_shapes(op, name):
    """Those on a CPU, at whose values a meta tensor's ops do not look either."""
    expected = outputs(op, inputs()[op])
    paged = op in ("paged_attention", "shared_prefix_attention") and name == "torch"  # it loops over sequences
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # a layout's
        kwargs = change(inputs()[op], mode.from_tensor) | {"backend": name}
        if registry.OPS[op].needs_values or paged:
            with pytest.raises(TypeError, match=f"{op} needs the values of .*, got a fake tensor"):
                public(op)(**kwargs)
            return
        assert [(t.shape, t.dtype) for t in outputs(op, kwargs)] == [(t.shape, t.dtype) for t in expected]


def test_what_values_alone_tell_is_not_made_up():
    kwargs = inputs()["verify_drafts"] | {"starts": torch.tensor([0, 2, 3])}
    with pytest.raises(TypeError, match="verify_drafts needs the values of logits, got a meta tensor"):
        rlkernels.verify_drafts(**change(kwargs, lambda t: t.to("meta")))


@contextmanager
def tangent():
    with forward_ad.dual_level():
        yield lambda t: forward_ad.make_dual(t, torch.ones_like(t))


@pytest.mark.parametrize("op", OPS)
def test_transforms_without_a_rule_are_refused(op):
    kwargs = inputs()[op]
    message = r"(op|Trajectories|dtw) has no rule for (torch\.vmap|forward-mode derivatives)".replace("op", op)
    for name in with_tensors(kwargs):
        with pytest.raises(TypeError, match=message):
            torch.vmap(lambda _, name=name: public(op)(**change(kwargs, lambda t: t + _.to(t.dtype), name)))(
                torch.ones(2)
            )
    for name in floats(kwargs):
        with pytest.raises(TypeError, match=message), tangent() as dual:
            public(op)(**kwargs | {name: dual(kwargs[name])})
        with pytest.raises(TypeError, match=message):
            torch.func.jvp(lambda t, name=name: public(op)(**kwargs | {name: t}), (kwargs[name],), (kwargs[name],))


def total(op, kwargs, backend="auto"):
    outputs_with_grad = [t for t in tree_leaves(public(op)(**kwargs, backend=backend)) if t.requires_grad]
    return sum((t * torch.arange(t.numel()).view(t.shape)).sum() for t in outputs_with_grad)


def case_of(op, name):
    """Return arguments of an op in the dtype in which its backend computes exact gradients, for "torch"."""
    kwargs = inputs()[op]
    return change(kwargs, lambda t: t.double() if t.dtype == torch.float32 else t) if name == "torch" else kwargs


DIFFERENTIABLE = [(op, name) for op in GRADIENTS for name in op_calls.backends(op)
                  if backend.unavailable(op, name, CPU) is None]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), DIFFERENTIABLE)
def test_gradients_of_transforms_are_those_of_autograd(op, name):
    kwargs = case_of(op, name)
    leaves = {key: kwargs[key].clone().requires_grad_() for key in GRADIENTS[op]}
    expected = torch.autograd.grad(total(op, kwargs | leaves, name), list(leaves.values()))
    for key, expected_grad in zip(leaves, expected):
        grad = torch.func.grad(lambda t, key=key: total(op, kwargs | {key: t}, name))(kwargs[key])
        close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("op", "name"), [(o, n) for o, n in DIFFERENTIABLE if n != "torch" or o not in COMPOSITE])
def test_a_gradient_of_a_gradient_is_never_lost(op, name):
    kwargs = inputs()[op]
    key = GRADIENTS[op][0]
    ran = "tree_attention" if op == "grouped_attention" else op
    message = f"the gradient of {ran} has no gradient"
    leaf = kwargs[key].clone().requires_grad_()
    (grad,) = torch.autograd.grad(total(op, kwargs | {key: leaf}, name), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        (leaf.sum() + grad.sum()).backward()

    def gradient(t):
        return torch.func.grad(lambda t: total(op, kwargs | {key: t}, name))(t).sum()

    with pytest.raises(RuntimeError, match=message):
        torch.func.grad(gradient)(kwargs[key])
    with pytest.raises(TypeError, match=rf"the gradient of {ran} has no rule for torch\.vmap"):
        torch.func.jacrev(lambda t: public(op)(**kwargs | {key: t}, backend=name))(kwargs[key])


@pytest.mark.parametrize(("op", "name"), DIFFERENTIABLE)
def test_a_checkpointed_pass_builds_a_graph_of_its_gradients(op, name):
    kwargs = inputs()[op]
    key = GRADIENTS[op][0]
    leaf = kwargs[key].clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(op, kwargs | {key: leaf}, name), leaf)
    result = checkpoint(lambda t: total(op, kwargs | {key: t}, name), leaf, use_reentrant=False)
    close(torch.autograd.grad(result, leaf, create_graph=True), (expected,))


@pytest.mark.parametrize("op", COMPOSITE)
def test_plain_torch_has_forward_derivatives(op):
    """Compare with a difference quotient."""
    kwargs = case_of(op, "torch")
    key = GRADIENTS[op][0]

    def values(t):
        return tree_leaves(public(op)(**kwargs | {key: t}, backend="torch"))

    direction = torch.randn_like(kwargs[key])
    step = 1e-6
    _, derivatives = torch.func.jvp(values, (kwargs[key],), (direction,))
    ends = (values(kwargs[key] + sign * step * direction) for sign in (1, -1))
    close(derivatives, [(above - below) / (2 * step) for above, below in zip(*ends)], rtol=1e-6, atol=1e-7)
    stacked = torch.stack([kwargs[key], 2 * kwargs[key]])
    derivatives = torch.vmap(values)(stacked)
    close(derivatives, [torch.stack(pair) for pair in zip(*map(values, stacked))])


@pytest.mark.parametrize("kind", [Fraction, np.array, torch.tensor])
@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize(("op", "settings"), [
    ("state_similarity", {"scale": 2.0}), ("rhyme_similarity", {"reward_weight": 0.25, "reward_scale": 0.5}),
    ("tree_attention", {"scale": 0.5, "softcap": 3.0}), ("paged_attention", {"scale": 0.5, "softcap": 3.0}),
])  # fmt: skip
def test_a_setting_is_of_any_kind_that_turns_into_a_number(op, settings, name, kind):
    kwargs = inputs()[op] | {"backend": name}
    converted = {key: kind(value) for key, value in settings.items()}
    close(outputs(op, kwargs | converted), outputs(op, kwargs | settings), rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
def test_negations_that_are_pending_are_done(op):
    kwargs = inputs()[op]
    pending = {
        name: torch._neg_view(-kwargs[name]) for name in floats(kwargs)
    }  # as of the imaginary part of a conjugate
    assert_equal(op_calls.run(op, kwargs | pending), op_calls.run(op, kwargs))
    for name in registry.OPS[op].writes:
        public(op)(**kwargs | pending)
        written = kwargs | {name: kwargs[name].clone()}
        public(op)(**written)
        assert_equal(pending[name], written[name])


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("op", OPS)
def test_distributed_tensors_are_gathered(op, mesh):
    """Check one process; ``test_distributed.py`` runs two."""
    kwargs = inputs()[op]

    def distribute(t):
        return distribute_tensor(t.clone(), mesh, [Shard(0) if t.ndim else Replicate()])

    distributed = change(kwargs, distribute)
    plain = change(kwargs, torch.Tensor.clone)
    result, expected = outputs(op, distributed), outputs(op, plain)
    written = registry.OPS[op].writes
    for name in written:
        assert_equal(distributed[name].full_tensor(), plain[name])
    if op == "add_rank1_":
        assert result[0] is distributed["weight"]
    else:
        assert_equal(result, expected)


class Gathered:
    """``deepspeed.zero.GatheredParameters``."""

    def __init__(self, params):
        self.params = params

    def __enter__(self):
        for p in self.params:
            p.data = p.whole

    def __exit__(self, *_):
        for p in self.params:
            p.data = torch.empty(0)


def test_parameters_of_deepspeed_are_gathered_for_both_passes(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=SimpleNamespace(GatheredParameters=Gathered)))
    kwargs = inputs()["linear_token_logprobs"]
    leaves = {name: kwargs[name].clone().requires_grad_() for name in GRADIENTS["linear_token_logprobs"]}
    expected = torch.autograd.grad(total("linear_token_logprobs", kwargs | leaves), list(leaves.values()))
    params = {name: torch.nn.Parameter(kwargs[name].clone()) for name in ("weight", "bias")}
    for p in params.values():
        p.whole = p.data
        p.ds_status = "NOT_AVAILABLE"
        p.data = torch.empty(0)
    value = total("linear_token_logprobs", kwargs | params | {"hidden": leaves["hidden"]})
    assert params["weight"].numel() == 0
    grads = torch.autograd.grad(value, [leaves["hidden"], *params.values()])
    assert_equal(grads, expected)
    assert params["weight"].numel() == 0


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_autocast_projects_as_linear_does(dtypes):
    """bfloat16 states and a float32 head: no more than twice the error of torch's own, whose gradients it has."""
    hidden = torch.randn(5, 16)
    weight = torch.randn(40, 16)
    bias = torch.randn(40)
    ids = torch.tensor([0, 39, 7, 7, 20])

    def plain(hidden, weight, bias):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return logits.log_softmax(-1, torch.promote_types(logits.dtype, torch.float32))[torch.arange(5), ids]

    def run(function, dtypes):
        kwargs = [t.to(dtype).requires_grad_() for t, dtype in zip((hidden, weight, bias), dtypes)]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*kwargs)
        return [out, *torch.autograd.grad(out.sum(), kwargs)]

    dtypes = (*dtypes, torch.float32)
    expected = run(plain, [torch.float64] * 3)
    plain_results = run(plain, dtypes)
    results = run(lambda h, w, b: rlkernels.linear_token_logprobs(h, w, ids, bias=b), dtypes)
    assert [t.dtype for t in results] == [torch.float32, *dtypes]
    for result, plain_result, expected_result in zip(results, plain_results, expected):
        assert (result - expected_result).norm() <= 2 * (
            plain_result - expected_result
        ).norm() + 1e-6 * expected_result.norm()


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_keys_are_written_from_their_own_cache(name):
    op_calls.check_write_from_itself(name)


def test_what_a_mode_made_is_not_kept_for_later_calls():
    logits = torch.randn(5, 11)
    uniforms = torch.rand(5)
    expected = rlkernels.sample_tokens(logits, uniforms, temperature=torch.full((5,), 0.87))
    with FakeTensorMode() as mode:
        fake = map(mode.from_tensor, (logits, uniforms))
        shapes = rlkernels.sample_tokens(*fake, temperature=0.87, validate=False)
    assert_equal(rlkernels.sample_tokens(logits, uniforms, temperature=0.87), expected)
    assert [(t.shape, t.dtype) for t in shapes] == [(t.shape, t.dtype) for t in expected]


def test_the_rule_is_applied_once_to_a_kind_of_call(monkeypatch):
    checked = []
    check = _contexts.OpCall.call_checked
    monkeypatch.setattr(
        _contexts.OpCall, "call_checked", lambda op_call, *args: checked.append(op_call) or check(op_call, *args)
    )
    logits = torch.randn(4, 7, dtype=torch.bfloat16)
    ids = torch.arange(4)
    score = rlkernels.token_logprobs
    score(logits, ids)
    del checked[:]
    for rows in (4, 3, 1):
        score(logits[:rows], ids[:rows])
    assert not checked
    for call in (
        lambda: score(logits.float(), ids),
        lambda: score(logits.view(2, 2, 7), ids.view(2, 2)),
        lambda: score(logits.requires_grad_(), ids),
        lambda: score(logits=logits, ids=ids),
    ):
        call()
        call()
        assert len(checked) <= 1
        del checked[:]
    with torch.autocast("cpu"):
        score(logits, ids)
        score(logits, ids)
    assert len(checked) == 2, "only plain calls are remembered"
    with pytest.raises(TypeError, match="ids must have dtype torch.int64"):
        score(ids=logits, logits=logits)
