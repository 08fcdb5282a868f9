"""Rewards without right and wrong: filters go by their spread. A reward model is one."""

import io
import json
import shutil
from functools import partial

import pytest
import torch
from conftest import QUIET, same, train
from rich.console import Console
from safetensors.torch import load_file
from tiny import save_tiny_policy
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from python_trainer.data import Rollout, filter_scores, select_good
from python_trainer.errors import UserError
from python_trainer.run.directory import read_metrics
from python_trainer.tasks import Example, Task, reward_model
from python_trainer.tasks.rewards import REWARDS, score
from python_trainer.trainer import Trainer


def brief(prompts, completions, completion_ids, **columns):
    """Reward short answers, never above 0.5: by accuracy all answers are wrong."""
    return [-len(ids) / 12 for ids in completion_ids]


def group(*rewards, judged=False):
    """Return answers of these raw rewards, with misleading shaped ones; ``judged``: only accuracies tell."""
    return [
        Rollout([1], [2], reward=-i, accuracy=float(value > 0.5), filter_score=None if judged else value)
        for i, value in enumerate(rewards)
    ]


@pytest.mark.parametrize(("answers", "good"), [
    (group(1, 0, 1, judged=True), [1.0, 1.0]),
    (group(1, 1, judged=True), [1.0, 1.0]),
    (group(0, 0, judged=True), []),
    (group(-3.0, -1.0, -2.5), [-1.0]),
    (group(0.1, 0.1, 0.1), []),  # a third of whose sum is not 0.1
    (group(5.0, 7.0, 6.5), [7.0, 6.5]),
])  # fmt: skip
def test_good_answers_are_right_or_better_than_the_mean(answers, good):
    assert filter_scores(select_good(answers)) == good


@pytest.mark.parametrize(
    ("values", "judged"), [([1, 0], True), ([1, -1], True), ([0.6, 0], False), ([-3, -1], False), ([None, 1], True)]
)
def test_rewards_tell_whether_anything_is_right(values, judged):
    """The first function that gives a value tells; the other one's partial rewards do not count beside it."""
    partial = [0.6, 0.6] if values[0] is not None else [0.0, 0.6]
    task = Task("t", [], [], {"f": lambda **_: values, "partial": lambda **_: partial})
    assert (score(task, [Example("a")] * 2, ["", ""], [[], []]).filter_scores is None) == judged


@pytest.fixture
def length_config(make_config, gate_task):
    return partial(make_config, task=gate_task | {"reward": "test_real_rewards:brief"})


ALPHA = {"track_steps": 1, "first_step": 4, "refuse": False}


def test_every_accelerator_has_something_to_do(length_config, tmp_path):
    """By accuracy rpo remembers nothing, rhyme stores nothing, and alpha finds all candidates equal."""
    enabled = {"enabled": ["rhyme", "rpo", "drafts", "alpha"], "alpha": ALPHA, "rhyme": {"rare_share": 0}}
    trainer = train(length_config(max_steps=8, accelerators=enabled), tmp_path / "run")
    rows = read_metrics(tmp_path / "run")[1:]
    assert rows[-1]["rpo/remembered"] > 0 and max(row["rpo/informative"] for row in rows) > 0
    assert sum(row["rpo/given_tokens"] for row in rows) > 0
    stored = [rollout for rollouts in trainer.updates for rollout in rollouts if rollout.importance_cap is not None]
    assert stored and all(rollout.filter_score == rollout.reward for rollout in stored)
    assert min(row["rhyme/failed_groups"] for row in rows) < 1  # by accuracy all groups always fail
    attempts = [event for event in trainer.accelerators[-1].extrapolator.events if "tries" in event]
    assert attempts and all(
        candidate["before"] < 0 for event in attempts for candidate in event["tries"]
    )  # rewards, not accuracy
    assert trainer.accelerators[-1].extrapolator.answered[-1][1] < 0


def test_rhyme_tells_that_it_stands_aside_where_nothing_is_right(length_config, tmp_path):
    console = Console(record=True, width=400, file=io.StringIO())
    changes = {"accelerators": {"enabled": ["rhyme"]}}
    trainers = [
        Trainer(length_config(max_steps=3, **options), tmp_path / name, console=console)
        for name, options in (("plain", {}), ("rhyme", changes))
    ]
    for trainer in trainers:
        trainer.run()
    assert console.export_text().count("rhyme: no answer is right or wrong in this task") == 1
    assert same(*trainers)


def test_what_was_found_of_the_task_outlasts_an_interruption(length_config, tmp_path):
    config = length_config(max_steps=2, save={"save_steps": 1})
    train(config.model_copy(update={"max_steps": 1}), tmp_path / "run")
    assert not Trainer(config, tmp_path / "run", resume=True, console=QUIET).state.judged
    assert Trainer(config, tmp_path / "other", console=QUIET).state.judged


@pytest.fixture(scope="session")
def judge(tiny_policy, tmp_path_factory):
    """Return the folder of a reward model with a chat template."""
    folder = tmp_path_factory.mktemp("judge") / "verdicts"
    save_classifier(tiny_policy, folder)
    return folder


def save_classifier(policy, folder, labels=1):
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=labels)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0].upper() }}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def scored_alone(judge, text):
    model = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    ids = AutoTokenizer.from_pretrained(judge)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(ids).logits)


