"""Settings and commands that earlier versions had, and what to write instead."""

from collections.abc import Iterator, Mapping
from typing import Any

RHYME = "accelerators.rhyme"
# Settings without a replacement: a space after a section, then what it had.
LEAVE_OUT = f"""
    {RHYME} record max_database_bytes refresh_steps retrodiction_steps reward_range window lookahead reward_weight
    {RHYME} reward_scale min_weight importance_cap candidates held_out bank_size bank_per_prompt rehearsals
    {RHYME} rehearsal_share stored_share rescue
    accelerators.alpha smoothing max_tries shrink min_gap gate_level target_accuracy
    accelerators.drafts pass_overhead history_tokens
    accelerators.rpo cut_share_of cut_end_factor cut_schedule_steps cache_path epsilon length_alpha
    algorithm overlong_penalty metrics_of_all
    evaluation top_p pass_at stop_at_target
    optimizer share_prefixes
    rollout prompt_order allow_remote vllm_transfer block_size vllm_enable_sleep_mode
    save older_moments save_best save_model
    sft held_out
    task reward_timeout seed
"""
# A key is a setting ("rollout.workers"), a whole section ("accelerators.curriculum"), one value of a setting
# ("task.name=countdown"), settings below any name ("evaluation.sets.*") or a command ("command export"). Its text
# completes the sentence "KEY was removed: ...".
REMOVED: dict[str, str] = {
    f"{section}.{name}": "leave it out; it is fixed now, or follows from other settings"
    for section, *names in map(str.split, LEAVE_OUT.strip().splitlines())
    for name in names
} | {
    "accelerators.enabled=auto": "write [rhyme], which changes nothing where right answers are common",
    "accelerators.enabled=curriculum": "write [rhyme]",
    "accelerators.curriculum": "its settings are in accelerators.rhyme, by the same names",
    **{
        f"{RHYME}.selection={name}": "write likelihood, retrodiction or random"
        for name in ("oracle", "reward", "recent")
    },
    "accelerators.alpha.gate_prompts": "set task.gate_size; the gate asks all gate examples of the task",
    **{
        f"accelerators.alpha.{name}": "set accelerators.alpha.refuse: false to try whatever the tracked steps say"
        for name in ("min_rise", "min_cosine", "min_skill")
    },
    "accelerators.alpha.scale": "write accelerators.alpha.preset: paper for the paper's scale",
    "accelerators.alpha.predictor=temporal": "write secant, which ended as high",
    "accelerators.alpha.keep_rest": "write accelerators.alpha.preset: paper to keep nothing beyond rank 1",
    "accelerators.rpo.keep": "write accelerators.rpo.preset: paper to remember any answer",
    "accelerators.rpo.length_reward": "write accelerators.rpo.preset: paper, which has the paper's length reward",
    "algorithm.prefix_in_loss": "write accelerators.rpo.preset: paper, which trains on the prefix too",
    "algorithm.whiten_advantages": "write algorithm.scale_rewards: none instead of false",
    "evaluation.max_new_tokens": "set rollout.max_completion_length, which holds for test prompts too",
    "evaluation.sets.*": "name a file, as in evaluation.sets: {hard: hard.jsonl}; evaluation and task hold for all",
    "evaluation.eval_limit": "set task.test_size, or write task.test_path: test.jsonl:train[:500]",
    "model.revision": "write owner/name@REVISION in model.path",
    "rollout.workers": "several processes generate with torchrun and parallel=ddp, or with rollout.vllm_server",
    "sft.column": "write task.columns: {answer: COLUMN}",
    "sft.train_half": "give sft its part of the file: --set 'task.train_path=train.jsonl:train[:50%]'",
    "sft.learning_rate": "set optimizer.learning_rate, which holds for sft too",
    "task.name=arithmetic": "write task.name: sums with task.variant: short (or longest)",
    "task.name=countdown": "write task.name: countdown:CountdownSettings in the folder examples",
    "task.name=gsm8k": "write task.name: jsonl with task.columns: {prompt: question} and task.reward: math",
    "task.prompt_template": "write whole prompts into the file",
    "task.environment=calculator": "write task.environment: calculator:Calculator in the folder examples",
    "task.environment_timeout": "set the attribute timeout of the environment's class",
    "task.dataset": "write task.train_path: owner/name:train and task.test_path: owner/name:test, or files and folders",
    "task.dataset_config": "write owner/name/CONFIG:train in task.train_path",
    "task.dataset_revision": "write owner/name@REVISION:train in task.train_path",
    "task.train_split": "write it after a colon in task.train_path, as in data.parquet:train[:90%]",
    "task.test_split": "write it after a colon in task.test_path, as in data.parquet:train[90%:]",
    "task.gate_split": "set task.gate_size, which takes gate examples out of the training examples",
    "task.gate_path": "set task.gate_size, which takes gate examples out of the training examples",
    "task.streaming": "read a part of a split: task.train_path: owner/name:train[:10000]",
    "task.prompt_column": "write task.columns: {prompt: COLUMN}",
    "task.train_half": "write a part of the file: task.train_path: train.jsonl:train[50%:]",
    "task.accuracy": "name first in task.reward the function that decides what is right; it may have weight 0",
    "task.system_prompt": "put a message of the role system in front of the prompts in the file",
    "task.max_steps_of_solution": "filter the file beforehand, as configs/gsm8k_smollm2.yaml says",
    "command export": "a run writes RUN/model, RUN/best (an earlier checkpoint, if that was best) and RUN/adapter",
    "command plan": "use train --dry-run, which prints the memory of a run",
    "command extrapolate": "use python -m rlkernels extrapolate, which takes checkpoints of any trainer",
}


def find_removed(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a message for each of these settings that was removed."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        entries = value if isinstance(value, list) else [value]
        for each in (key, *(f"{key}={entry}" for entry in entries if isinstance(entry, str))):
            if each in REMOVED:
                yield f"{each} was removed: {REMOVED[each]}"
        if isinstance(value, Mapping) and f"{prefix}*" in REMOVED:
            yield f"{prefix}* was removed: {REMOVED[f'{prefix}*']}"
        elif isinstance(value, Mapping) and key not in REMOVED:
            yield from find_removed(value, f"{key}.")
