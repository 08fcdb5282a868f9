"""Learning rates follow from the step, by one schedule: those of policy, critic and updates on stored answers."""

from unittest.mock import Mock

import pytest
import torch
from conftest import QUIET, graded
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from python_trainer.model.schedule import schedule
from python_trainer.trainer import Trainer

STEPS = 11  # of a schedule, and two more, as when a run goes on with fewer max_steps
WARMUP = 4


def torch_rates(decay, warmup_steps):
    """Return the rate of each step by schedulers of torch; the peak is 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    decay_steps = STEPS - warmup_steps
    decays = {
        "constant": lambda: ConstantLR(optimizer, factor=1.0),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, total_iters=decay_steps),
        "cosine": lambda: CosineAnnealingLR(optimizer, decay_steps),
    }
    scheduler = decays[decay]()
    if warmup_steps:
        warmup = LinearLR(optimizer, 1 / warmup_steps, 1.0, total_iters=warmup_steps - 1)
        scheduler = SequentialLR(optimizer, [warmup, decays[decay]()], [warmup_steps])
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps", [0, WARMUP])
@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_schedule_is_that_of_schedulers_of_torch(decay, warmup_steps):
    options = {"warmup_steps": warmup_steps, "decay": decay, "max_steps": STEPS}
    factors = [schedule(step, **options) for step in range(1, STEPS + 3)]
    assert factors[:STEPS] == pytest.approx(torch_rates(decay, warmup_steps), abs=1e-12)
    assert factors[STEPS:] == [float(decay == "constant")] * 2


def test_policy_and_critic_have_rates_of_their_own_and_one_schedule(make_config, tmp_path):
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 2, "lr_scheduler_type": "linear"}
    config = make_config(
        max_steps=6, algorithm={"advantage": "gae"}, critic={"learning_rate": 7e-3}, optimizer=optimizer
    )
    learner = Trainer(config, tmp_path, console=QUIET).learner
    for step, factor in ((1, 0.5), (2, 1.0), (4, 0.75), (6, 0.25)):
        row = learner.update(graded([0, 1] * 8), step)
        assert row["learning_rate"] == pytest.approx(3e-3 * factor)
        for adamw, peak in ((learner.optimizer.adamw, 3e-3), (learner.critic.optimizer.adamw, 7e-3)):
            assert [group["lr"] for group in adamw.param_groups] == pytest.approx([peak * factor] * 2)


def test_the_rate_rises_over_five_updates_on_stored_answers(make_config, tmp_path):
    trainer = Trainer(make_config(), tmp_path, console=QUIET)
    trainer.accelerators = [Mock(before_step=Mock(return_value=[[]] * 7), spec=["name", "before_step"])]
    trainer.accelerators[0].name = "stub"
    trainer.learner.update = Mock(return_value={"tokens/trained": 0})
    trainer.train_on_stored(Mock(step=1))
    scales = [call.kwargs["lr_scale"] for call in trainer.learner.update.call_args_list]
    assert scales == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
