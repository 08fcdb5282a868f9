from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import python_trainer.tasks
from python_trainer.rollout import PagedEngine, Request, SamplingParams
from python_trainer.tasks import TaskConfig, load_task
from python_trainer.tasks.pretrain import ALL, SHORT, Corpus, Phase, byte_tokenizer, new_policy, save, train
from python_trainer.tasks.rewards import score

POLICIES = Path(python_trainer.tasks.__file__).parent / "policies"
SHIPPED = sorted(folder.name for folder in POLICIES.iterdir())


def sampled_accuracy(name, variant, prompts, temperature):
    policy = AutoModelForCausalLM.from_pretrained(POLICIES / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(POLICIES / name)
    task = load_task(TaskConfig(variant=variant))
    examples = task.test[:prompts]
    engine = PagedEngine(policy, eos_token_ids=tokenizer.eos_token_id)
    requests = [
        Request(tokenizer.encode(example.prompt), sample_id=index, max_new_tokens=320)
        for index, example in enumerate(examples)
    ]
    ids = [completion.ids for completion in engine.generate(requests, SamplingParams(temperature=temperature))]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return sum(score(task, examples, texts, ids).accuracy) / prompts


@pytest.mark.parametrize("name", ["main", "small"])
def test_policies_leave_room(name):
    assert 0.3 <= sampled_accuracy(name, "short", 512, 1.0) <= 0.6
    assert sampled_accuracy("main", "short", 128, 0.0) >= 0.9


def test_together_they_are_small():
    assert sum(file.stat().st_size for file in POLICIES.rglob("*")) <= 4_000_000


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_policies_load_as_bfloat16_with_one_tokenizer(name):
    policy = AutoModelForCausalLM.from_pretrained(POLICIES / name)
    assert policy.config.model_type == "qwen2" and policy.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(POLICIES / name)
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab() and len(tokenizer) == policy.config.vocab_size
    assert policy.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id


def test_tokenizer_is_one_token_a_byte():
    tokenizer = byte_tokenizer()
    text = "12+34=46\nA:46 é"
    assert tokenizer.encode(text + "<|im_end|>") == [*text.encode(), tokenizer.eos_token_id]
    assert tokenizer.decode([*text.encode(), tokenizer.eos_token_id], skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_pretraining_never_sees_a_prompt_of_the_task():
    corpus = Corpus(0, Phase("two terms", SHORT, False, 1, 1e-3, 0.0))
    prompts = {bytes(ids[:length]).decode() for ids, length in (corpus.example() for _ in range(5000))}
    task = load_task(TaskConfig())
    assert not prompts & {example.prompt for example in [*task.train, *task.gate, *task.test]}


def test_pretraining_gives_the_same_policy_twice(tmp_path):
    def made(name):
        torch.manual_seed(0)
        policy = new_policy("small")
        phase = Phase("slips", ALL, True, 2, 1e-3, 1.0)
        train(policy, phase, Corpus(0, phase), 4)
        save(policy, tmp_path / name)
        return (tmp_path / name / "model.safetensors").read_bytes()

    assert made("first") == made("second")
