"""Drafts in the engine and in training: the same tokens in fewer forward passes, as often as they are probable."""

from collections import Counter

import numpy as np
import pytest
import torch
from conftest import QUIET, train
from paged import GREEDY, MODELS, VOCAB, assert_same, engine_for, make, mixed_requests, prompts

from bench.studies.lossless import distribution, p_value, setting_p_values, uniform_p_value
from python_trainer.accelerators.drafts import Drafts
from python_trainer.accelerators.settings import DraftsSettings
from python_trainer.data import Request
from python_trainer.rollout.drafting import EXPENSIVE_PASS, Drafter, pass_overhead
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels import RolloutHistory

SETTINGS = [GREEDY, SamplingParams(seed=3), SamplingParams(temperature=0.7, top_p=0.8, top_k=9, seed=1)]


def drafter(pass_overhead=1e9, **options) -> Drafter:
    return Drafter(RolloutHistory(), pass_overhead=pass_overhead, **options)


def fed(requests, completions, corrupt=None, **options) -> Drafter:
    """Make a drafter with the answers in its history; ``corrupt`` changes every so many tokens of them."""
    filled = drafter(**options)
    answers = iter(completions)
    for request in requests:
        for _ in range(request.num_generations):
            ids = [*request.prefix_ids, *next(answers).ids]
            if corrupt:
                ids = [(token + (i % corrupt == 0)) % VOCAB for i, token in enumerate(ids)]
            filled.history.add(request.prompt_ids, ids)
    return filled


def drafted(model, requests, sampling, expected, drafter, **options):
    """Check that an engine with this drafter draws the expected tokens and pins nothing; return the engine."""
    engine = engine_for(model, **options)
    engine.drafter = drafter
    assert_same(engine.generate(requests, sampling), expected)
    assert engine.cache.stats["blocks_pinned"] == 0 and drafter.history.stats["handles"] == 0
    return engine


@pytest.mark.parametrize(("name", "sampling"), list(zip(MODELS, SETTINGS)))
@pytest.mark.parametrize("fused", [False, True])
def test_same_tokens_with_a_good_and_a_bad_history(name, sampling, fused):
    model = make(name)
    requests = mixed_requests()
    plain = engine_for(model, fused=fused)
    expected = plain.generate(requests, sampling)
    for corrupt in (None, 5):
        stats = drafted(model, requests, sampling, expected, fed(requests, expected, corrupt), fused=fused).stats
        assert stats["generated_tokens"] == plain.stats["generated_tokens"]
        assert 0 < stats["accepted_tokens"] <= stats["draft_tokens"]
        assert corrupt is None or stats["accepted_tokens"] < stats["draft_tokens"]
        assert stats["sample_steps"] < (0.9 if corrupt is None else 1) * plain.stats["sample_steps"]
        assert stats["forward_passes"] <= plain.stats["forward_passes"]


@pytest.mark.parametrize("longest", [1, 6])
def test_a_right_draft_saves_a_pass_for_each_of_its_tokens(monkeypatch, longest):
    """A single draft after the first token: all of it is kept, and nothing of it is offered again."""
    model = make()
    requests = [Request(prompts([9])[0], max_new_tokens=20)]
    plain = engine_for(model)
    expected = plain.generate(requests, GREEDY)
    drafter = fed(requests, expected, max_tokens=longest)
    draft = Drafter.draft

    def draft_once(self, samples, room, budget):
        once = [len(sample.rollout.logprobs) for sample in samples] == [1]
        return draft(self, samples, room, budget if once else 0)

    monkeypatch.setattr(Drafter, "draft", draft_once)
    stats = drafted(model, requests, GREEDY, expected, drafter).stats
    assert stats["draft_tokens"] == stats["accepted_tokens"] == longest
    assert stats["forward_passes"] == plain.stats["forward_passes"] - longest


def test_prompts_without_answers_are_left_alone():
    """Looking up what other prompts suggest would cost more than the few passes that it saves, unless they are dear."""
    model = make()
    requests = mixed_requests()
    expected = engine_for(model).generate(requests, GREEDY)
    cheap = drafter(pass_overhead=EXPENSIVE_PASS - 1)
    dear = drafter(pass_overhead=EXPENSIVE_PASS)
    for request, completion in zip(requests, expected):  # the right answers, under another prompt
        for filled in (cheap, dear):
            filled.history.add([*request.prompt_ids, 1], completion.ids)
    assert drafted(model, requests, GREEDY, expected, cheap).stats["draft_tokens"] == 0
    assert drafted(model, requests, GREEDY, expected, dear).stats["accepted_tokens"] > 0
    cheap.history.add(requests[0].prompt_ids, expected[0].ids)
    assert drafted(model, requests, GREEDY, expected, cheap).stats["accepted_tokens"] > 0


