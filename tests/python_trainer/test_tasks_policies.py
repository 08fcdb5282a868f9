"""The shipped policies and how they are made; the tasks of mixed difficulty, which are frozen."""

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from python_trainer.config import load_config, read_yaml
from python_trainer.data import Request
from python_trainer.model.hub import SHIPPED, policy_folder
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine
from python_trainer.tasks.rewards import score
from python_trainer.tasks.sums import SumsSettings
from tools.policies import sums as pretrain
from tools.policies import training
from tools.policies.sums import ALL, SHORT, Aim, Phase, Sums
from tools.policies.training import byte_tokenizer, new_policy, save, train

PROMPTS = 128


def judge(policy, task, examples, longest, sampling, samples=1):
    """Return the accuracy of so many answers to each example."""
    requests = [
        Request(ids, num_generations=samples, sample_id=samples * i, max_new_tokens=longest)
        for i, ids in enumerate(policy.encode([example.prompt for example in examples]))
    ]
    engine = PagedEngine(policy.inference_model, eos_token_ids=policy.eos_token_ids)
    ids = [rollout.response_ids for rollout in engine.generate(requests, sampling)]
    owners = [example for example in examples for _ in range(samples)]
    return score(task, owners, [policy.decode(row) for row in ids], ids).accuracy


def test_the_small_policy_leaves_room():
    """About half of the answers are right at temperature 1; the standard error is 0.04. So pretraining finds."""
    policy = load_policy(ModelConfig(path="small", device="cpu", dtype="float32"))
    task = SumsSettings(variant="short").load()
    success_rates = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        right = judge(policy, task, task.test[:PROMPTS], 320, SamplingParams(temperature=temperature))
        success_rates[name] = sum(right) / PROMPTS
    assert 0.3 <= success_rates["sampled"] <= 0.7 and success_rates["greedy"] >= 0.6
    assert pretrain.right_answers(policy.model, "short", PROMPTS) == success_rates


def test_together_they_are_small():
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*")) <= 8_000_000


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda folder: folder.name)
def test_shipped_policies_load_as_bfloat16_with_their_tokenizer(folder):
    policy = AutoModelForCausalLM.from_pretrained(folder)
    assert policy.config.model_type == "qwen2" and policy.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = byte_tokenizer()
    assert tokenizer.get_vocab() == expected.get_vocab() and len(tokenizer) == policy.config.vocab_size
    assert policy.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_tokenizer_is_one_token_a_byte():
    tokenizer = byte_tokenizer()
    text = "12+34=46\nA:46 é"
    assert tokenizer.encode(text + "<|im_end|>") == [*text.encode(), tokenizer.eos_token_id]
    assert tokenizer.decode([*text.encode(), tokenizer.eos_token_id], skip_special_tokens=True) == text
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_pretraining_never_sees_a_prompt_of_the_task():
    corpus = Sums(0, Phase("two terms", 1, 1e-3, 0.0, mixture=SHORT, slips=False))
    prompts = {bytes(ids[:length]).decode() for ids, length in (corpus.example() for _ in range(5000))}
    task = SumsSettings().load()
    assert not prompts & {example.prompt for example in [*task.train, *task.gate, *task.test]}


def test_pretraining_gives_the_same_policy_twice(tmp_path):
    def made(name):
        torch.manual_seed(0)
        policy = new_policy("small")
        phase = Phase("slips", 2, 1e-3, 1.0, mixture=ALL, slips=True)
        train(policy, phase, Sums(0, phase), 4)
        save(policy, tmp_path / name)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert made("first") == made("second")


def test_time_ends_a_phase_with_the_rate_at_zero(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: clock[0])
    rates = []

    def learn(policy, chunks):
        clock[0] += 10.0
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        return torch.zeros(())

    monkeypatch.setattr(training, "learn", learn)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]))
    phase = Phase("timed", 1000, 1e-3, 1.0, seconds=100, mixture=SHORT, slips=False)
    assert train(new_policy("tiny"), phase, Sums(0, phase), 1) == 10
    assert rates[1:] == sorted(rates[1:], reverse=True)[:9] and rates[-1] == pytest.approx(0.1 * 0.7e-3)


def test_shares_of_slips_are_settled_by_what_is_measured(monkeypatch):
    measured = iter([(0.9, 0.9), (0.2, 0.8), (0.5, 0.9)])
    monkeypatch.setattr(pretrain, "right_answers", lambda *_: dict(zip(("sampled", "greedy"), next(measured))))
    shares = []
    monkeypatch.setattr(pretrain, "train", lambda policy, phase, *_: shares.append(phase.mixture[-1].slip_share))
    phase = Phase("slips", 1, 1e-3, 1.0, mixture=[pretrain.Part(1.0, {2: 1.0}, 0.5)], slips=True)
    rows = pretrain.settle(None, phase, Aim("short", 4), 0, 4)
    assert [round(row["sampled"], 3) for row in rows] == [0.9, 0.2, 0.5]
    assert shares[0] == pytest.approx(1 - 0.5 * 0.5 / 0.9)  # fewer slips were learnt than shown: show more
    assert shares[1] == pytest.approx(1 - (1 - shares[0]) * 0.5 / 0.2)


def test_tiny_goes_the_whole_way(tmp_path, monkeypatch, rounding_processor):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # other tests need theirs
    pretrain.main(["--size", "tiny", "--output", str(tmp_path)])
    facts = json.loads((tmp_path / pretrain.FACTS).read_text())
    assert facts["parameters"] == AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters()
    assert facts["steps"] == {"short sums": 2, "slips": 1} and len(facts["settled"]) == 2
    assert all(0 <= row[name] <= 1 for row in facts["settled"] for name in ("sampled", "greedy", "slip_share"))


def test_a_missing_gpu_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        pretrain.main(["--device", "cuda", "--output", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().err


# of 64 test prompts with 8 answers each: mean p, share of groups without a spread
FROZEN = {
    "sums": "35010d092609260e35a6afaab75e59f87bd1f25110e38172bcecf43471e9a94f",
    "lattice_paths": "671bc08129e4c654be275616fe5986edce9c8659da89e2cc029b3408a97c9f84",
}
PROMISED = {"sums": (0.49, 0.63), "lattice_paths": (0.32, 0.74)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISED)
def test_policies_are_as_right_as_promised(name):
    config = load_config(name)
    task = config.task.load()
    policy = load_policy(config.model)
    right = judge(policy, task, task.test[:64], config.rollout.max_completion_length, SamplingParams(seed=1), samples=8)
    groups = [sum(right[8 * i : 8 * i + 8]) for i in range(64)]
    success_rate, uniform_share = PROMISED[name]
    assert sum(right) / 512 == pytest.approx(success_rate, abs=0.07)
    assert sum(count in (0, 8) for count in groups) / 64 == pytest.approx(uniform_share, abs=0.1)
    assert {0, 8} <= set(groups)  # some are never right, some always


@pytest.mark.parametrize("name", FROZEN)
def test_tuned_tasks_are_frozen(name):
    """Prompts, policy and configuration: whoever changes one makes another task, and the records of this one void."""
    config = load_config(name)
    task = config.task.load()
    settings = read_yaml(name)
    splits = [[[x.prompt, x.columns.get("answer")] for x in split] for split in (task.train, task.gate, task.test)]
    digest = hashlib.sha256(json.dumps([splits, settings], sort_keys=True).encode())
    digest.update((policy_folder(name) / "model.safetensors").read_bytes())
    assert digest.hexdigest() == FROZEN[name]