def test_a_reward_model_judges_prompt_and_answer(judge, monkeypatch):
    monkeypatch.setattr(reward_model, "BATCH_TOKENS", 12)  # several passes
    model = REWARDS.resolve(f"reward_model:{judge}")
    texts = [("AB", "C"), ("H", "0123456789"), ("AAAA", "BB"), ("C", ""), ("C", "D")]
    scores = model([prompt for prompt, _ in texts], [answer for _, answer in texts], completion_ids=None, other=None)
    assert scores == pytest.approx([scored_alone(judge, prompt + answer) for prompt, answer in texts], rel=1e-4)
    assert len(set(scores)) == 5
    chat = model([[{"role": "user", "content": "AB"}]], [[{"role": "assistant", "content": "C"}]])
    assert chat == pytest.approx([scored_alone(judge, "UABAC")], rel=1e-4)


def test_a_reward_model_reads_an_answer_that_continues_a_message_as_one_message(judge):
    prompt = [{"role": "user", "content": "AB"}, {"role": "assistant", "content": "C"}]
    scores = REWARDS.resolve(f"reward_model:{judge}")([prompt], [[{"role": "assistant", "content": "D"}]])
    assert scores == pytest.approx([scored_alone(judge, "UABACD")], rel=1e-4)
    assert scored_alone(judge, "UABACD") != pytest.approx(scored_alone(judge, "UABACAD"), rel=1e-4)


@pytest.mark.parametrize("pad_token_id", [None, 5])
def test_a_reward_model_scores_the_last_token_of_a_row_whatever_its_tokenizer_pads_with(judge, tmp_path, pad_token_id):
    """Here its pad token is its end token, in which the rows of a chat end."""
    tokenizer = AutoTokenizer.from_pretrained(judge)
    assert tokenizer.pad_token == tokenizer.eos_token == "<eos>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<eos>"
    tokenizer.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    plain.config.pad_token_id = pad_token_id
    plain.save_pretrained(tmp_path)
    texts = [("AB", "C"), ("H", "0123456789"), ("AAAA", "B"), *(("A", letter) for letter in "0123456789BCDEFGH")]
    messages = [[{"role": "user", "content": prompt}] for prompt, _ in texts]
    scores = REWARDS.resolve(f"reward_model:{tmp_path}")(
        messages, [[{"role": "a", "content": answer}] for _, answer in texts]
    )
    with torch.no_grad():
        rows = [tokenizer(prompt + answer + "<eos>", return_tensors="pt")["input_ids"] for prompt, answer in texts]
        expected = [float(plain.score(plain.model(row).last_hidden_state)[0, -1]) for row in rows]
    assert scores == pytest.approx(expected, rel=1e-4) and len({round(x, 5) for x in scores}) > 5


def test_a_reward_model_gets_the_first_token_of_its_tokenizer_once(judge):
    """A prompt may begin with it; the tokens in front of an answer are part of what is scored."""
    model = REWARDS.resolve(f"reward_model:{judge}")
    end = model.tokenizer.eos_token_id
    model.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=["<eos>", "$A"], special_tokens=[("<eos>", end)]
    )
    rows = []
    hook = model.model.register_forward_pre_hook
    hook(lambda _, args, inputs: rows.extend(inputs["input_ids"].tolist()), with_kwargs=True)
    model(["1", "<eos>1", "<eos><eos>1"], ["2"] * 3)
    assert [[token for token in row if token] for row in rows] == [[end, 1, 2], [end, 1, 2], [end, end, 1, 2]]


def test_no_pass_of_a_reward_model_lacks_a_token_to_pad_with():
    batches = list(reward_model.batches([3, 1, 2, 5, 4], max_rows=2))
    assert batches == [[1, 2], [0, 4], [3]]


def test_a_reward_model_reads_no_weights_outside_its_folder(judge, tmp_path):
    folder = shutil.copytree(judge, tmp_path / "judge")
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(tmp_path / "x.safetensors"), "../x.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"task.reward: .* of its own folder, got '../x.safetensors'"):
        REWARDS.resolve(f"reward_model:{folder}")


def test_training_by_a_reward_model(make_config, jsonl_files, judge, tmp_path):
    sets = {"evaluation": {"sets": {"more": str(jsonl_files[0])}}}
    trainer = train(make_config(task={"reward": f"reward_model:{judge}"}, **sets), tmp_path / "run")
    (prompt_set,) = trainer.prompts.sets
    assert prompt_set.task.reward_functions["verdicts"] is trainer.task.reward_functions["verdicts"], (
        "one on the device"
    )
    row = read_metrics(tmp_path / "run")[1]
    assert row["rewards/verdicts/mean"] == row["reward"] and row["grad_norm"] > 0 and not trainer.state.judged


def test_what_is_no_reward_model_is_named(make_config, tiny_policy, tmp_path):
    save_classifier(tiny_policy, tmp_path / "two", labels=2)
    save_tiny_policy(tmp_path / "policy")
    save_classifier(tiny_policy, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(json.dumps, tmp_path / "pickled" / "pytorch_model.bin")  # torch would import the function
    for path, words in (
        (tmp_path / "pickled", "pickled holds no sequence-classification model: Weights only load failed"),
        (tmp_path / "none", "none holds no sequence-classification model"),
        (tmp_path / "two", "has 1 label, .*two has 2"),
        (tmp_path / "policy", "policy is no reward model: it lacks the weights score.weight"),
    ):
        with pytest.raises(UserError, match=words):
            Trainer(make_config(task={"reward": f"reward_model:{path}"}), tmp_path / "run", console=QUIET)
