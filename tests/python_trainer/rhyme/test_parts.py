"""Sketches, what is recorded of a step, execution matching, the sample bank, gradient sketches and retrodiction."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import save_tiny_policy
from scipy.stats import spearmanr
from torch.nn.functional import cosine_similarity

import python_trainer.model.policy
from python_trainer.accelerators.rhyme.bank import SampleBank, for_tokenizer
from python_trainer.accelerators.rhyme.evidence import SIZE, examine
from python_trainer.accelerators.rhyme.matching import Curve, Matches, Stage, align, curve_of, rhyming_stages
from python_trainer.accelerators.rhyme.recording import GatheredStep
from python_trainer.accelerators.rhyme.records import StepRecord, prompt_key
from python_trainer.accelerators.rhyme.retrodiction import FEATURES, Retrodictor, alignments, rank_correlation
from python_trainer.accelerators.rhyme.sketch import PARTS, byte_trigrams, histogram, sketch_of, stack
from python_trainer.data import Rollout
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from tools.policies.training import byte_tokenizer

from .conftest import make_sample

BINS = sum(PARTS.values())


def answer(text, *, nats=1.0, tokens=4, group=0, accuracy=1.0, prefix=0):
    ids = list(range(tokens))
    logprobs = [-nats / max(tokens - prefix, 1)] * (tokens - prefix)
    return Rollout(
        [1], ids, prefix, logprobs, "stop", prompt_key=0, group=group, text=text, reward=accuracy, accuracy=accuracy
    )


def test_a_sketch_does_not_depend_on_the_tokenizer():
    """The same texts with the same information, in few tokens or in many."""
    few = sketch_of([[answer("12+34=46\nA:46", nats=3.0, tokens=3), answer("1+1=2", tokens=2)]])
    many = sketch_of([[answer("12+34=46\nA:46", nats=3.0, tokens=13), answer("1+1=2", tokens=5)]])
    assert all(torch.equal(few[name], many[name]) for name in PARTS)
    assert few["successes"].tolist() == [0] * 8 + [1] and few["lengths"].sum() == 2
    assert stack(few).shape == (BINS,)


def test_every_part_of_a_sketch_tells_policies_apart():
    base = histogram(stack(sketch_of([[answer("12+34=46", nats=2.0)]])))
    for other in (answer("the answer is", nats=2.0), answer("12+34=46" * 9, nats=18.0), answer("12+34=46", nats=0.01),
                  answer("12+34=46", nats=2.0, accuracy=0.0)):  # fmt: skip
        assert (histogram(stack(sketch_of([[other]]))) - base).abs().sum() > 0.5
    assert torch.allclose(base.sum(), torch.tensor(float(len(PARTS))))


def test_trigrams_are_counted_all():
    assert byte_trigrams(b"").sum() == byte_trigrams(b"ab").sum() == 0
    assert byte_trigrams(b"abcabc").sum() == 4 and byte_trigrams(b"abcabc").max() >= 2
    assert sketch_of([[answer("")]])["ngrams"].sum() == 0  # an empty answer is one, too


def test_what_is_recorded_is_of_answers_from_their_start():
    """And of the step before where there are none."""

    def group(reward, prefix_len, text):
        return [Rollout([1], [2, 3], prefix_len, [-1.0] * (2 - prefix_len), text=text, reward=reward, accuracy=reward)]

    example = SimpleNamespace(prompt="p")
    context = SimpleNamespace(step=1, task=SimpleNamespace(train=[example]))
    gathered = GatheredStep()
    first, _ = gathered.add(context, [group(0.25, 1, "begun")], [])
    assert first.reward == 0.25, "there is nothing else"
    both, _ = gathered.add(context, [group(0.75, 1, "begun")], [])
    assert both.reward == 0.5, "of all rounds"
    whole, _ = gathered.add(context, [group(1.0, 0, "from its start")], [])
    alone, _ = GatheredStep().add(context, [group(1.0, 0, "from its start")], [])
    context.step = 2
    after, _ = gathered.add(context, [group(0.0, 1, "begun")], [])
    for record in whole, after:
        assert record.reward == record.accuracy == 1.0
        assert all(torch.equal(record.sketch[part], alone.sketch[part]) for part in alone.sketch)


def run_of(run_id, rewards, style=None):
    """A run whose policy writes in a style that changes with its reward."""
    counts = torch.zeros(len(rewards), BINS)
    for row, reward in zip(counts, rewards if style is None else style):
        row[int(255 * reward)] = 10
        row[256 + 5] = row[256 + 32 + 5] = row[256 + 56 + round(8 * reward)] = 1
    return Curve(run_id, torch.arange(1, len(rewards) + 1), torch.tensor(rewards), counts)


def rising(steps, top=0.95):
    return [top / (1 + math.exp(-10 * (i / steps - 0.5))) for i in range(steps)]


OPTIONS = {"window": 8, "fraction": 0.2, "reward_weight": 0.5, "reward_scale": 0.25}


def test_the_stage_is_found_where_the_rewards_are_alike():
    history = [run_of(7, rising(60)), run_of(8, [0.05] * 60)]
    query = run_of(0, rising(60)[25:33])
    best = rhyming_stages(query, history, **OPTIONS)[0]
    assert best.run_id == 7 and abs(best.start - 26) <= 2 and abs(best.end - 33) <= 2 and best.score > 0.95


def test_the_stage_is_found_in_a_run_of_half_the_speed():
    best = rhyming_stages(run_of(0, rising(40)[14:22]), [run_of(7, rising(80))], **OPTIONS)[0]
    assert abs(best.start - 29) <= 4 and abs(best.end - 44) <= 4 and best.end - best.start > 8


def test_a_run_that_stalls_low_does_not_match_one_that_is_finished():
    """It would, were curves divided by their own maximum."""
    stages = rhyming_stages(run_of(0, [0.3] * 8), [run_of(7, [0.95] * 40)], **OPTIONS | {"reward_weight": 1.0})
    assert stages[0].score < 0.01
    assert Matches(stages, threshold=0.7, lookahead=4).score(7, 20) == 0


def test_the_share_of_stages_that_is_kept():
    history, query = [run_of(i, rising(64)) for i in range(3)], run_of(0, rising(64)[10:18])
    total = len(align(query, history, 8))
    assert total >= 9
    for fraction in (0.05, 0.2, 0.5, 1.0):
        stages = rhyming_stages(query, history, **OPTIONS | {"fraction": fraction})
        assert len(stages) == math.ceil(fraction * total)
        assert [s.score for s in stages] == sorted((s.score for s in stages), reverse=True)


def test_what_the_policy_does_counts_as_well_as_its_rewards():
    same, other = run_of(1, [0.5] * 12), run_of(2, [0.5] * 12, style=[0.9] * 12)
    stages = rhyming_stages(run_of(0, [0.5] * 8), [other, same], **OPTIONS | {"fraction": 1.0})
    assert stages[0].run_id == 1 and stages[-1].run_id == 2 and stages[0].score > stages[-1].score + 0.2


def test_no_history_no_stages():
    assert rhyming_stages(run_of(0, [0.5] * 4), [], **OPTIONS) == []
    assert rhyming_stages(run_of(0, [0.5] * 4), [run_of(1, [])], **OPTIONS) == []
    assert rhyming_stages(run_of(0, [0.5] * 4), [run_of(1, [0.5])], **OPTIONS)[0].start == 1


def test_answers_of_a_stage_and_just_beyond():
    matches = Matches([Stage(3, 10, 14, 0.9), Stage(3, 1, 12, 0.75), Stage(4, 1, 9, 0.6)], threshold=0.7, lookahead=2)
    assert [matches.score(3, step) for step in (1, 9, 10, 16, 17)] == [0.75, 0.75, 0.9, 0.9, 0.0]
    assert matches.score(4, 5) == 0.0 and matches.score(5, 5) == 0.0


def test_rewards_are_mapped_from_the_scale_of_the_task():
    record = StepRecord(1, 0, 3.0, 0.5, sketch_of([[answer("abc")]]))
    assert curve_of(1, [record], -1.0, 7.0).rewards.tolist() == [0.5]
    assert curve_of(1, [record]).rewards.tolist() == [1.0] and len(curve_of(1, [])) == 0


def test_the_bank_keeps_the_best_and_the_newest():
    bank = SampleBank(per_prompt=3, size=5)
    for step, reward in ((1, 1.0), (2, 0.5), (3, 1.0), (4, 1.0)):
        bank.add(make_sample(step, reward, text=f"{step}"), fresh=True)
    assert [s.step for s in bank] == [4, 3, 1]
    bank.add(make_sample(9, 1.0, text="old"), fresh=False)  # behind what is as good
    assert [s.step for s in bank] == [4, 3, 1]
    bank.add(make_sample(4, 1.0, text="4"), fresh=True)  # known
    bank.add(make_sample(7, 1.0, text="3"), fresh=True)  # the same text at another step
    assert [s.step for s in bank] == [7, 4, 3]
    for i in range(4):
        bank.add(make_sample(1, text="x", key=f"p{i}"), fresh=True)
    assert len(bank) == len(list(bank)) == 5
    assert [s.step for s in bank.candidates("a", lambda s: s.step - 3, 5)] == [7]
    bank.by_prompt["b"] = [make_sample(step, text=text) for step, text in ((1, "x"), (2, "y"), (3, "x"))]
    assert [s.step for s in bank.candidates("b", lambda s: s.step, 5)] == [3, 2]  # a text once
    del bank.by_prompt["b"]
    other = SampleBank(3, 5)
    other.load_state_dict(bank.state_dict())
    assert [(s.prompt_key, s.text, s.step) for s in other] == [(s.prompt_key, s.text, s.step) for s in bank]


def test_answers_in_other_tokens_are_encoded_again_without_logprobs():
    tokenizer = byte_tokenizer()
    own = tokenizer_fingerprint(tokenizer)
    assert own == tokenizer_fingerprint(byte_tokenizer())
    mine, foreign = make_sample(), make_sample(text="12+3=15")
    mine.tokenizer, foreign.tokenizer = own, "other"
    kept = for_tokenizer([mine, foreign], tokenizer, own)
    assert kept[0].logprobs[0] == -0.5 and kept[0].response_ids == [1, 2, 3]
    assert tokenizer.decode(kept[1].response_ids, skip_special_tokens=True) == "12+3=15"
    assert kept[1].response_ids[-1] == tokenizer.eos_token_id and all(math.isnan(x) for x in kept[1].logprobs)


def test_prompts_are_named_by_their_text():
    assert prompt_key("12+3=") != prompt_key("12+4=") and len(prompt_key("é")) == 32
    assert prompt_key([{"role": "user", "content": "a"}]) == prompt_key([{"content": "a", "role": "user"}])


@pytest.mark.parametrize(("vocab", "tolerance"), [(64, 1e-4), (300, 0.2)])
def test_gradient_sketches_keep_the_angles_of_last_layer_gradients(tmp_path, vocab, tolerance):
    """Exactly where nothing needs projecting, about otherwise."""
    folder = save_tiny_policy(tmp_path / "p", tie_word_embeddings=False, vocab=vocab)
    policy = load_policy(ModelConfig(path=str(folder), device="cpu"))
    answers = [Rollout([20, 21, 22], ids) for ids in ([1, 2, 3], [1, 2, 4, 9], [30, 31], [5] * 6)]
    found = examine(policy, answers, [[math.nan] * len(a.response_ids) for a in answers], temperature=0.7, cap=1.0,
                    max_tokens=12)  # fmt: skip
    weight, exact = policy.model.lm_head.weight, []
    for row, a in enumerate(answers):
        logits = policy.model(torch.tensor([[*a.prompt_ids, *a.response_ids[:-1]]])).logits[0, 2:] / 0.7
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(a.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(found.logprobs[row], logprobs.detach(), rtol=1e-4, atol=1e-5)
        exact.append(torch.autograd.grad(logprobs.sum(), weight)[0].flatten())
    exact = torch.stack(exact)
    assert found.gradients.shape == (4, SIZE * SIZE) and found.weights.tolist() == [1.0] * 4
    angles = cosine_similarity(found.gradients[:, None], found.gradients[None], dim=2)
    torch.testing.assert_close(angles, cosine_similarity(exact[:, None], exact[None], dim=2), rtol=0, atol=tolerance)


@pytest.mark.parametrize("limit", [0, 4 * 300 * 7])
def test_more_logits_than_are_held_at_once_change_nothing(tmp_path, monkeypatch, limit):
    """One row at a time, and seven of fifteen."""
    policy = load_policy(ModelConfig(path=str(save_tiny_policy(tmp_path / "p", vocab=300)), device="cpu"))
    answers = [Rollout([20, 21, 22], ids) for ids in ([1, 2, 3], [1, 2, 4, 9], [30, 31], [5] * 6)]
    behaviour = [[-5.0] * len(a.response_ids) for a in answers]
    settings = {"temperature": 0.7, "cap": 1.0, "max_tokens": 99}
    whole = examine(policy, answers, behaviour, **settings)
    monkeypatch.setattr(python_trainer.model.policy, "LARGEST_LOGITS", limit)
    blocks = examine(policy, answers, behaviour, **settings)
    torch.testing.assert_close(blocks.logprobs, whole.logprobs, rtol=1e-5, atol=1e-5)
    for name in ("entropy", "weights", "gradients"):
        torch.testing.assert_close(getattr(blocks, name), getattr(whole, name), rtol=1e-4, atol=1e-5)
    assert whole.gradients.norm(dim=1).min() > 0.1


def test_importance_weights_are_truncated_and_unknown_ones_are_left_out(tiny_policy):
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    answers = [Rollout([20, 21], [1, 2]), Rollout([20, 21], [1, 2]), Rollout([20, 21], [1, 2])]
    now = examine(policy, answers[:1], [[math.nan] * 2], temperature=1.0, cap=1.0, max_tokens=99, gradients=False)
    a, b = now.logprobs[0].tolist()
    # half as likely now, four times as likely now (cut to 2), unknown
    behaviour = [[a + math.log(2), b + math.log(2)], [a - math.log(4), b], [math.nan, b + math.log(2)]]
    seen = examine(policy, answers, behaviour, temperature=1.0, cap=2.0, max_tokens=99, gradients=False)
    assert seen.gradients is None and seen.weights.tolist() == pytest.approx([0.5, 1.5, 0.75], rel=1e-4)


def test_alignment_leaves_the_own_prompt_out():
    gradients = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    held_out = {0: torch.tensor([5.0, 0.0]), 1: torch.tensor([0.0, 3.0])}
    found = alignments(gradients, torch.tensor([0, 1, 9]), held_out)
    assert found.tolist() == pytest.approx([0.0, 1.0, 3 / 34**0.5])
    assert alignments(gradients[:1], torch.tensor([0]), {0: torch.ones(2)}).isnan().all()
    assert alignments(gradients, torch.tensor([0, 1, 9]), {}).isnan().all()


def test_rank_correlation_is_spearmans():
    a, b = torch.randint(0, 6, (40,)), torch.randn(40)
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation(b, b) == pytest.approx(1) and rank_correlation(torch.ones(40), b) == 0


def test_the_network_learns_to_rank_what_it_has_not_seen():
    retrodictor = Retrodictor(0)
    assert not retrodictor.ready and retrodictor.predict(torch.randn(3, len(FEATURES))).tolist() == [0, 0, 0]

    def step():
        x = torch.randn(32, len(FEATURES))
        x[:, 3] = 1.0  # a constant feature
        return x, x[:, 0] * 0.3 - x[:, 5] ** 2 + 0.05 * torch.randn(32) + 7 * torch.randn(())

    for _ in range(12):
        retrodictor.learn(*step())
    x, y = step()
    assert retrodictor.ready and rank_correlation(retrodictor.predict(x), y) > 0.7
    other = Retrodictor(1)
    other.load_state_dict(retrodictor.state_dict())
    assert torch.equal(other.predict(x), retrodictor.predict(x))
