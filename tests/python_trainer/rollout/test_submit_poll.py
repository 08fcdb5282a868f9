"""Requests that come while others are being generated, and answers that are handed out as they end."""

import pytest
from paged import engine_for, make, mixed_requests

from python_trainer.data import Request
from python_trainer.rollout.engine import SamplingParams

SAMPLING = SamplingParams(temperature=0.9, seed=5)


@pytest.fixture(scope="module")
def model():
    return make()


def content(rollouts):
    return [(list(r.prompt_ids), r.response_ids, r.finish_reason) for r in rollouts]


def test_requests_may_come_while_others_are_generated(model):
    """And every rollout is handed out once, as the very object that submit gave."""
    requests = mixed_requests()
    wanted = engine_for(model).generate(requests, SAMPLING)
    engine = engine_for(model)
    first = engine.submit(requests[:2], SAMPLING)
    assert not any(rollout.finish_reason for rollout in first)
    done = engine.poll()
    assert done and len(done) < len(first)
    later = engine.generate(requests[2:], SAMPLING)  # waits for its own, and keeps what else ends for the next poll
    assert content(later) == content(wanted[len(first) :])
    while some := engine.poll():
        assert all(rollout.finish_reason for rollout in some)
        done += some
    assert sorted(map(id, done)) == sorted(map(id, first)) and content(first) == content(wanted[: len(first)])
    assert engine.stats["generated_tokens"] == sum(len(r.logprobs) for r in [*first, *later])


def test_requests_without_room_are_finished_at_once_and_still_handed_out(model):
    engine = engine_for(model)
    rollouts = engine.submit([Request([1, 2], max_new_tokens=0, num_samples=2)], SAMPLING)
    assert [r.finish_reason for r in rollouts] == ["length"] * 2
    assert list(map(id, engine.poll())) == list(map(id, rollouts)) and engine.poll() == []
    engine.generate(mixed_requests()[:1], SamplingParams(temperature=0.5))  # nothing is in the way
