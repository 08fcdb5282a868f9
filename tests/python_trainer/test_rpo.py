"""Suffix rollouts."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from python_trainer.accelerators.base import RunContext
from python_trainer.accelerators.rhyme.database import RetrospectiveDatabase
from python_trainer.accelerators.rpo.accelerator import RPO, length_reward
from python_trainer.accelerators.rpo.answers import load_answers, save_answers
from python_trainer.accelerators.rpo.picture import draw_informative, informative_by_cut
from python_trainer.accelerators.rpo.settings import RPOSettings
from python_trainer.config import check_config
from python_trainer.data import Group, Rollout, merits
from python_trainer.errors import UserError
from python_trainer.objective import make_batch
from python_trainer.run import Trainer
from python_trainer.run_directory import read_metrics


def context(seed=0, step=1):
    return SimpleNamespace(step=step, seed=seed, telemetry={})


def planned(key=4, budget=20):
    return Group([1, 2], num_samples=3, max_new_tokens=budget, example=None, prompt_key=key)


def answered(rewards, key=4, ids=None):
    ids = ids or [[10 + i] * (i + 2) for i in range(len(rewards))]
    return [
        Rollout([1, 2], row, 0, [0.0] * len(row), "stop", prompt_key=key, reward=reward, accuracy=reward)
        for row, reward in zip(ids, rewards)
    ]


def remembering(answers, **settings):
    rpo = RPO(RPOSettings(**settings))
    rpo.answers, rpo.shortest = dict(answers), {key: min(len(answer), 8) for key, answer in answers.items()}
    return rpo


def test_first_visit_is_whole_then_a_prefix_of_a_remembered_answer():
    rpo, first = RPO(RPOSettings()), planned()
    rpo.plan(context(), [first])
    assert first.prefix_ids == [] and first.max_new_tokens == 20
    rpo.replay(context(), answered([0.0, 1.0, 0.0]))
    kept = rpo.answers[4]
    group = planned()
    assert rpo.plan(context(seed=9), [group]) == [group]
    assert len(group.prefix_ids) < len(kept) and group.prefix_ids == kept[: len(group.prefix_ids)]
    assert group.max_new_tokens == 20 - len(group.prefix_ids)
    other = planned(key=5)
    assert rpo.plan(context(), [other])[0].prefix_ids == []


@pytest.mark.parametrize(
    ("settings", "length", "longest"),
    [({}, 12, 12), ({"cut_share": 0.5}, 12, 6), ({"cut_share": 0.01}, 12, 1), ({"cut_tokens": 5}, 12, 5),
     ({"cut_tokens": 50}, 12, 12), ({"cut_share": 0.5, "cut_share_of": "shortest"}, 12, 4)],
)  # fmt: skip
def test_cut_is_uniform_up_to_its_longest(settings, length, longest):
    rpo = remembering({7: list(range(length))}, **settings)
    cuts = Counter()
    for seed in range(2000):
        group = planned(key=7)
        rpo.plan(context(seed), [group])
        cuts[length - len(group.prefix_ids)] += 1
        assert group.prefix_ids == list(range(len(group.prefix_ids)))
    assert set(cuts) == set(range(1, longest + 1))
    expected = 2000 / longest
    assert sum((count - expected) ** 2 / expected for count in cuts.values()) < 40  # chi-square, 11 degrees: p 4e-5


def test_longest_cut_follows_its_schedule():
    falling = remembering({0: [1] * 100}, cut_end_factor=0.25, cut_schedule_steps=2)
    assert [falling.longest_cut(0, step) for step in (1, 2, 3, 50)] == [100, 63, 25, 25]
    rising = remembering({0: [1] * 100}, cut_tokens=20, cut_end_factor=3, cut_schedule_steps=4)
    assert [rising.longest_cut(0, step) for step in (1, 2, 3, 5, 9)] == [20, 30, 40, 60, 60]
    beyond = remembering({0: [1] * 100}, cut_end_factor=5, cut_schedule_steps=1)
    assert beyond.longest_cut(0, 7) == 100
    with pytest.raises(ValueError, match="cut_schedule_steps must be at least 1"):
        RPOSettings(cut_end_factor=0.5)


def test_only_answers_worth_keeping_are_remembered():
    rpo, group = RPO(RPOSettings()), answered([0.0, 0.0])
    rpo.replay(context(), group)
    assert rpo.answers == {}  # none was right
    group = answered([1.0, 0.0, 1.0])
    group[0].finish_reason = "length"
    rpo.replay(context(), group)
    assert rpo.answers == {4: group[2].response_ids} and rpo.shortest == {4: 2}
    rpo.replay(context(), answered([0.0, 0.0]))
    assert rpo.answers == {4: group[2].response_ids}  # what was there stays
    every = RPO(RPOSettings(keep="any"))
    every.replay(context(), answered([0.0, 0.0]))
    assert every.answers
    cut_off = answered([1.0])
    cut_off[0].finish_reason = "length"
    other = RPO(RPOSettings(keep="any"))
    other.replay(context(), cut_off)
    assert other.answers == {}


def test_answers_longer_than_allowed_are_not_continued():
    rpo, group = remembering({4: list(range(21))}), planned()
    rpo.plan(context(), [group])
    assert group.prefix_ids == [] and group.max_new_tokens == 20


def test_cache_takes_the_best_answer_with_probability_epsilon():
    counts = Counter()
    for seed in range(2000):
        rpo = RPO(RPOSettings(epsilon=0.7, keep="any"))
        rpo.replay(context(seed), answered([0.0, 1.0, 0.5, 0.0]))
        counts[rpo.answers[4][0]] += 1
    assert 0.66 < counts[11] / 2000 < 0.74  # the best
    for other in (10, 12, 13):
        assert 0.07 < counts[other] / 2000 < 0.13  # 0.3 / 3 each
    ties = Counter()
    for seed in range(600):
        rpo = RPO(RPOSettings(epsilon=1.0))
        rpo.replay(context(seed), answered([1.0, 1.0, 0.0]))
        ties[rpo.answers[4][0]] += 1
    assert set(ties) == {10, 11} and min(ties.values()) > 200


def test_length_reward_known_values():
    # mean length 20, alpha 0.1: factors 1 / (1 + e^-1) = 0.7311, 0.5, 1 / (1 + e^1) = 0.2689
    lengths = [10, 20, 30]
    paper = length_reward([1.0, 1.0, 0.0], lengths, alpha=0.1, lift_wrong=True)
    assert paper == pytest.approx([0.731059, 0.5, 0.5], abs=1e-6)
    correct = length_reward([0.0, 1.0, 1.0], lengths, alpha=0.1, lift_wrong=False)
    assert correct == pytest.approx([0.0, 0.5, 0.5], abs=1e-6)
    assert length_reward([1.0], [10**6], alpha=1e3, lift_wrong=False) == [0.5]  # no overflow


def test_length_reward_leaves_raw_accuracy_alone():
    rpo = RPO(RPOSettings(length_reward="correct", epsilon=1.0))
    rollouts = answered([1.0, 1.0, 0.0])
    assert rpo.replay(context(), rollouts) == []
    assert rpo.answers[4] == rollouts[0].response_ids  # the best by the shaped reward
    assert [r.accuracy for r in rollouts] == [1.0, 1.0, 0.0]
    assert rollouts[0].reward > rollouts[1].reward == 0.5 and rollouts[2].reward == 0


def test_metrics_count_informative_groups_by_cut():
    rpo = remembering({key: [1] * 20 for key in range(4)})
    groups = []
    for key, (prefix, rewards) in enumerate([(19, [1.0, 1.0]), (18, [1.0, 0.0]), (5, [1.0, 0.0]), (0, [0.0, 0.0])]):
        group = answered(rewards, key=key, ids=[[1] * 20] * 2)
        for rollout in group:
            rollout.group, rollout.prefix_len = key, prefix
        groups += group
    seen = context()
    rpo.replay(seen, groups)
    assert seen.telemetry == {
        "rpo/groups_cut_10": 2, "rpo/informative_cut_10": 1, "rpo/groups_cut_80": 1, "rpo/informative_cut_80": 1,
        "rpo/groups_cut_100": 1, "rpo/informative_cut_100": 0, "rpo/hit_rate": 0.75, "rpo/informative": 0.5,
        "rpo/prefix_share": 42 / 80, "rpo/prefix_tokens": 42 / 4, "rpo/given_tokens": 84, "rpo/remembered": 4,
    }  # fmt: skip


def test_report_draws_informative_groups_against_the_cut(tmp_path):
    for seed, rows in enumerate(
        [[{"step": 0}, {"step": 1, "rpo/groups_cut_10": 3, "rpo/informative_cut_10": 1, "rpo/hit_rate": 1.0}],
         [{"step": 1, "rpo/groups_cut_10": 1, "rpo/informative_cut_10": 0},
          {"step": 2, "rpo/groups_cut_100": 4, "rpo/informative_cut_100": 4}]]
    ):  # fmt: skip
        folder = tmp_path / "rpo" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [tmp_path / "rpo" / f"seed-{seed}" for seed in range(2)]
    assert informative_by_cut(runs[0]) == {10: (3, 1)}
    assert informative_by_cut(runs[1]) == {10: (1, 0), 100: (4, 4)}
    assert draw_informative({"rpo": runs}, tmp_path / "cut.png") and (tmp_path / "cut.png").stat().st_size > 5000
    assert (
        not draw_informative({"baseline": [tmp_path]}, tmp_path / "none.png") and not (tmp_path / "none.png").exists()
    )


def test_state_round_trip():
    rpo = remembering({3: [1, 2, 3], 0: [7], 9: list(range(50))})
    other = RPO(RPOSettings())
    other.load_state_dict(rpo.state_dict())
    assert other.answers == rpo.answers and other.shortest == rpo.shortest
    empty = RPO(RPOSettings())
    empty.load_state_dict(RPO(RPOSettings()).state_dict())
    assert empty.answers == {}


ROOM = {"max_completion_length": 60}  # enough for the tiny policy to end most of its answers


def rpo_config(make_config, **changes):
    settings = {"keep": "any", **changes.pop("rpo", {})}
    return make_config(rollout=ROOM, accelerators={"enabled": ["rpo"], "rpo": settings}, **changes)


def test_training_with_suffix_rollouts(make_config, tmp_path):
    """12 prompts at 4 a step: from step 4 on most groups start from a prefix, and fewer tokens are generated."""
    config = rpo_config(make_config, max_steps=9, rpo={"fill": 0})
    trainer = Trainer(config, tmp_path / "run", console=Console(quiet=True))
    seen = []
    original = trainer.learner.update

    def spy(rollouts, number):
        seen.append(rollouts)
        return original(rollouts, number)

    trainer.learner.update = spy
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    assert all(row["rpo/hit_rate"] == 0 for row in rows[:3]) and rows[-1]["rpo/hit_rate"] > 0.5
    assert rows[-1]["completions/generated_length"] < rows[-1]["completions/mean_length"]
    for rollouts in seen:
        for start in range(0, len(rollouts), 4):
            group = rollouts[start : start + 4]
            shared = group[0].prefix_len
            assert len({tuple(r.response_ids[:shared]) for r in group}) == 1  # one cut for the whole group
            assert all(r.prefix_len == shared and len(r.response_ids) <= 60 for r in group)
    # the sampler's log-probabilities are those of the trainer, prefix or not
    assert all(row["sampling/logp_difference/max"] < 1e-4 for row in rows)
    for name in ("generated", "prefill", "cached", "trained"):
        assert sum(row[f"tokens/{name}"] for row in rows) == summary[f"{name}_tokens"] > 0


def test_filled_before_the_first_step_and_on_the_clock(make_config, tmp_path):
    config = rpo_config(make_config, max_steps=2, rpo={"fill": 3})
    trainer = Trainer(config, tmp_path / "run", console=Console(quiet=True))
    summary = trainer.run()
    rows = read_metrics(tmp_path / "run")
    filled = len(load_answers(tmp_path / "run" / "rpo_answers.safetensors", trainer.prompts["train"],
                              trainer.policy.tokenizer))  # fmt: skip
    assert filled > 4 and rows[1]["rpo/remembered"] == filled and rows[1]["rpo/hit_rate"] > 0
    assert rows[0]["total/generated_tokens"] > 12 and rows[0]["time/training_s"] > 0
    assert summary["accelerator_s"]["rpo"] > 0
    # the same answers as those of the same policy, prompt by prompt
    again = Trainer(config, tmp_path / "again", console=Console(quiet=True))
    one = again._answer_once([5], 0)[0]
    assert one.response_ids == again._answer_once(range(12), 0)[5].response_ids
    assert one.response_ids != again._answer_once([5], 1)[0].response_ids


def test_filling_tries_again_what_found_no_answer(tmp_path):
    asked = []

    def answer(keys, attempt):
        asked.append((list(keys), attempt))
        return [answered([float(key % 3 == attempt)], key=key)[0] for key in keys]

    rpo = RPO(RPOSettings(fill=2))
    run = RunContext(tmp_path, None, [[1]] * 7, answer, 0, Console(quiet=True), lambda call: call())
    rpo.fill(run)
    assert asked == [(list(range(7)), 0), ([1, 2, 4, 5], 1)] and sorted(rpo.answers) == [0, 1, 3, 4, 6]


def test_file_of_answers_is_read_instead_of_filling(make_config, tmp_path):
    path = tmp_path / "answers" / "first.safetensors"
    config = rpo_config(make_config, max_steps=1, rpo={"cache_path": str(path), "fill": 4})
    runs = []
    for name in ("a", "b"):
        trainer = Trainer(config, tmp_path / name, console=Console(quiet=True))
        summary = trainer.run()
        runs.append((trainer.accelerators[0].answers, read_metrics(tmp_path / name)[0]["total/generated_tokens"]))
        assert summary["steps"] == 1
    assert runs[0][0] == runs[1][0] and runs[0][1] > 0 and runs[1][1] == 0
    content = path.read_bytes()
    for damaged in (content[:-3], content[:200], b"", content[:-4] + b"\x01\x02\x03\x04"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="first.safetensors is damaged"):
            Trainer(config, tmp_path / "c", console=Console(quiet=True)).run()
    assert [p.name for p in path.parent.iterdir()] == ["first.safetensors"]


def test_file_of_answers_knows_its_prompts_and_tokenizer(tmp_path):
    class Tokenizer:
        def __init__(self, vocab):
            self.vocab = vocab

        def get_vocab(self):
            return self.vocab

    path, answers = tmp_path / "answers.safetensors", {2: [5, 6], 0: [], 1: [2**31 - 1]}
    prompts, tokenizer = [[1], [2, 3], [4]], Tokenizer({"a": 0, "b": 1})
    save_answers(path, answers, prompts, tokenizer)
    assert load_answers(path, prompts, Tokenizer({"b": 1, "a": 0})) == answers
    with pytest.raises(UserError, match="other tokenizer"):
        load_answers(path, prompts, Tokenizer({"a": 1, "b": 0}))
    with pytest.raises(UserError, match="other prompts"):
        load_answers(path, [[1], [2], [3, 4]], tokenizer)
    save_file({"keys": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="holds no remembered answers"):
        load_answers(path, prompts, tokenizer)
    with pytest.raises(UserError, match="cannot write"):
        save_answers(tmp_path / "answers.safetensors" / "x", answers, prompts, tokenizer)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"loss_type": "grpo", "beta": 0.01},
        {"loss_type": "dapo", "epsilon_high": 0.28, "prefix_in_loss": True},
        {"advantage": "gae", "num_iterations": 2},
        {"advantage": "gae", "prefix_in_loss": True},
    ],
)
def test_interrupted_run_ends_with_the_same_weights_and_answers(make_config, tmp_path, algorithm):
    schedule = {"cut_end_factor": 0.2, "cut_schedule_steps": 4, "length_reward": "correct"}
    config = rpo_config(make_config, max_steps=5, algorithm=algorithm, rpo=schedule)
    whole = Trainer(config, tmp_path / "whole", console=Console(quiet=True))
    whole.run()
    first = rpo_config(make_config, max_steps=3, algorithm=algorithm, rpo=schedule)
    Trainer(first, tmp_path / "parts", console=Console(quiet=True)).run()
    rest = Trainer(config, tmp_path / "parts", resume=True, console=Console(quiet=True))
    rest.run()
    assert rest.accelerators[0].answers == whole.accelerators[0].answers
    for a, b in zip(whole.policy.model.parameters(), rest.policy.model.parameters()):
        assert torch.equal(a, b)


def test_dynamic_sampling_refills_with_suffixes_and_counts_every_round(make_config, tmp_path):
    """Rewards that are 0 or 1 by the last token: short cuts leave many groups without spread, which are drawn again."""
    config = rpo_config(make_config, max_steps=3, rpo={"cut_share": 0.3})
    values = config.model_dump(mode="json")
    values["rollout"] |= {"dynamic_sampling": True, "max_sampling_rounds": 3}
    values["task"]["reward"] = "conftest:even"
    trainer = Trainer(check_config(values, source="test"), tmp_path / "run", console=Console(quiet=True))
    trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    groups = [sum(v for k, v in row.items() if k.startswith("rpo/groups_cut_")) for row in rows]
    informative = [sum(v for k, v in row.items() if k.startswith("rpo/informative_cut_")) for row in rows]
    assert max(row["sampling/rounds"] for row in rows) > 1
    for row, total, kept in zip(rows, groups, informative):
        assert total >= 4 and kept / total == pytest.approx(row["rpo/informative"])
        assert row["rpo/informative"] == pytest.approx(row["sampling/kept_groups"])
    assert any(row["rpo/hit_rate"] > 0 for row in rows)


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_sharing_prefixes_changes_the_tokens_computed_but_not_the_weights(make_config, tmp_path, advantage):
    runs = []
    for share in (True, False):
        optimizer = {"share_prefixes": share, "learning_rate": 1e-3}
        config = rpo_config(make_config, max_steps=2, optimizer=optimizer, algorithm={"advantage": advantage})
        trainer = Trainer(config, tmp_path / str(share), console=Console(quiet=True))
        runs.append((trainer.run()["trained_tokens"], list(trainer.policy.model.parameters())))
    assert runs[0][0] < 0.95 * runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1]):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("whole", "tokens"), [(True, [3, 4]), (False, [1, 2])])
def test_prefix_tokens_take_part_in_the_loss_where_asked_for(make_config, whole, tokens):
    config = make_config(algorithm={"prefix_in_loss": whole})
    rollouts = answered([1.0, 0.0], ids=[[5, 6, 7], [5, 6, 8, 9]])
    for rollout in rollouts:
        rollout.prefix_len, rollout.logprobs = 2, rollout.logprobs[2:]
    batch = make_batch(rollouts, config.algorithm, torch.device("cpu"))
    assert batch.loss_tokens.tolist() == tokens and batch.score_prefix is whole
    assert batch.sampler.flat.isnan().tolist() == [True, True, False, True, True, False, False]


def test_continued_answers_are_not_taken_for_the_policys_own(make_config, jsonl_files, tmp_path):
    """Neither in rewards and accuracy, nor in what alpha and the database go by."""
    accelerators = {
        "enabled": ["rpo", "alpha", "rhyme"],
        "rpo": {"fill": 0, "keep": "any"},
        "alpha": {"first_step": 99, "gate_prompts": 6},
        "rhyme": {"database": str(tmp_path / "history.db"), "history_ratio": 0, "rescue": False},
    }
    config = make_config(max_steps=20, accelerators=accelerators, task={"gate_path": str(jsonl_files[1])},
                         rollout={"prompts_per_step": 2})  # fmt: skip
    trainer = Trainer(config, tmp_path / "run", console=Console(quiet=True))
    seen, original = [], trainer.learner.update

    def spy(rollouts, number):
        seen.append(rollouts)
        return original(rollouts, number)

    trainer.learner.update = spy
    trainer.run()
    rows = read_metrics(tmp_path / "run")[1:]
    known, recorded, level = [], [], None
    for row, rollouts in zip(rows, seen):
        begun = [r for r in rollouts if not r.prefix_len]
        continued = [r for r in rollouts if r.prefix_len]
        for words, answers in (("", begun), ("continued/", continued)):
            for name in ("reward", "accuracy"):
                worth = [getattr(answer, name) for answer in answers]
                assert row.get(words + name) == (pytest.approx(sum(worth) / len(worth)) if worth else None)
        assert row.get("continued/share", 0) == len(continued) / len(rollouts)
        if begun:
            level = sum(r.reward for r in begun) / len(begun)
            known.append([row["step"], sum(merits(begun)), len(begun)])
        recorded.append(level)
    assert any("reward" not in row for row in rows), "a step whose answers were all continued"
    trajectory = RetrospectiveDatabase(str(tmp_path / "history.db")).trajectory(1)
    assert [step.reward for step in trajectory] == pytest.approx(recorded)
    alpha = next(a for a in trainer.accelerators if a.name == "alpha")
    assert alpha.answered == known and len(known) < 20
