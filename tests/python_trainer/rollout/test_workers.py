"""WorkerPool: the tokens of one engine for any number of workers, and processes that end when they should."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from paged import GREEDY, assert_same, engine_for, make, mixed_requests, prompts
from rich.console import Console
from test_drafts import fed
from transformers import LlamaConfig, LlamaForCausalLM

from bench.faults.memory import serve_greedily
from python_trainer.errors import NotFinite, UserError, is_out_of_memory
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.drafting import Drafter, HistoryEntry
from python_trainer.rollout.ordering import LengthHistory
from python_trainer.rollout.workers import pool as workers
from python_trainer.rollout.workers.pool import WorkerPool
from python_trainer.run_directory import read_metrics
from python_trainer.trainer import Trainer

SAMPLED = SamplingParams(seed=3)


def uneven_requests() -> list[Request]:
    """Ten requests of two samples; the first half is asked for much longer answers."""
    return [
        Request(prompt, num_samples=2, max_new_tokens=60 if i < 5 else 4, sample_id=10 * i)
        for i, prompt in enumerate(prompts([7, 3, 9, 4, 6, 5, 8, 3, 4, 6]))
    ]


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module", params=[1, 2, 3])
def pool(request, model):
    made = WorkerPool(model, workers=request.param, eos_token_ids=(), memory_bytes=1 << 20, block_size=4)
    yield made
    made.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("schedule", ["fifo", "history"])
def test_same_tokens_for_any_number_of_workers(pool, model, sampling, schedule):
    pool.lengths = LengthHistory() if schedule == "history" else None
    wanted = engine_for(model).generate(mixed_requests(), sampling)
    before = pool.stats
    assert (pool.max_positions, pool.limited_by) == (160, engine_for(model).limited_by)
    for _ in range(2):  # without lengths in the history, and with
        assert_same(pool.generate(mixed_requests(), sampling), wanted)
    assert pool.stats["generated_tokens"] - before["generated_tokens"] == 2 * sum(len(c.ids) for c in wanted)
    assert sum(report.answers for report in pool.reports) == len(wanted)
    assert all(report.stats["forward_passes"] > 0 for report in pool.reports if report.answers)


def test_same_tokens_when_answers_move_in_their_midst(model, monkeypatch):
    """Two workers, and all the long answers begin on the first: the second takes some over when it is done."""
    requests = uneven_requests()
    wanted = engine_for(model).generate(requests, SAMPLED)
    pool = WorkerPool(model, workers=2, lengths=LengthHistory(), eos_token_ids=(), memory_bytes=1 << 20, block_size=4)
    pool._overhead = 0.0  # every token that goes elsewhere helps
    monkeypatch.setattr(workers, "balance", lambda works, count, *_: workers.in_turn(len(works), count))
    assert_same(pool.generate(requests, SAMPLED), wanted)
    assert 0 < pool.moved < 10 and [report.answers for report in pool.reports] == [10 - pool.moved, 10 + pool.moved]
    computed_anew = pool.stats["prefill_tokens"] - sum(len(request.prompt_ids) for request in requests)
    assert computed_anew > pool.moved, "what had begun was computed again"

    # with room for two samples at a time requests wait, and go whole
    small = WorkerPool(model, workers=2, lengths=LengthHistory(), eos_token_ids=(), block_size=4, max_sequences=2)
    small._overhead = 1e9  # nothing that has begun moves
    assert_same(small.generate(requests, SAMPLED), wanted)
    assert small.moved > 0 and small.moved % 2 == 0
    assert small.stats["prefill_tokens"] == sum(len(request.prompt_ids) for request in requests)
    small.close()

    # with drafts, which follow an answer to where it goes
    pool.drafter = fed(requests, wanted, corrupt=6)
    pool.moved, pool.lengths = 0, LengthHistory()
    assert_same(pool.generate(requests, SAMPLED), wanted)
    assert pool.stats["accepted_tokens"] > 0
    pool.close()


def test_drafts_come_from_the_same_answers_on_every_worker(pool, model):
    pool.lengths, requests = None, mixed_requests()
    wanted = engine_for(model).generate(requests, SAMPLED)
    pool.drafter = known = fed(requests, wanted)
    spent = []

    def generate():
        before = pool.stats
        assert_same(pool.generate(requests, SAMPLED), wanted)
        spent.append({name: count - before[name] for name, count in pool.stats.items()})

    generate()  # the whole history
    history, news = known.history, []
    other = SamplingParams(seed=5)
    for request, completion in zip(requests, engine_for(model).generate([replace(r, num_samples=1) for r in requests],
                                                                        other)):  # fmt: skip
        news.append(HistoryEntry(request.prompt_ids, [*request.prefix_ids, *completion.ids], 1.0, 1))
        history.add(news[-1].prompt_ids, news[-1].response_ids, reward=1.0, epoch=1)
    pool.drafter = Drafter(history, pass_overhead=1e9, news=news)
    generate()  # what is new
    generate()  # nothing is new
    pool.drafter = Drafter(history, pass_overhead=1e9)
    history.add([1], [2, 3])
    generate()  # something is new that it was not told: all of it again
    pool.drafter = None
    generate()
    plain = spent.pop()
    assert plain["draft_tokens"] == 0
    for with_drafts in spent:
        assert 0 < with_drafts["accepted_tokens"] <= with_drafts["draft_tokens"]
        assert with_drafts["sample_steps"] < 0.95 * plain["sample_steps"]
        assert with_drafts["generated_tokens"] == plain["generated_tokens"]


def test_drafters_that_cannot_be_copied_are_refused(pool):
    class Own(Drafter):
        pass

    pool.drafter = Own(fed([], []).history, pass_overhead=1.0)
    with pytest.raises(UserError, match="knows drafts of Drafter only, got Own"):
        pool.generate(mixed_requests(), GREEDY)
    pool.drafter = None


def test_new_weights_reach_every_worker(pool, model):
    pool.lengths, requests = None, mixed_requests()
    pool.generate(requests, GREEDY)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        wanted = engine_for(model).generate(requests, GREEDY)
        pool.policy_updated()
        assert_same(pool.generate(requests, GREEDY), wanted)
    finally:
        model.load_state_dict(saved)
        pool.policy_updated()


def test_requests_are_checked_before_anything_begins(pool):
    with pytest.raises(UserError, match="request 1: token ids must be between 0 and 60, got 5 .. 61"):
        pool.generate([Request([1]), Request([5, 61])], GREEDY)
    assert pool.generate([], GREEDY) == []
    short = pool.generate([Request([1], num_samples=2, max_new_tokens=0), Request([2], max_new_tokens=3)], GREEDY)
    assert [len(c.ids) for c in short] == [0, 0, 3]
    assert pool.pass_seconds(2, 3) > 0


def test_one_prompt_stays_on_one_worker(model):
    """A common prompt is computed once, in however many requests it comes."""
    a, b = prompts([24, 24])
    requests = [Request(prompt, max_new_tokens=2, sample_id=i) for i, prompt in enumerate([a, b, a, b])]
    pool = WorkerPool(model, workers=2, eos_token_ids=(), block_size=4)
    pool.generate(requests, GREEDY)
    assert [report.answers for report in pool.reports] == [2, 2]
    assert pool.stats["cached_tokens"] >= 2 * 20
    pool.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def gone(pids) -> bool:
    for _ in range(600):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


def test_a_worker_that_dies_is_one_clear_error_and_the_next_call_works(model):
    pool = WorkerPool(model, workers=2, eos_token_ids=())
    pids = [process.pid for process in pool._processes]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(UserError, match=rf"rollout worker 1 of 2 \(process {pids[1]}\) was ended by SIGKILL"):
        pool.generate(mixed_requests(), GREEDY)
    assert gone(pids)
    assert_same(pool.generate(mixed_requests(), GREEDY), engine_for(model).generate(mixed_requests(), GREEDY))
    for number in (signal.SIGINT, signal.SIGTERM):  # what a terminal or a job system sends to all of a group
        os.kill(pool._processes[0].pid, number)
    pool.generate(mixed_requests(), GREEDY)
    pids = [process.pid for process in pool._processes]
    pool.close()
    assert gone(pids)


@pytest.mark.parametrize("leave", [0, 1 << 16])  # bytes, so that it ends here or there
def test_a_worker_without_memory_says_so(model, tmp_path, monkeypatch, leave):
    file = tmp_path / "now"
    with monkeypatch.context() as patched:
        patched.setattr(workers, "serve", partial(serve_greedily, file, leave))
        pool = WorkerPool(model, workers=2, eos_token_ids=())
    pids = [process.pid for process in pool._processes]
    file.touch()
    with pytest.raises((UserError, MemoryError), match=r"rollout worker [01] of 2") as raised:
        pool.generate(mixed_requests(), GREEDY)
    assert is_out_of_memory(raised.value) and "Traceback" not in str(raised.value)
    assert gone(pids) and not file.exists()
    assert_same(pool.generate(mixed_requests(), GREEDY), engine_for(model).generate(mixed_requests(), GREEDY))
    pool.close()


def test_errors_inside_a_worker_come_out():
    with pytest.raises(UserError, match="memory_bytes must be at least"):
        WorkerPool(make(), workers=2, eos_token_ids=(), memory_bytes=1)
    with pytest.raises(UserError, match="workers must be at least 1, got 0"):
        WorkerPool(make(), workers=0, eos_token_ids=())
    model = make()
    pool = WorkerPool(model, workers=2, eos_token_ids=())
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    pool.policy_updated()
    with pytest.raises(NotFinite, match="^the policy cannot be sampled from"):
        pool.generate(mixed_requests(), SAMPLED)
    model = make()
    model.extra = lambda: None
    with pytest.raises(UserError, match="the model cannot be sent to other processes"):
        WorkerPool(model, workers=2, eos_token_ids=())


def test_more_may_be_submitted_while_a_worker_waits_to_be_read():
    """What it says and what it is sent are each more than a connection holds."""
    tiny = LlamaConfig(vocab_size=61, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    pool = WorkerPool(LlamaForCausalLM(tiny), workers=1, eos_token_ids=(), memory_bytes=1 << 21)
    first = pool.submit([Request([1], num_samples=250, max_new_tokens=100)], SAMPLED)
    assert pool._connections[0].poll(60)  # all are finished in the same pass: it says so at once
    more = [Request([i % 61] * 1000, max_new_tokens=1) for i in range(200)]
    submitting = threading.Thread(target=pool.submit, args=(more, SAMPLED), daemon=True)
    submitting.start()
    submitting.join(30)
    try:
        assert not submitting.is_alive()
        pool.poll(len(first))
        assert all(rollout.finish_reason for rollout in first)
    finally:
        pool._processes[0].kill()
        pool.close()


SCRIPT = """
import os, signal, sys
from transformers import Qwen2Config, Qwen2ForCausalLM
from python_trainer.rollout.workers.pool import WorkerPool
sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
pool = WorkerPool(Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1)), workers=2, eos_token_ids=())
print(*[process.pid for process in pool._processes], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", -9), ("sys.exit(3)", 3)])
def test_no_worker_outlives_the_trainer(end, code):
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == code
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and gone(pids)


def test_training_with_several_workers(make_config, tmp_path):
    """Drafts, suffix rollouts and scheduling at once: what is learned is what one engine's answers teach."""
    quiet, enabled = Console(quiet=True), {"enabled": ["rpo", "drafts"], "drafts": {"pass_overhead": 1e6}}
    rows, weights = [], []
    for name, rollout in {"one": {}, "three": {"workers": 3, "schedule": "history"}}.items():
        config = make_config(max_steps=7, rollout=rollout, accelerators=enabled)
        trainer = Trainer(config, tmp_path / name, console=quiet)
        trainer.run()
        rows.append(read_metrics(tmp_path / name))
        weights.append([p.detach().clone() for p in trainer.policy.model.parameters()])
    assert isinstance(trainer.engine, WorkerPool) and gone([process.pid for process in trainer.engine._processes])
    for one, three in zip(*rows, strict=True):
        for key in ("reward", "completions/mean_length", "tokens/generated", "eval/accuracy"):
            assert one.get(key) == pytest.approx(three.get(key))
    assert sum(row.get("drafts/acceptance", 0) for row in rows[1]) > 0 and rows[1][-1]["drafts/history_tokens"] > 0
    for ours, theirs in zip(*weights):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert trainer.evaluate("test") == rows[1][-1]["eval/accuracy"]  # starts processes again
    trainer.engine.close()
