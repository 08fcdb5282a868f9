"""The prompts of a run: their order, and notes on how they end."""

import pytest
from rich.console import Console
from tokenizers.processors import TemplateProcessing

from python_trainer.keyed import prompt_order
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.prompts import odd_prompts
from python_trainer.trainer import Trainer


def test_every_epoch_visits_each_prompt_once(make_config, tmp_path):
    prompts = Trainer(make_config(), tmp_path / "run", console=Console(quiet=True)).prompts
    first, second = ([key for _ in range(4) for key in prompts.draw(3)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12)) and first != second
    assert first + second == prompt_order(0, 0, 24, 12) and prompts.state.prompts == 24


def append_eos(policy):
    processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", policy.tokenizer.eos_token_id)])
    policy.tokenizer.backend_tokenizer.post_processor = processor


USER, BEGUN = {"role": "user", "content": "34"}, {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    ("prompts", "change", "said"),
    [
        (["12", [USER]], bool, []),
        (["12", [USER, BEGUN]], bool, ["1 of 2 prompts end in a message of the assistant: it is closed"]),
        (["12", "34"], append_eos, ["2 of 2 prompts end in the end token '<eos>', which the tokenizer of "]),
        (["12"], lambda policy: policy.eos_token_ids.append(17), ["is the ordinary text 'A', so an answer ends at"]),
    ],
)
def test_prompts_with_an_end_that_is_rarely_intended_are_noted(tiny_policy, prompts, change, said):
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    change(policy)
    notes = list(odd_prompts(policy, prompts, policy.encode(prompts)))
    assert len(notes) == len(said) and all(text in note for text, note in zip(said, notes))
