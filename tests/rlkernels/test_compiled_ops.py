"""Compiled ops: schemas, gradients, one graph for torch.compile, and nothing touched beside their tensors; long calls
let other Python threads run."""

import ctypes
import faulthandler
import inspect
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import every_isa, run_python

import rlkernels.logprobs  # registers the gradient of its op
from rlkernels.sampling import _settings

pytestmark = pytest.mark.usefixtures("compiled")
LAYOUT = rlkernels.GroupedLayout([4], [3, 2], [0, 2])
TREE = rlkernels.TreeLayout.from_sequences([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 8], [9]])  # nine tokens too


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged(dim=8):
    """Return arguments of paged_attention but the scale: two sequences of 6 and 3 keys, 2 and 1 queries."""
    caches = torch.randn(2, 4, 4, 1, dim)
    return torch.randn(3, 2, dim), *caches, ints([2, 0], [1, -1]), ints(6, 3), ints(0, 2, 3)


def packed(dim=8):
    """Return query, key and value of nine packed tokens."""
    return torch.randn(9, 2, dim), torch.randn(9, 1, dim), torch.randn(9, 1, dim)


def problems(dim=8):
    """Return op -> arguments, with attention heads of ``dim`` numbers and rows of twice as many."""
    attention = paged(dim)
    tensors = packed(dim)
    results = torch.ops.rlkernels.tree_attention(*tensors, TREE.nodes, 0.3)
    out = torch.randn(2, 3, 2, dim)
    lse = torch.randn(2, 3, 2)
    rows_to_write = torch.randn(2, 1, dim)
    slots = torch.tensor([3, 9])
    weights = [torch.randn(5, 7), torch.randn(3, 4)]
    bases = [torch.randn(5, 7), torch.randn(3, 4)]
    x = torch.randn(2, 5, 1)
    y = torch.randn(3, 6, 1)
    logits = torch.randn(3, 11)
    uniforms = torch.rand(3)
    settings = torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    ids = torch.tensor([1, 5, 0])
    rows = torch.randn(3, 2 * dim)
    rope_arguments = rows, ids, torch.randn(9, 4), torch.randn(9, 4), 1, 2, None, None, 1e-6
    _, entropies, stats = torch.ops.rlkernels.token_logprobs(logits, ids, 0.8, True)
    return {
        "paged_attention": (*attention, 0.3),
        "shared_prefix_attention": (*attention[:3], ints([3]), ints(4), ints(0, 2), *attention[3:], 0.3),
        "merge_attention": (out[0], lse[0], out[1], lse[1]),
        "tree_attention": (*tensors, TREE.nodes, 0.3),
        "tree_attention_backward": (torch.randn(9, 2, dim), torch.randn(9, 2), *tensors, *results, TREE.nodes, 0.3),
        "write_kv": (rows_to_write, rows_to_write, *attention[1:3], slots),
        "advise_huge_pages": (torch.zeros(64),),
        "top1_deltas": (weights, bases, [torch.randn(7), None], 1e-2, 12, 2, 3, 0),
        "delta_matvec": (weights[0], bases[0], torch.randn(7)),
        "add_rank1_": (weights[1], torch.randn(3), torch.randn(4), True, 3),
        "dtw": (x, y, torch.tensor([5, 1]), None, 2),
        "dtw_subsequence": (x, y, None, torch.tensor([6, 2, 1])),
        "dtw_topk": (x, y, 2, torch.tensor([5, 1]), torch.tensor([6, 2, 1]), None),
        "keyed_uniform": (7, ids, ids),
        "token_weights": (-torch.rand(5),),
        "sample_tokens": (logits, uniforms, *settings),
        "token_logprobs": (logits, ids, 0.8, True),
        "token_logprobs_backward": (logits, ids, stats, entropies, torch.randn(3), torch.randn(3), 0.8),
        "add_rms_norm": (rows, torch.randn(3, 2 * dim), torch.ones(2 * dim), 1e-6),
        "rms_norm_backward": (rows, None, rows, torch.rand(3), torch.ones(2 * dim)),
        "rope": rope_arguments,
        "rope_backward": (torch.randn(3, 2 * dim), *rope_arguments),
        "silu_mul": (rows,),
        "silu_mul_backward": (rows[:, :dim].contiguous(), rows),
        "verify_drafts": (
            logits, torch.tensor([4]), torch.tensor([0, 2, 3]), uniforms, torch.ones(2), torch.ones(2),
            torch.zeros(2, dtype=torch.int64),
        ),
    }  # fmt: skip


