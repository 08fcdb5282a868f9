"""TRL with all that we add to it, on sums: half a minute on a CPU. See docs/integrations.md."""

import random
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

import python_trainer
from rlkernels.integrations.trl import GatedExtrapolation, HistoryRecorder, SharedPrefixGRPOTrainer, SuffixRollouts

MODEL = Path(python_trainer.__file__).parent / "tasks/policies/small"  # or your folder in Hugging Face format


def sums(count):
    rows = []
    for _ in range(count):
        terms = [random.randint(10, 99) for _ in range(random.randint(2, 5))]
        rows.append({"prompt": "+".join(map(str, terms)) + "=", "answer": sum(terms)})
    return rows


def right(prompts, completions, completion_ids, answer, **columns):
    """Return 1 for an answer that ends in the sum, else 0: an ordinary reward function of TRL."""
    return [float(text.strip().endswith(f"A:{value}")) for text, value in zip(completions, answer)]


def evaluate(model, rows):
    """Return 0 or 1 for each of these held-out prompts, answered by sampling as in training."""
    asked = [held_out[i] for i in rows]
    prompts = [row["prompt"] for row in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    output = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=args.max_completion_length)
    ids = output[:, inputs["input_ids"].shape[1] :].tolist()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return right(prompts, texts, ids, [row["answer"] for row in asked])


random.seed(0)
torch.manual_seed(0)
train, held_out = sums(32), sums(256)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
args = GRPOConfig(
    output_dir="runs",
    max_steps=24,
    per_device_train_batch_size=64,  # whole groups: 8 prompts, 8 answers each
    num_generations=8,
    max_completion_length=64,
    learning_rate=4e-4,  # of a tiny model
    lr_scheduler_type="constant",  # a rate that falls leaves no line to go on along
    logging_steps=1,  # GatedExtrapolation reads the rewards there
    gradient_checkpointing=False,
    bf16=False,
    report_to=[],
    save_strategy="no",
    use_cpu=True,  # without a GPU
    disable_tqdm=True,
)
suffixes = SuffixRollouts()
recorder = HistoryRecorder("history.bin", every=8)  # for drafts of a vLLM server
extrapolation = GatedExtrapolation(evaluate, len(held_out), first_step=12, every=12)
trainer = SharedPrefixGRPOTrainer(  # a GRPOTrainer that computes each prompt once
    model=model,
    args=args,
    processing_class=tokenizer,
    train_dataset=Dataset.from_list(train),
    rollout_func=suffixes,
    reward_funcs=recorder.watch(suffixes.watch(right)),  # right answers are remembered
    callbacks=[extrapolation, recorder],
)
before = sum(evaluate(model.eval(), range(256))) / 256
trainer.train()
after = sum(evaluate(model.eval(), range(256))) / 256
print(f"right of the held-out prompts: {before:.2f} before, {after:.2f} after")
print(suffixes.continued, "of 64 answers of the last step were given a beginning")
print("last extrapolation considered:", extrapolation.events[-1])  # tried, or why not