@pytest.mark.parametrize("blocks", [20, 26, 40])
def test_preemption_and_little_memory(blocks):
    model = make()
    requests = mixed_requests()
    expected = engine_for(model).generate(requests, SETTINGS[1])
    options = {"blocks": blocks, "max_batch_tokens": 24, "max_sequences": 7}
    stats = drafted(model, requests, SETTINGS[1], expected, fed(requests, expected, corrupt=7), **options).stats
    assert stats["accepted_tokens"] > 0 and (blocks > 20 or stats["preemptions"] > 0)


def test_ends_inside_a_draft():
    """An end-of-sequence token among accepted draft tokens ends the answer there."""
    model = make()
    requests = [Request(prompt, max_new_tokens=30) for prompt in prompts([5, 9, 13])]
    free = engine_for(model).generate(requests, GREEDY)
    eos = [completion.ids[7] for completion in free]
    expected = engine_for(model, eos=eos).generate(requests, GREEDY)
    assert [c.finish_reason for c in expected] == ["stop"] * 3 and all(len(c.ids) <= 8 for c in expected)
    engine = drafted(model, requests, GREEDY, expected, fed(requests, free), eos=eos)  # knows how answers would go on
    assert engine.stats["generated_tokens"] == sum(len(c.ids) for c in expected)


def test_draft_tokens_behind_the_end_of_an_answer_are_not_accepted(monkeypatch):
    """A draft of the second to the seventh token, of which the fourth ends the answer: three are used."""
    model, requests = make(), [Request(prompts([7])[0], max_new_tokens=20)]
    (free,) = engine_for(model).generate(requests, GREEDY)
    eos = free.ids[3]
    assert free.ids.index(eos) == 3

    def draft(self, samples, room, budget):  # no samples before the prompt is computed
        return np.array(free.ids[1:7] * len(samples)), np.full(len(samples), 6)

    monkeypatch.setattr(Drafter, "draft", draft)
    engine = engine_for(model, eos=eos)
    engine.drafter = drafter()
    (answer,) = engine.generate(requests, GREEDY)
    assert answer.ids == free.ids[:4]
    stats = engine.stats
    assert (stats["draft_tokens"], stats["accepted_tokens"], stats["generated_tokens"]) == (6, 3, 4)


@pytest.mark.parametrize("seed", [2, 3], ids=["without drafts", "with drafts"])
def test_tokens_come_as_often_as_their_probabilities(seed):
    """First and second tokens in two settings, of which the test of the frequencies has more."""
    assert min(setting_p_values(seed)[0]) > 1e-3


def test_drafts_are_off_where_a_pass_has_no_overhead():
    model = make()
    requests = mixed_requests()
    expected = engine_for(model).generate(requests, GREEDY)
    stats = drafted(model, requests, GREEDY, expected, fed(requests, expected, pass_overhead=0.0)).stats
    assert stats["draft_tokens"] == 0 < stats["sample_steps"]
    assert drafter(pass_overhead=30.0).token_cost(10) == 0.25
    assert pass_overhead({8: 1.0, 64: 10.0}) == 0.0


def learning(folder):
    """Return what a run learnt: metrics without those of time and drafts."""
    skipped = ("time/", "drafts/", "tokens_per_second", "rollout_tokens_per_second")
    return [{key: value for key, value in row.items() if not key.startswith(skipped)} for row in read_metrics(folder)]


@pytest.fixture
def dear_passes(monkeypatch):
    """Make drafts always pay."""
    monkeypatch.setattr("python_trainer.accelerators.drafts.measure_overhead", lambda engine: 1e6)