def test_opcheck_of_every_op_that_computes_on_a_cpu():
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    registered = {n.removeprefix("rlkernels::") for n in names if n.startswith("rlkernels::") and "triton" not in n}
    assert registered == problems().keys()
    for name, args in problems().items():
        torch.library.opcheck(getattr(torch.ops.rlkernels, name).default, args)
        if name in ("paged_attention", "shared_prefix_attention"):  # a query as Transformers lays it out
            query = args[0].transpose(0, 1).contiguous().transpose(0, 1)
            torch.library.opcheck(getattr(torch.ops.rlkernels, name).default, (query, *args[1:]))


@pytest.mark.parametrize(("op", "changes", "message"), [
    ("write_kv", {3: torch.zeros(1, 4, 1, 8)}, "value_cache must be like key_cache"),
    ("tree_attention", {3: torch.tensor([[0, 4, 9], [4, 9, 10]])}, "nodes must be in preorder, got 4, 9, 10"),
    ("tree_attention", {3: torch.tensor([[0, 4, 6], [4, 9, 9]])}, "nodes must be in preorder, got 4, 9, 9"),
    ("tree_attention", {3: torch.tensor([[0, 9, 9], [9, 9, 9]])}, "nodes must be in preorder, got 9, 9, 9"),
    ("tree_attention", {3: torch.tensor([[0, 4, 9], [5, 9, 9]])}, "nodes must be in preorder, got 5, 9, 9"),
    ("tree_attention", {3: torch.tensor([[0, 8, 8]])}, "nodes must hold 9 tokens, got 8"),
    ("tree_attention", {1: torch.randn(8, 1, 8)}, "shapes do not fit"),
    ("tree_attention_backward", {1: torch.randn(9, 1)}, "shapes do not fit"),
    ("tree_attention_backward", {7: torch.tensor([[0, 8, 8]])}, "nodes must hold 9 tokens, got 8"),
])  # fmt: skip
def test_no_direct_call_leaves_its_tensors(op, changes, message):
    args = list(problems()[op])
    for place, value in changes.items():
        args[place] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.rlkernels, op)(*args)


@pytest.mark.parametrize("temperature", [torch.nan, -1.0])
def test_a_wrong_temperature_draws_nothing(temperature):
    settings = torch.full((3,), temperature), torch.ones(3), torch.zeros(3, dtype=torch.int64)
    ids, logprobs = torch.ops.rlkernels.sample_tokens(torch.randn(3, 11), torch.rand(3), *settings)
    assert (ids == -1).all() and logprobs.isnan().all()


@pytest.mark.parametrize("subsequence", [False, True])
def test_shapes_of_the_op_that_only_gpus_have(subsequence):
    x, y, lengths = (torch.empty(shape, device="meta") for shape in ((2, 5, 1), (3, 6, 1), (0,)))
    outputs = torch.ops.rlkernels.dtw_warps(x, y, lengths, lengths, -1, subsequence)
    places = [(torch.int64, (2 if subsequence else 0, 3))] * 2
    assert [(t.dtype, tuple(t.shape)) for t in outputs] == [(torch.float32, (2, 3)), *places]
    bounds = torch.ops.rlkernels.dtw_bounds(x, y, lengths, lengths, -1)
    assert bounds.dtype == torch.float32 and bounds.shape == (2, 3)
    torch.ops.rlkernels.dtw_warps_(bounds, lengths, x, y, lengths, lengths, -1)


def attend(query, keys, values, *tables):
    options = {"scale": 0.3, "window": 3, "softcap": 2.0, "return_lse": True}
    return rlkernels.paged_attention(query, keys, values, *tables, **options)[0] * 2


def attend_in_groups(query, key, value):
    return rlkernels.grouped_attention(query, key, value, LAYOUT, scale=0.3).square()


def attend_in_a_tree(query, key, value):
    out, lse = rlkernels.tree_attention(query, key, value, TREE, scale=0.3, window=3, softcap=2.0, return_lse=True)
    return out * (lse - 1).sigmoid()[..., None]


def score(logits, ids):
    return sum(rlkernels.token_logprobs(logits, ids, temperature=0.7, return_entropy=True))


def score_hidden(hidden, weight, bias, ids):
    logprobs, entropy = rlkernels.linear_token_logprobs(hidden, weight, ids, bias=bias, return_entropy=True, chunk=20)
    return logprobs * 2 + entropy


