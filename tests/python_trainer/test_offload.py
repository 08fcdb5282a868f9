"""Optimizer state on the host between steps: the same weights and checkpoints, to the bit."""

import mmap
import shutil

import pytest
import torch
import torch.distributed as dist
from conftest import merged, run_settings
from gloo import run_on_ranks, train
from safetensors.torch import load_file, save_file

from python_trainer.checkpoint import list_checkpoints
from python_trainer.distributed.shard_files import load_whole
from python_trainer.errors import NotFinite, UserError
from python_trainer.model import optimizer as module
from python_trainer.model.offload import in_parts, pinned
from python_trainer.model.optimizer import PolicyOptimizer
from python_trainer.model.settings import OptimizerConfig

HALF = {"max_steps": 2}
OFFLOAD = {"optimizer": {"offload": True}}


@pytest.fixture(autouse=True)
def many_parts(monkeypatch):
    monkeypatch.setattr(module, "OFFLOADED_ELEMENTS", 40)


class Pair:
    """A model and its optimizer; the last weight never has a gradient."""

    def __init__(self, dtype, *, offload):
        torch.manual_seed(0)
        parts = [torch.nn.Linear(6, 5), torch.nn.Linear(5, 9), torch.nn.LayerNorm(9), torch.nn.Linear(3, 3)]
        self.model = torch.nn.Sequential(*parts).to(dtype)
        self.optimizer = PolicyOptimizer(self.model, OptimizerConfig(offload=offload, weight_decay=0.1))

    def step(self, seed, lr=0.1):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(self.model[0].weight.dtype)
        for part in x.split(2):  # two micro-batches
            self.model[:3](part).float().pow(2).sum().backward()
        return self.optimizer.step(lr)

    def state(self):
        return [*self.optimizer.masters.values()], [
            value for state in self.optimizer.adamw.state.values() for key, value in state.items() if key != "step"
        ]


def assert_equal_states(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.keys() == second[name].keys()
        assert all(torch.equal(value, second[name][key]) for key, value in values.items()), name


class FakeCuda:
    """What ``torch.cuda.cudart`` gives: it pins whole pages, each of them once."""

    def __init__(self, pages=1 << 20):
        self.left, self.ranges = pages, {}

    def cudaHostRegister(self, address, size, flags):
        pages = set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))
        if len(pages) > self.left or any(pages & others for _, others in self.ranges.values()):
            return 2
        self.left -= len(pages)
        self.ranges[address] = size, pages
        return 0

    def cudaHostUnregister(self, address):
        del self.ranges[address]
        return 0


def test_pinned_memory_is_as_large_as_what_is_in_it(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    shapes = [(), (3,), (0, 4), (1025, 3), (1025, 3), (1 << 20,)]
    values = [torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    kept = [pinned(value.shape, value.dtype).copy_(value) for value in values]
    assert all(torch.equal(a, b) and a.dtype == b.dtype and a.is_contiguous() for a, b in zip(kept, values))
    assert [a.untyped_storage().nbytes() for a in kept] == [value.nbytes for value in values]
    assert sorted(size for size, _ in cuda.ranges.values()) == sorted(value.nbytes for value in values if value.nbytes)
    del kept[3:]
    assert len(cuda.ranges) == 3, "is let go of with the tensors"


def test_what_cannot_be_pinned_is_too_little_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCuda(pages=1))
    with pytest.raises(MemoryError, match="optimizer.offload: 40000 more bytes of the host's memory cannot be pinned"):
        pinned(torch.Size([10_000]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_without(dtype):
    plain, moved = (Pair(dtype, offload=offload) for offload in (False, True))
    assert len(moved.optimizer.parts) == 3 and len(plain.optimizer.parts) == 1
    for seed in range(3):
        if seed == 2:  # somebody else changes a weight, and its master follows
            for pair in (plain, moved):
                with torch.no_grad():
                    pair.model[0].weight.mul_(1.5)
        assert plain.step(seed) == moved.step(seed)
        assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), moved.model.parameters()))
        assert_equal_states(plain.optimizer.state_dict(), moved.optimizer.state_dict())
    masters, moments = moved.state()
    assert len(moments) == 12, "of six weights with a gradient"
    away = moments if dtype == torch.float32 else moments + masters
    assert all(x.untyped_storage().nbytes() == 0 for x in away)
    assert all(
        x.untyped_storage().nbytes() > 0
        for x in (*moved.model.parameters(), *(x for kind in plain.state() for x in kind))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [(False, True), (True, False), (True, True)])
