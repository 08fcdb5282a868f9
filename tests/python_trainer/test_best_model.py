"""Models and adapters that a run writes, and which checkpoints are kept."""

import json

import pytest
import torch
from conftest import train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer.callbacks import Callback
from python_trainer.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.errors import UserError
from python_trainer.evaluation import Evaluator
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.run_state import RunState, best_evaluated
from python_trainer.tasks.rewards import Scores

JUDGED = {"reward": ["tiny:mostly_digits", "conftest:digits"], "reward_weights": [0, 1]}


@pytest.fixture(autouse=True)
def grades(monkeypatch):
    """Accuracies that evaluations find, by step."""
    found = [0.1, 0.2, 0.6, 0.3, 0.4]

    def answer(evaluator, asked, rows):
        accuracy = found[evaluator.prompts.state.step]
        return Scores({}, [-accuracy] * 6, [accuracy] * 6)

    monkeypatch.setattr(Evaluator, "answer", answer)
    return found


def test_best_of_those_that_are_there():
    state = RunState(evaluations=[[0, 0.9, -1], [2, 0.5, 0.5], [4, 0.5, 0.4], [6, 0.1, 0.8]])
    assert best_evaluated(state, [2, 4, 5, 6]) == 4 and best_evaluated(state, [5]) is None


class Unjudged(Callback):
    def on_step(self, trainer, step, metrics):
        trainer.state.judged = step == 1


def test_rewards_decide_between_all_checkpoints_once_nothing_is_right_or_wrong(make_config, tmp_path, grades):
    """Also those that were evaluated before a reward has shown it."""
    grades[1] = 0.9  # the fewer right, the higher the reward here
    options = {"task": JUDGED, "evaluation": {"eval_steps": 1}, "save": {"save_steps": 1, "save_total_limit": 9}}
    config = make_config(max_steps=3, **options)
    train(config, tmp_path / "run", callbacks=[Unjudged])
    assert not (tmp_path / "run" / "best").exists()  # the last is


def test_the_best_checkpoint_is_kept_and_written_as_a_model(make_config, tmp_path):
    save = {"save_steps": 1, "save_total_limit": 1}
    finished = train(make_config(task=JUDGED, evaluation={"eval_steps": 1}, save=save), tmp_path / "run")
    kept = list_checkpoints(finished.checkpointer.checkpoints)
    assert [path.name for path in kept] == ["step-000002", "step-000004"]
    for name, checkpoint in (("best", kept[0]), ("model", kept[1])):
        folder = finished.folder / name
        saved = load_checkpoint(checkpoint)["model"]
        got = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(got[name], value) for name, value in saved.items())
        assert AutoTokenizer.from_pretrained(folder)("AB")["input_ids"] == finished.policy.encode(["AB"])[0]
    last = load_checkpoint(kept[1])["model"]
    assert all(torch.equal(p, last[name]) for name, p in finished.policy.model.named_parameters() if name in last)


def test_a_last_step_that_is_the_best_is_the_model_alone(make_config, tmp_path, grades):
    options = {"task": JUDGED, "evaluation": {"eval_steps": 1}, "save": {"save_steps": 1}}
    train(make_config(**options), tmp_path / "run")
    assert (tmp_path / "run" / "best").is_dir()
    grades.append(0.9)
    train(make_config(max_steps=5, **options), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "model").is_dir() and not (tmp_path / "run" / "best").exists()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 40, 5]])).logits


def test_an_adapter_is_that_of_the_merged_model_and_can_be_trained_from(make_config, tmp_path, tiny_policy):
    peft = pytest.importorskip("peft")
    lora, optimizer = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}, {"learning_rate": 0.05}
    train(make_config(max_steps=2, model={"lora": lora}, optimizer=optimizer), tmp_path / "run")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert (logits(merged) - logits(base)).abs().max() > 1e-2
    adapter = tmp_path / "run" / "adapter"
    wanted = json.loads((adapter / "adapter_config.json").read_text())
    assert sorted(wanted["target_modules"]) == ["down_proj", "q_proj"]
    assert wanted["base_model_name_or_path"] == str(tiny_policy)
    ours = load_policy(ModelConfig(path=str(adapter), device="cpu")).model
    for model in (ours, peft.PeftModel.from_pretrained(base, adapter)):
        torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-4)
    again = make_config(max_steps=1, model={"path": str(adapter), "lora": lora}, optimizer=optimizer)
    train(again, tmp_path / "again")
    further = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model")
    assert not torch.equal(logits(further), logits(merged))
    upon = load_policy(ModelConfig(path=str(tmp_path / "again" / "adapter"), device="cpu"))  # an adapter upon another
    torch.testing.assert_close(logits(upon.model), logits(further), rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.eos_token, tokenizer.chat_template = "A", "{{ messages }}"
    tokenizer.save_pretrained(adapter)  # as trainers of adapters do
    policy = load_policy(ModelConfig(path=str(adapter), device="cpu"))
    assert policy.eos_token_ids == [17, 63] and policy.tokenizer.chat_template
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: weight * torch.nan for name, weight in weights.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=f"4 weights of {adapter} hold NaN or infinity"):
        load_policy(ModelConfig(path=str(adapter), device="cpu"))
    other = {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)}
    save_file(other, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match="does not fit its model: Found missing adapter keys"):
        load_policy(ModelConfig(path=str(adapter), device="cpu"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "gone"}, r"the base of the adapter .*there is no folder gone"),
        ({"base_model_name_or_path": "small"}, "lacks adapter_model.safetensors"),
        ({}, "names no base model"),
    ],
)
def test_an_adapter_without_its_base_is_named(tmp_path, config, message):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_an_adapter_on_tied_embeddings_is_merged_as_it_computes(tmp_path, tiny_policy, options):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tiny_policy)
    assert base.config.tie_word_embeddings
    settings = peft.LoraConfig(r=2, init_lora_weights=False, base_model_name_or_path=str(tiny_policy), **options)
    adapted = peft.get_peft_model(base, settings).eval()
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    merged = load_policy(ModelConfig(path=str(tmp_path / "adapter"), device="cpu")).model
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-3)
    assert not merged.config.tie_word_embeddings