def distances(x, y, lengths):
    cost = rlkernels.dtw(x * 2, y, x_lengths=lengths, band=3)
    return cost + 1, rlkernels.dtw(x, y, mode="subsequence"), rlkernels.dtw_topk(x, y, 2)


GRAPHS = {  # function -> inputs, and how many of them get a gradient
    attend: (paged, 0),
    attend_in_groups: (packed, 3),
    attend_in_a_tree: (packed, 3),
    score: (lambda: (torch.randn(4, 13), torch.tensor([0, 12, 3, 3])), 1),
    score_hidden: (lambda: (torch.randn(4, 8), torch.randn(50, 8), torch.randn(50), torch.tensor([0, 49, 3, 3])), 3),
    distances: (lambda: (torch.randn(3, 5), torch.randn(4, 6), torch.tensor([5, 1, 0])), 0),
}


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("function", GRAPHS)
def test_compiles_into_one_graph(function):
    make, differentiable = GRAPHS[function]
    arguments = make()
    leaves = [t.requires_grad_() for t in arguments[:differentiable]]
    torch.compiler.reset()
    result = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)
    expected = function(*arguments)
    torch.testing.assert_close(result, expected)
    if leaves:
        grads = (torch.autograd.grad(out.sum(), leaves) for out in (result, expected))
        torch.testing.assert_close(*grads)


def draw(logits, setting):
    return rlkernels.sample_tokens(logits, torch.full((4,), 0.5), temperature=setting, validate=False)


@pytest.mark.parametrize("function", [
    draw,
    lambda logits, setting: rlkernels.token_logprobs(logits, torch.arange(4), temperature=setting),
    lambda logits, setting: rlkernels.linear_token_logprobs(logits, logits, torch.arange(4), temperature=setting),
    lambda logits, setting: rlkernels.soft_dtw(logits[:, :3], 2 * logits[:, :3], gamma=setting),
])  # fmt: skip
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_setting_may_change_from_call_to_call(function, dynamic):
    logits = torch.randn(4, 13)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for setting in (1.0, 0.7, 0.8):  # from the second value on the compiler keeps it dynamic
        torch.testing.assert_close(compiled(logits, setting), function(logits, setting))


def draw_by_rows(logits, uniforms, settings):
    return rlkernels.sample_tokens(logits, uniforms, temperature=settings, top_p=settings, validate=False)


def verify(logits, uniforms, settings):
    starts = [0, 2, logits.shape[0]]
    drafts = logits.argmax(1)[2:]
    return rlkernels.verify_drafts(logits, drafts, starts, uniforms, temperature=settings[:2], validate=False)


@pytest.mark.parametrize("function", [draw_by_rows, verify])
@pytest.mark.parametrize("dynamic", [None, True])
def test_samples_are_drawn_within_one_graph(function, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 5, 9):
        arguments = torch.randn(rows, 13), torch.rand(rows), 1 - torch.rand(rows)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("op", ["paged_attention", "shared_prefix_attention", "merge_attention", "write_kv"])
def test_a_gradient_that_would_be_lost_raises(op, backend):
    run = getattr(rlkernels, op)
    arguments = dict(zip(inspect.signature(run).parameters, problems()[op]))
    for name, value in arguments.items():
        if torch.is_tensor(value) and value.is_floating_point():
            leaf = {name: value.clone().requires_grad_()}
            with pytest.raises(ValueError, match=f"{name} must not require gradients.* {op} has no gradient"):
                run(**arguments | leaf, backend=backend)
            with torch.no_grad():
                run(**arguments | leaf, backend=backend)


def test_what_compiled_graphs_write_counts_as_a_change():
    keys = torch.zeros(3, 4, 1, 8)
    values = torch.zeros(3, 4, 1, 8)
    weight = torch.zeros(3, 4)
    rows = torch.randn(2, 1, 8)
    slots = torch.tensor([3, 9])
    u = torch.randn(3)
    v = torch.randn(4)

    def write(keys, values, weight):
        rlkernels.write_kv(rows, -rows, keys, values, slots)
        rlkernels.add_rank1_(weight, u, v, 2.0)

    tensors = keys, values, weight
    versions = [t._version for t in tensors]
    torch.compiler.reset()
    torch.compile(write, fullgraph=True, backend="aot_eager")(*tensors)
    assert torch.equal(keys.flatten(0, 1)[slots], rows) and torch.equal(values.flatten(0, 1)[slots], -rows)
    torch.testing.assert_close(weight, 2 * torch.outer(u, v))
    assert all(t._version > version for t, version in zip(tensors, versions))


