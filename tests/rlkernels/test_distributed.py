"""Ops given distributed tensors, in two processes that gloo connects."""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import rlkernels


def run_as_fsdp_does() -> None:
    """Check a head in an FSDP2 group of its own: gradients are those of the layer called as FSDP calls it."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    heads = [torch.nn.Linear(8, 11) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    for head in heads:
        fully_shard(head, mesh=mesh)
    hidden = torch.randn(2, 5, 8)[dist.get_rank()].requires_grad_()
    ids = torch.tensor([3, 0, 10, 4, 5])
    expected = heads[0](hidden).log_softmax(-1)[torch.arange(5), ids]
    logprobs = rlkernels.linear_token_logprobs(hidden, heads[1].weight, ids, bias=heads[1].bias)
    torch.testing.assert_close(logprobs, expected)
    weights = torch.arange(5) + dist.get_rank()
    grads = [
        torch.autograd.grad((values * weights).sum(), hidden, retain_graph=True)[0] for values in (expected, logprobs)
    ]
    torch.testing.assert_close(*grads)
    for values in (expected, logprobs):
        (values * weights).sum().backward()
    for name, expected_param, param in zip(("weight", "bias"), heads[0].parameters(), heads[1].parameters()):
        torch.testing.assert_close(param.grad.full_tensor(), expected_param.grad.full_tensor(), msg=name)


def write_into_shards() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    base = torch.randn(5, 7)
    u = torch.randn(5)
    v = torch.randn(7)
    for placement in (Shard(0), Shard(1), Replicate()):
        weight = distribute_tensor(base.clone(), mesh, [placement]).requires_grad_()
        assert rlkernels.add_rank1_(weight, distribute_tensor(u, mesh, [Shard(0)]), v, 0.5) is weight
        torch.testing.assert_close(weight.full_tensor().detach(), base + 0.5 * torch.outer(u, v))


def run_all(folder: Path) -> None:
    for function in (run_as_fsdp_does, write_into_shards):
        function()
        (folder / f"{function.__name__}.{dist.get_rank()}").touch()


def test_two_processes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "python_trainer"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    importlib.import_module("gloo").run_on_ranks(tmp_path, run_all, tmp_path)
    assert len(list(tmp_path.glob("*.[01]"))) == 4
