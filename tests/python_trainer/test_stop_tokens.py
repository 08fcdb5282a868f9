"""Which tokens end answers: in training, after supervised steps, in the exported model; special tokens that do not."""

import io
import json
from typing import ClassVar

import pytest
from conftest import QUIET, merged, save_tiny_policy, train
from rich.console import Console
from support import write_jsonl
from transformers import AutoTokenizer, GenerationConfig

from python_trainer.command_line.sft import Sft
from python_trainer.config import load_config
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.environment import Environment
from python_trainer.loop.parts import make_engine
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.turns import missing_stop_token
from python_trainer.trainer import Trainer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
START, END, TOOL, EOS = 60, 61, 62, 63


@pytest.fixture
def folder(tmp_path):
    """Return a policy whose tokenizer ends texts by <eos>, and whose template ends turns by <|im_end|>."""
    folder = save_tiny_policy(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab = {letter: token for letter, token in tokenizer.get_vocab().items() if token < START}
    special = {"<|im_start|>": START, "<|im_end|>": END, "<tool>": TOOL, "<eos>": EOS}
    tokenizer = type(tokenizer)(
        vocab=vocab | special, merges=[], unk_token=None, pad_token="<eos>", eos_token="<eos>",
        additional_special_tokens=list(special)[:3],
    )  # fmt: skip
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    assert tokenizer("1<|im_end|><tool>")["input_ids"] == [1, END, TOOL]
    return folder


def load(folder):
    return load_policy(ModelConfig(path=str(folder), device="cpu"))


def test_the_end_token_of_the_template_ends_answers(folder, make_config, tmp_path):
    policy = load(folder)
    assert policy.eos_token_ids == [END, EOS] and policy.turn_end == [END]
    assert policy.ending("12") == [EOS] and policy.ending([{"role": "user", "content": "12"}]) == [END]
    assert make_engine(make_config(), policy, tmp_path, RankGroup()).eos_token_ids == {END, EOS}
    policy.save(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == [END, EOS]
    assert load(tmp_path / "saved").eos_token_ids == [END, EOS]


@pytest.mark.parametrize(("generation", "ends"), [(50, [50, EOS]), ([EOS, 51], [51, EOS]), (None, [2, EOS])])
def test_the_generation_config_decides(tmp_path, generation, ends):
    """A config may keep the number of another tokenizer, which is a letter here."""
    folder = save_tiny_policy(tmp_path / "policy", eos_token_id=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load(folder).eos_token_ids == ends
    if generation is None:
        (folder / "generation_config.json").unlink()
        assert load(folder).eos_token_ids == ends


@pytest.mark.parametrize("chat", [True, False])
def test_supervised_answers_end_in_the_right_token(folder, lessons, tmp_path, chat):
    changes = {"model": {"path": str(folder)}, "task": {"chat": chat}, "sft": {"epochs": 1}}
    run = Sft(load_config(merged(lessons, changes)), tmp_path / "run", console=QUIET)
    assert {row.response_ids[-1] for row in [*run.rows, *run.held_out]} == {END if chat else EOS}
    assert run.rows[0].prompt_ids == ([START, 17, 18, 19, END, START] if chat else [17, 18, 19])


def test_a_stop_token_that_seems_missing_is_named_once(folder, make_config, tmp_path):
    policy = load(folder)
    policy.eos_token_ids.remove(END)
    cut = [[1, END, START, 2], [3, 4, END], [5, TOOL, END], [6]]
    assert missing_stop_token(policy, cut) is None, "half is not most"
    assert missing_stop_token(policy, cut[:3]) == END and missing_stop_token(policy, []) is None
    console = Console(file=io.StringIO(), width=1000)
    trainer = Trainer(make_config(model={"path": str(folder)}), tmp_path / "run", console=console)
    trainer.policy.eos_token_ids.remove(END)
    rollouts = [Rollout([1], ids, finish_reason="length") for ids in cut[:3]]
    rollouts += [Rollout([1], [2, EOS], finish_reason="stop")]
    observed = Rollout([1], [1, START, 2], finish_reason="length", response_mask=[True, False, True])
    for number, row, answers in (
        (1, {"completions/clipped_ratio": 0.5}, rollouts),
        (2, {"completions/clipped_ratio": 0.75}, [observed, observed, observed, rollouts[-1]]),
        (3, {"completions/clipped_ratio": 0.75}, rollouts),
        (4, {"completions/clipped_ratio": 0.75}, rollouts),
    ):
        trainer.warn(number, row, answers)
    assert console.file.getvalue().strip().splitlines()[-1] == (
        "note: in step 3 75% of the answers were cut at rollout.max_completion_length, and most of these hold "
        "'<|im_end|>', which does not end answers: if it should, add 61 to eos_token_id in generation_config.json of "
        "the model"
    )
    assert console.file.getvalue().count("does not end answers") == 1


class Listening(Environment):
    """Note what the policy says."""

    heard: ClassVar[list[str]] = []

    def step(self, text):
        self.heard.append(text)
        return "0", 0.0, len(text) % 2 == 0


def shows_special(prompts, completions, completion_ids, **columns):
    """Return 1 where the completion is the text of its tokens without the end; else end the run."""
    for completion, ids in zip(completions, completion_ids):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        assert text.count("<tool>") == ids.count(TOOL) and "<eos>" not in text and "<|im_end|>" not in text
    return [float(TOOL in ids) for ids in completion_ids]


@pytest.mark.parametrize("environment", [None, "test_stop_tokens:Listening"])
def test_special_tokens_reach_rewards_and_environments(folder, make_config, tmp_path, environment):
    task = {"reward": "test_stop_tokens:shows_special", "environment": environment}
    rollout = {"num_generations": 16, "temperature": 3.0}
    config = make_config(max_steps=1, task=task, model={"path": str(folder)}, rollout=rollout)
    trainer = train(config, tmp_path / "run")
    answers = [rollout for rollouts in trainer.updates for rollout in rollouts]
    assert sum(TOOL in answer.response_ids for answer in answers) > 3
    if environment is not None:
        assert any("<tool>" in text or "<|im_start|>" in text for text in Listening.heard)
        assert not any("<eos>" in text or "<|im_end|>" in text for text in Listening.heard)


def test_prompts_that_answers_continue_are_counted(folder, make_config, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}]
    rows += [{"messages": [{"role": "user", "content": "1"}]}]
    write_jsonl(tmp_path / "train.jsonl", rows)
    console = Console(file=io.StringIO(), width=1000)
    config = make_config(task={"train_path": str(tmp_path / "train.jsonl")}, model={"path": str(folder)})
    trainer = Trainer(config, tmp_path / "run", console=console)
    assert trainer.prompts.ids["train"] == [[START, 1, END, START, 2], [START, 1, END, START]]
    note = "note: 1 of 2 train prompts end in a message of the assistant, which answers continue\n"
    assert console.file.getvalue().count(note) == 1