def test_a_checkpoint_is_taken_over_with_and_without(dtype, offload):
    before, after = Pair(dtype, offload=offload[0]), Pair(dtype, offload=offload[1])
    before.step(0)
    after.step(7)  # moments of its own, to be replaced
    saved = {name: {k: v.clone() for k, v in values.items()} for name, values in before.optimizer.state_dict().items()}
    after.model.load_state_dict(before.model.state_dict())
    after.optimizer.load_state_dict(saved, before.model.state_dict())
    for seed in (1, 2):
        assert before.step(seed) == after.step(seed)
    assert all(torch.equal(a, b) for a, b in zip(before.model.parameters(), after.model.parameters()))
    assert_equal_states(before.optimizer.state_dict(), after.optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_file_holds_is_taken_over(tmp_path, dtype):
    """Its tensors share the memory of the file, which cannot be let go of."""
    before, after = (Pair(dtype, offload=True) for _ in range(2))
    before.step(0)
    flat = {f"{name}/{key}": v for name, s in before.optimizer.state_dict().items() for key, v in s.items()}
    save_file(flat, tmp_path / "state.safetensors")
    saved = {name: {} for name in before.optimizer.masters}
    for path, value in load_file(tmp_path / "state.safetensors").items():
        name, key = path.split("/")
        saved[name][key] = value
    after.model.load_state_dict(before.model.state_dict())
    after.optimizer.load_state_dict(saved, before.model.state_dict())
    assert before.step(1) == after.step(1)
    assert_equal_states(before.optimizer.state_dict(), after.optimizer.state_dict())


def test_a_gradient_that_is_not_finite_changes_nothing():
    pair = Pair(torch.bfloat16, offload=True)
    pair.step(0)
    weights = [p.detach().clone() for p in pair.model.parameters()]
    saved = {name: {k: v.clone() for k, v in state.items()} for name, state in pair.optimizer.state_dict().items()}
    for p in pair.model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    with pytest.raises(NotFinite):
        pair.optimizer.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(weights, pair.model.parameters()))
    assert_equal_states(saved, pair.optimizer.state_dict())
    assert all(master.grad is None for master in pair.optimizer.masters.values())


def test_parts():
    sizes = [("a", 3), ("b", 2), ("c", 9), ("d", 0), ("e", 4), ("f", 1)]
    assert in_parts(sizes, 5) == [["a", "b"], ["c"], ["d", "e", "f"]]
    assert in_parts([], 5) == []


def in_two(settings, folder):
    """Two processes with and without, and going on from either with the other."""
    module.OFFLOADED_ELEMENTS = 500
    train(settings, folder / "plain", "fsdp2")
    for first, then in ((settings, merged(settings, OFFLOAD)), (merged(settings, OFFLOAD), settings)):
        name = folder / ("to offload" if first is settings else "from offload")
        train(first | HALF, name, "fsdp2")
        if first is not settings and dist.get_rank() == 0:
            shutil.copytree(name, folder / "to one")
        dist.barrier()
        train(then, name, "fsdp2", resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    folder = tmp_path_factory.mktemp("runs")
    algorithm = {"advantage": "gae", "num_minibatches": 2}
    settings = merged(
        run_settings(tiny_policy, jsonl_files),
        {"max_steps": 3, "model": {"dtype": "bfloat16"}, "algorithm": algorithm, "critic": {"separate": True}},
    )
    run_on_ranks(folder, in_two, settings, folder)
    return folder, settings


@pytest.mark.parametrize("name", ["to offload", "from offload"])
def test_runs_in_shards_are_those_without(runs, name):
    folder, _ = runs
    plain, moved = (load_file(folder / place / "weights.safetensors") for place in ("plain", name))
    assert all(torch.equal(value, moved[key]) for key, value in plain.items())
    first, second = (load_whole(list_checkpoints(folder / place / "checkpoints")[-1]) for place in ("plain", name))
    assert_equal_states(first["optimizer"], second["optimizer"])
    assert_equal_states(first["critic"]["optimizer"], second["critic"]["optimizer"])


def test_runs_in_one_process_are_those_without(runs, tmp_path):
    """They go on from what two processes wrote, and keep masters of their own."""
    folder, settings = runs
    for name, changes in (("plain", {}), ("moved", OFFLOAD)):
        shutil.copytree(folder / "to one", tmp_path / name)
        trainer = train(merged(settings, changes), tmp_path / name, resume=True)
    assert trainer.learner.optimizer.host is not None and trainer.learner.critic.optimizer.host is not None
    plain, moved = (load_file(tmp_path / name / "weights.safetensors") for name in ("plain", "moved"))
    assert all(torch.equal(value, moved[key]) for key, value in plain.items())
    first, second = (load_whole(list_checkpoints(tmp_path / name / "checkpoints")[-1]) for name in ("plain", "moved"))
    assert_equal_states(first["optimizer"], second["optimizer"])
    assert all("master" in state for state in first["optimizer"].values())


def test_what_reads_masters_between_steps_is_refused(make_config):
    with pytest.raises(UserError, match=r"alpha reads master weights between steps, optimizer.offload must be false"):
        make_config(accelerators={"enabled": ["alpha"]}, **OFFLOAD)
