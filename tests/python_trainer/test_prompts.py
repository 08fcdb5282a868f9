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


@pytest.fixture
def notes_on(tiny_policy):
    """Notes on prompts, for a policy that a function has changed."""
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def notes(prompts, change=bool):
        change(policy)
        return list(odd_prompts(policy, prompts, policy.encode(prompts)))

    return notes


def test_nothing_is_noted_of_usual_prompts(notes_on):
    assert notes_on(["12", [{"role": "user", "content": "34"}]]) == []


def test_a_prompt_that_begins_the_answer_is_noted(notes_on):
    begun = [{"role": "user", "content": "34"}, {"role": "assistant", "content": "7"}]
    (note,) = notes_on(["12", begun])
    assert note.startswith("1 of 2 prompts end in a message of the assistant: it is closed")


def test_an_end_token_behind_prompts_is_noted(notes_on):
    def append_eos(policy):
        tokenizer = policy.tokenizer
        processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = processor

    (note,) = notes_on(["12", "34"], append_eos)
    assert note.startswith("2 of 2 prompts end in the end token '<eos>', which the tokenizer of ")


def test_an_end_token_that_is_a_letter_is_noted(notes_on):
    (note,) = notes_on(["12"], lambda policy: policy.eos_token_ids.append(17))
    assert "is the ordinary text 'A', so an answer ends at the first one" in note