@pytest.mark.parametrize("other_accelerators", [[], ["rpo"]])
def test_training_is_the_same_with_drafts(make_config, tmp_path, dear_passes, other_accelerators):
    """12 prompts at 4 a step: from step 4 on every prompt comes back."""
    settings = {"max_steps": 6, "optimizer": {"learning_rate": 1e-3}}
    for name, enabled in (("plain", other_accelerators), ("drafts", [*other_accelerators, "drafts"])):
        train(make_config(**settings, accelerators={"enabled": enabled}), tmp_path / name)
    for drafted_row, expected in zip(learning(tmp_path / "drafts"), learning(tmp_path / "plain"), strict=True):
        assert drafted_row == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert drafted_row.get("reward") == expected.get("reward")
    steps = read_metrics(tmp_path / "drafts")[1:]
    assert all(row["drafts/tokens_per_step"] >= 1 for row in steps)
    assert sum(row["drafts/offered_tokens"] for row in steps[3:]) > 0
    assert max(row["drafts/tokens_per_step"] for row in steps[3:]) > 1
    assert all(0 <= row["drafts/acceptance"] <= 1 and 0 <= row["drafts/off_share"] <= 1 for row in steps)


def test_a_history_is_cut_to_what_is_kept_when_it_is_loaded(monkeypatch):
    saved = Drafts(DraftsSettings())
    loaded = Drafts(DraftsSettings())
    for epoch in range(4):
        saved.history.add([epoch], [1] * 10, epoch=epoch)
    monkeypatch.setattr("python_trainer.accelerators.drafts.HISTORY_TOKENS", 25)
    loaded.load_state_dict(saved.state_dict())
    assert loaded.history.stats["tokens"] == 20
    assert [loaded.history.longest_prompt([epoch]) for epoch in range(4)] == [0, 0, 1, 1]


def test_metrics_are_of_all_rounds_of_a_step(make_config, tmp_path, dear_passes):
    """Groups of one sort only: dynamic sampling goes on to its last round."""
    options = {"rollout": {"dynamic_sampling": True, "max_sampling_rounds": 3}, "accelerators": {"enabled": ["drafts"]}}
    config = make_config(max_steps=3, task={"reward": "test_dynamic_sampling:always"}, **options)
    trainer = Trainer(config, tmp_path / "run", console=QUIET)
    step = trainer.step
    step_stats = []

    def spy(number):
        stats = trainer.engine.stats
        row = step(number)
        step_stats.append({name: count - stats[name] for name, count in trainer.engine.stats.items()})
        return row

    trainer.step = spy
    trainer.run()
    for row, counts in zip(read_metrics(tmp_path / "run")[1:3], step_stats):  # an evaluation is part of the last step
        assert row["sampling/rounds"] == 3 and row["drafts/offered_tokens"] == counts["draft_tokens"]
        assert all(row[f"drafts/{name}"] == counts[name] for name in ("forward_passes", "accepted_tokens"))
    assert step_stats[1]["draft_tokens"] > 0


def test_cost_is_measured_once(make_config, tmp_path):
    calls = []
    config = {"accelerators": {"enabled": ["drafts"]}}

    def run(steps, seconds, **options):
        trainer = Trainer(make_config(max_steps=steps, **config), tmp_path / "run", console=QUIET, **options)
        trainer.engine.pass_seconds = lambda n, t: calls.append((n, t)) or seconds(n * t)
        trainer.run()
        return trainer.accelerators[0].pass_overhead

    assert run(2, lambda tokens: 0.01 + 0.001 * tokens) == pytest.approx(10.0) and len(calls) == 3
    assert read_metrics(tmp_path / "run")[-1]["drafts/pass_overhead"] == pytest.approx(10.0)
    assert run(3, lambda tokens: 1.0, resume=True) == pytest.approx(10.0) and len(calls) == 3


FALSE_ALARM = 1e-6  # probability that a correct engine fails one of these tests


@pytest.mark.slow
def test_frequencies_of_tokens_are_their_probabilities():
    results = [setting_p_values(seed) for seed in range(20)]
    values = [p for pair, _ in results for p in pair if p is not None]
    assert len(values) > 10 and {drawn["drafts"] for _, drawn in results} == {0, 1}
    assert min(values) > FALSE_ALARM / (2 * len(values)) and uniform_p_value(values) > FALSE_ALARM / 2


def test_a_token_too_often_is_seen():
    probs = distribution(torch.tensor([1.0, 1.0, 0.0, -20.0]), 1.0, 1.0, 0)
    even = Counter({token: round(10_000 * p) for token, p in enumerate(probs.tolist())})
    assert p_value(even, probs) > 0.9
    assert p_value(even + Counter({0: 800}), probs) < FALSE_ALARM
    assert p_value(Counter({3: 1}), distribution(torch.tensor([1.0, 1.0, 0.0, -20.0]), 1.0, 0.9, 0)) == 0
    assert p_value(Counter({1: 5}), torch.tensor([0.0, 1.0])) is None
