"""Several trainers that share vLLM servers; tests/with_vllm has real ones."""

import json
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from conftest import merged, run_settings
from fake_vllm import EOS, draw, serving, urls
from gloo import KINDS, run_on_ranks, train
from safetensors.torch import load_file

from python_trainer.environment import Environment
from python_trainer.errors import UserError
from python_trainer.learner import Learner
from python_trainer.run_directory import read_metrics

pytestmark = pytest.mark.slow  # two processes train for half a minute


class Twice(Environment):
    """Two turns."""

    turns = 0

    def step(self, text):
        self.turns += 1
        return "AB", len(text) / 8, self.turns == 2


CASES = {
    "plain": {},
    "environment": {
        "task": {"environment": "test_parallel_vllm:Twice", "max_turns": 2, "reward": "environment"},
        "rollout": {"schedule": "fifo"},
    },
    "adapters, suffix rollouts": {
        "model": {"lora": {"r": 4, "alpha": 16}},
        "accelerators": {"enabled": ["rpo"], "rpo": {"preset": "paper"}},
    },
}


def train_and_tell(settings, folder, parallel=None):
    """Trains; every process writes what it was given to train on, and the state of its engine."""
    given, update = [], Learner.update

    def recorded(self, rollouts, number):
        given.append([(r.prompt_ids, r.response_ids, r.logprobs, r.finish_reason, r.policy_version) for r in rollouts])
        return update(self, rollouts, number)

    with patch.object(Learner, "update", recorded):
        trainer = train(settings, folder, parallel)
    engine = trainer.engine
    lengths = engine.lengths and engine.lengths.state_dict()
    known = [given, engine.stats, lengths, engine.policy_version, engine.max_positions]
    (folder / f"rank-{trainer.ranks.rank}.json").write_text(json.dumps(known))


def train_all(settings, folder, broken):
    """Every case on both kinds of ranks; then with servers that fail in the first process alone."""
    for parallel in KINDS:
        for name, changes in CASES.items():
            train_and_tell(merged(settings, changes), folder / parallel / name, parallel)
        for name, addresses in broken.items():
            changed = merged(settings, {"rollout": {"vllm_server": addresses}})
            rank = torch.distributed.get_rank()
            try:
                train(changed, folder / parallel / name, parallel)
            except UserError as error:
                (folder / f"{parallel}, {name}, {rank}").write_text(str(error))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_policy, jsonl_files):
    """Run directories: KIND/CASE, of one process and of two, all with the same two servers."""
    folder = tmp_path_factory.mktemp("runs")
    with ExitStack() as running:
        one, other, refusing = (running.enter_context(serving()) for _ in range(3))
        one.answers["/v1/completions"] = other.answers["/v1/completions"] = draw
        refusing.answers["/v1/completions"] = 500
        rollout = {"engine": "vllm", "vllm_server": urls([one, other]), "schedule": "history"}
        settings = run_settings(tiny_policy, jsonl_files) | {"max_steps": 2}
        settings["optimizer"] = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}  # as in test_parallel.py
        settings = merged(settings, {"rollout": rollout})
        broken = {"refuses": urls([one, refusing]), "is not there": [one.url, "http://127.0.0.1:1"]}
        run_on_ranks(folder, train_all, settings, folder, broken)
        for name, changes in CASES.items():
            train_and_tell(merged(settings, changes), folder / "none" / name)
    return folder


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_several_trainers_are_given_the_same_and_end_as_one_does(runs, name, parallel):
    known = [json.loads((runs / kind / name / f"rank-{rank}.json").read_text())
             for kind, rank in (("none", 0), (parallel, 0), (parallel, 1))]  # fmt: skip
    assert known[0] == known[1] == known[2] and len(known[0][0]) == 2
    one, several = (load_file(runs / kind / name / "weights.safetensors") for kind in ("none", parallel))
    torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-6)
    if name == "environment":
        assert any(EOS in ids[:-1] for step in known[0][0] for _, ids, *_ in step)  # a second turn
    first, second = (read_metrics(runs / kind / name) for kind in ("none", parallel))
    for row, other in zip(first, second, strict=True):
        known = {k for k in row if "time" not in k and "per_second" not in k}
        for key in known - {"tokens/trained"}:  # of prompts that both compute
            assert other[key] == pytest.approx(row[key], rel=1e-5, abs=2e-6), key
    assert not (runs / parallel / name / ".vllm").exists()


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize(("name", "message"), [
    ("refuses", "of the vLLM server http://.* answers 500"),
    ("is not there", "no vLLM server answers at http://.*:1: "),
])  # fmt: skip
def test_an_error_of_the_first_process_ends_all(runs, parallel, name, message):
    first, second = ((runs / f"{parallel}, {name}, {rank}").read_text() for rank in (0, 1))
    assert second == f"process 0 of 2: {first}"
    with pytest.raises(UserError, match=message):
        raise UserError(first)