VIEWS = {"rows": lambda t: t, "columns": lambda t: t[:, ::2], "transposed": lambda t: t[:, :-1].T}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_any_size_are_written_within_one_graph(view):
    def add(weight, u, v):
        return rlkernels.add_rank1_(weight, u, v, 2.0).sum()

    torch.compiler.reset()
    compiled = torch.compile(add, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, columns in ((3, 8), (5, 6)):
        whole = torch.zeros(rows, columns)
        weight = VIEWS[view](whole)
        u, v = map(torch.rand, weight.shape)
        compiled(weight, u, v)
        torch.testing.assert_close(weight, 2 * torch.outer(u, v))
        torch.testing.assert_close(whole.sum(), weight.sum())


FAULT = -11  # exit code of a process that touches such memory


def fenced(value, at_end):
    """Return a copy that ends where unreadable memory begins, or begins where it ends; of lists one by one."""
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
                    fenced_arguments = fenced(args, at_end)
                    result = op(*fenced_arguments), fenced_arguments
                    torch.testing.assert_close(result, (op(*args), list(args)), equal_nan=True)
                    args = problems(dim)[name]  # some write to them


def test_ops_stay_inside():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    output = run_python("-c", "import test_compiled_ops; test_compiled_ops.run_all()", PYTHONPATH=path)
    assert output.startswith("portable"), "there was an instruction set to run on"


@pytest.mark.parametrize("at_end", [False, True])
def test_the_fence_is_noticed(at_end):
    memory = fenced(torch.ones(3), at_end)
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(memory.data_ptr() + (memory.nbytes if at_end else -1), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == FAULT


MAX_CALL_S = 60.0  # of all calls; one of a millisecond is enough if a processor is free


def runs_during(call, seconds=MAX_CALL_S) -> bool:
    """Return whether a thread that waits only for the interpreter lock runs during calls.

    The interpreter is told never to take the lock from a thread that does not release it.
    """
    gate = threading.Lock()
    ran = threading.Event()
    switch_interval = sys.getswitchinterval()
    deadline = time.monotonic() + seconds

    def work():
        with gate:
            total = sum(i * i for i in range(1000))  # progress: bytecode, not one atomic call
        if total:
            ran.set()

    thread = threading.Thread(target=work)
    with gate:
        thread.start()
        sys.setswitchinterval(1000.0)
    try:
        while not ran.is_set() and time.monotonic() < deadline:
            call()
        return ran.is_set()
    finally:
        sys.setswitchinterval(switch_interval)
        thread.join()


def long_calls():
    """Return drafting calls on handles, and a verification, by name."""
    rng = np.random.default_rng(0)
    history = rlkernels.RolloutHistory(backend="cpu")
    for _ in range(50):
        history.add([1, 2], rng.integers(0, 4, 400))
    handles = np.array([history.track([1, 2]) for _ in range(500)])
    extensions = rng.integers(0, 4, 500 * 20).astype(np.int32)
    lengths = np.full(500, 20)
    history.extend_tracked(handles, extensions, lengths)
    core = history._core
    repeated_handles = np.tile(handles, 400)
    ones = np.ones_like(repeated_handles)
    logits = torch.randn(64, 20_000)
    uniforms = torch.rand(64)
    drafts = torch.randint(20_000, (48,))
    starts = torch.arange(0, 65, 4)
    settings = _settings(1.0, 0.9, 50, 16, logits.device)
    return {
        "draft_tracked": lambda: core.draft_tracked(handles, 64, 0.0),
        "extend_tracked": lambda: core.extend_tracked(handles, extensions, lengths),
        "observe": lambda: core.observe(repeated_handles, ones, ones),
        "verify_drafts": lambda: torch.ops.rlkernels.verify_drafts(logits, drafts, starts, uniforms, *settings),
    }


@pytest.mark.parametrize("name", ["draft_tracked", "extend_tracked", "observe", "verify_drafts"])
def test_another_thread_makes_progress_during_a_long_call(name):
    assert runs_during(long_calls()[name])


def test_a_call_that_keeps_the_lock_lets_nobody_run():
    """The test above can fail."""
    numbers = list(range(10_000, 0, -1))
    assert not runs_during(lambda: sorted(numbers, key=int.bit_count), seconds=0.3)
