"""Arms of updates by TRL: each computes the same gradients, or says in one row why it does not run."""

import sys
from types import MethodType, ModuleType

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from bench.gpu import updates

CPU = torch.device("cpu")


@pytest.fixture
def run_arm(trl_integration):
    """Return a function that gives the rows of an arm on the tiny model."""

    def run(arm):
        messages = []
        assert updates.run(updates.TINY, arm, CPU, [], messages.append) == {"ok": True}
        assert messages[0] == {"begin": arm}
        return [message["row"] for message in messages[1:]]

    return run


def test_every_size_has_all_arms():
    """Trainers alone come first; two arms need a compiler, last."""
    arms = [arm for size, arm in updates.jobs("cuda") if size == "Qwen2.5-0.5B"]
    assert [arm for size, arm in updates.jobs("cuda") if size == "Qwen2.5-1.5B"] == arms
    assert arms[:2] == ["TRL", "rlkernels"] and len(arms) == len({*arms}) == 9
    for layers in ("use_kernels", "Liger's layers", "compiled layers"):
        assert {f"TRL, {layers}", f"rlkernels, {layers}"} < {*arms}


def refuse(model, use_kernels):
    raise OSError("no route to the Hub")


@pytest.mark.parametrize(
    ("set_use_kernels", "reason"),
    [(refuse, "OSError: no route to the Hub"), (lambda model, use_kernels: None, "no layer was replaced")],
)
def test_hub_kernels_without_network_leave_one_row(run_arm, monkeypatch, set_use_kernels, reason):
    monkeypatch.setattr(PreTrainedModel, "set_use_kernels", set_use_kernels)
    (row,) = run_arm("TRL, use_kernels")
    assert row["ok"] is None and f"hub kernels need network or a local cache: {reason}" in row["missing"]


def test_hub_kernels_that_were_loaded_are_timed(run_arm, monkeypatch):
    def replace_norm(model, use_kernels):
        norm = model.model.norm
        norm.forward = MethodType(lambda self, hidden: type(self).forward(self, hidden), norm)

    monkeypatch.setattr(PreTrainedModel, "set_use_kernels", replace_norm)
    rows = run_arm("rlkernels, use_kernels")
    assert len(rows) == 2 and all(row["ok"] for row in rows) and rows[1]["median_s"] > 0


def test_functions_that_liger_replaces_come_back(run_arm, monkeypatch):
    plain = modeling_qwen2.apply_rotary_pos_emb
    calls = []

    def rotate(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    def apply(model, fused_linear_cross_entropy):
        assert not fused_linear_cross_entropy
        modeling_qwen2.apply_rotary_pos_emb = rotate

    module = ModuleType("liger_kernel.transformers")
    module._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    assert all(row["ok"] for row in run_arm("rlkernels, Liger's layers"))
    assert calls and modeling_qwen2.apply_rotary_pos_emb is plain


@pytest.mark.parametrize("trainer", ["TRL", "rlkernels"])
def test_layers_are_compiled(run_arm, trainer):
    torch._dynamo.reset()
    counters.clear()
    rows = run_arm(f"{trainer}, compiled layers")
    assert len(rows) == 2 and all(row["ok"] for row in rows)
    assert counters["frames"]["ok"] > 0
