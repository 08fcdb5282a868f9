"""A signal to one of two processes, in a long step: the last finished step is saved while both are in their rewards."""

import os
import signal
from unittest.mock import patch

import pytest
import torch.distributed as dist
from conftest import QUIET, run_settings, wait_for
from gloo import KINDS, run_on_ranks, train
from tiny import digits

from bench.faults.training import differences
from python_trainer.config import load_config
from python_trainer.errors import Interrupted
from python_trainer.loop.learner import Learner
from python_trainer.trainer import Trainer

pytestmark = pytest.mark.slow  # two processes train twice


class Interrupt:
    """Send a signal to rank 1, and let both wait in their rewards, or in an evaluation after an update."""

    def __init__(self, folder, place):
        self.folder = folder
        self.place = place
        self.current = 0
        self.step = Trainer.step
        self.update = Learner.update
        self.evaluate = Trainer.evaluate_if_due

    def send(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def note_step(self, trainer, number):
        self.current = number
        return self.step(trainer, number)

    def reward(self, prompts, completions, completion_ids, **columns):
        if self.current == 3 and self.place == "reward":
            self.current = 0
            self.send()
            wait_for("step-000002", self.folder)
        return digits(prompts, completions, completion_ids)

    def during_update(self, learner, rollouts, number):
        if number == 3 and self.place == "update":
            self.send()
        return self.update(learner, rollouts, number)

    def during_evaluation(self, trainer, **options):
        if trainer.state.step == 3 and self.place == "update":
            wait_for("step-000003", self.folder)
        return self.evaluate(trainer, **options)


def interrupted(settings, folder, parallel, place):
    interrupt = Interrupt(folder, place)
    config = load_config(settings | {"parallel": parallel})
    with (
        patch.object(Trainer, "step", lambda *arguments: interrupt.note_step(*arguments)),
        patch.object(
            Trainer, "evaluate_if_due", lambda *arguments, **options: interrupt.during_evaluation(*arguments, **options)
        ),
        patch.object(Learner, "update", lambda *arguments: interrupt.during_update(*arguments)),
        patch("tiny.digits", interrupt.reward),
        pytest.raises(Interrupted, match="SIGTERM: stopped after step 3, which is saved"),
    ):
        Trainer(config, folder, console=QUIET, ranks=KINDS[parallel]()).run()


def runs(settings, folder):
    for parallel in KINDS:
        train(settings, folder / f"{parallel}-whole", parallel)
        for place in ("reward", "update"):
            name = f"{parallel}-{place}"
            interrupted(settings, folder / name, parallel, place)
            train(settings, folder / name, parallel, resume=True)


def test_a_signal_to_one_rank_saves_the_last_finished_step_of_all(tmp_path, tiny_policy, jsonl_files):
    settings = run_settings(tiny_policy, jsonl_files) | {"save": {"save_steps": 0}, "evaluation": {"eval_steps": 3}}
    settings["task"] |= {"reward": "tiny:digits"}
    run_on_ranks(tmp_path, runs, settings, tmp_path)
    for parallel in KINDS:
        for place in ("reward", "update"):
            assert differences(tmp_path / f"{parallel}-whole", tmp_path / f"{parallel}-{place}") == []
