"""Settings and commands that earlier versions had, and what to write instead."""

from collections.abc import Iterator, Mapping
from typing import Any

# A key is a setting ("rollout.workers"), a whole section ("accelerators.curriculum"), one value of a setting
# ("task.name=countdown"), settings below any name ("evaluation.sets.*") or a command ("command export"). Its text
# completes the sentence "KEY was removed: ...".
REMOVED: dict[str, str] = {
    "accelerators.enabled=auto": "write [rhyme], which changes nothing where right answers are common",
    "accelerators.enabled=curriculum": "write [rhyme]",
    "accelerators.curriculum": "its settings are in accelerators.rhyme, by the same names",
    "accelerators.rhyme.record": "leave it out; accelerators.rhyme.database records every run",
    "accelerators.rhyme.max_database_bytes": "leave it out; a database keeps the newest 64 runs",
    "accelerators.rhyme.refresh_steps": "leave it out; a run reads the database when it begins",
    "accelerators.rhyme.retrodiction_steps": "leave it out; selection retrodiction learns after each step",
    "accelerators.rhyme.selection=oracle": "write likelihood, retrodiction or random",
    "accelerators.rhyme.selection=reward": "write likelihood, retrodiction or random",
    "accelerators.rhyme.selection=recent": "write likelihood, retrodiction or random",
    **{
        f"accelerators.{name}": "leave it out; its default is a constant now"
        for name in (
            *(f"rhyme.{name}" for name in ("window", "lookahead", "reward_weight", "reward_scale", "min_weight")),
            *(f"rhyme.{name}" for name in ("importance_cap", "candidates", "held_out", "bank_size", "bank_per_prompt")),
            *(f"rhyme.{name}" for name in ("rehearsals", "rehearsal_share", "stored_share", "rescue")),
            *(f"alpha.{name}" for name in ("smoothing", "max_tries", "shrink", "min_gap")),
        )
    },
    "accelerators.rhyme.reward_range": "leave it out; rewards are compared as they are, cut to [0, 1]",
    "accelerators.alpha.target_accuracy": "leave it out; the predictor pls goes to an accuracy of 1",
    "accelerators.alpha.gate_prompts": "set task.gate_size; the gate asks all gate examples of the task",
    "accelerators.drafts.pass_overhead": "leave it out; it is measured in the first step and kept in checkpoints",
    "accelerators.rpo.cut_share_of": "leave it out; cuts are a share of the remembered answer, or set cut_tokens",
    "accelerators.rpo.cut_end_factor": "leave it out; the longest cut stays the same",
    "accelerators.rpo.cut_schedule_steps": "leave it out; the longest cut stays the same",
    "accelerators.rpo.cache_path": "leave it out; each run fills its own cache, if accelerators.rpo.fill says so",
    "accelerators.rpo.keep": "write accelerators.rpo.preset: paper to remember any answer",
    "accelerators.rpo.epsilon": "leave it out; the best answer is remembered with probability 0.5",
    "accelerators.rpo.length_reward": "write accelerators.rpo.preset: paper, which has the paper's length reward",
    "algorithm.prefix_in_loss": "write accelerators.rpo.preset: paper, which trains on the prefix too",
    "accelerators.rpo.length_alpha": "leave it out; it is 0.01, as in the paper",
    "rollout.prompt_order": "leave it out, every epoch visits each prompt once, shuffled",
    "save.older_moments": "leave it out, every kept checkpoint has the optimizer's moments",
    "task.name=arithmetic": "write task.name: sums with task.variant: short (or longest)",
    "task.name=countdown": "write task.name: countdown:CountdownSettings in the folder examples",
    "task.environment=calculator": "write task.environment: calculator:Calculator in the folder examples",
    "model.revision": "write owner/name@REVISION in model.path",
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
    "sft.column": "write task.columns: {answer: COLUMN}",
    "sft.held_out": "leave it out; the loss of 64 test examples is measured",
    "sft.train_half": "give sft its part of the file: --set 'task.train_path=train.jsonl:train[:50%]'",
    "evaluation.max_new_tokens": "set rollout.max_completion_length, which holds for test prompts too",
    "evaluation.top_p": "leave it out; test prompts are answered from the whole distribution",
    "evaluation.sets.*": "name a file, as in evaluation.sets: {hard: hard.jsonl}; evaluation and task hold for all",
    "evaluation.pass_at": "leave it out; pass@k is reported for k = 1, 2, 4, ... up to evaluation.samples",
    "evaluation.eval_limit": "set task.test_size, or write task.test_path: test.jsonl:train[:500]",
    "evaluation.stop_at_target": "leave it out; max_steps and max_seconds end a run",
    "sft.learning_rate": "set optimizer.learning_rate, which holds for sft too",
    "accelerators.drafts.history_tokens": "leave it out; 10 million tokens of answers are kept",
    "accelerators.alpha.gate_level": "leave it out; the chance per run of accepting weights that are no better is 5 %",
    "save.save_best": "leave it out; the best evaluated checkpoint is always kept",
    "save.save_model": "leave it out; a run always writes RUN/model",
    "task.accuracy": "name first in task.reward the function that decides what is right; it may have weight 0",
    "task.reward_timeout": "leave it out; a reward function may set a limit of its own",
    "task.seed": "leave it out; tasks draw the same prompts in all runs, and seed decides the rest",
    "task.environment_timeout": "set the attribute timeout of the environment's class",
    "rollout.allow_remote": "leave it out; servers on other machines are allowed, with a note",
    "rollout.vllm_transfer": "leave it out; weights go to servers through files in OUTPUT_DIR",
    "rollout.block_size": "leave it out; a block of the KV cache has 16 tokens",
    "rollout.vllm_enable_sleep_mode": "leave it out; vLLM within the trainer sleeps during updates wherever it can",
    "optimizer.share_prefixes": "leave it out; the prompt of a group is always computed once",
    "algorithm.whiten_advantages": "write algorithm.scale_rewards: none instead of false",
    "algorithm.overlong_penalty": "leave it out; an answer of full length loses 1",
    "task.system_prompt": "put a message of the role system in front of the prompts in the file",
    "task.max_steps_of_solution": "filter the file beforehand, as configs/gsm8k_smollm2.yaml says",
    "accelerators.alpha.min_rise": "set accelerators.alpha.refuse: false to try whatever the tracked steps say",
    "accelerators.alpha.min_cosine": "set accelerators.alpha.refuse: false to try whatever the tracked steps say",
    "accelerators.alpha.min_skill": "set accelerators.alpha.refuse: false to try whatever the tracked steps say",
    "accelerators.alpha.scale": "write accelerators.alpha.preset: paper for the paper's scale",
    "accelerators.alpha.keep_rest": "write accelerators.alpha.preset: paper to keep nothing beyond rank 1",
    "command export": "a run writes RUN/model, RUN/best (an earlier checkpoint, if that was best) and RUN/adapter",
    "command plan": "use train --dry-run, which prints the memory of a run",
    "command extrapolate": "use python -m rlkernels extrapolate, which takes checkpoints of any trainer",
    "algorithm.metrics_of_all": "leave it out; metrics are means over the answers that the update passes",
    "rollout.workers": "several processes generate with torchrun and parallel=ddp, or with rollout.vllm_server",
}


def find_removed(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, message) for each of these settings that was removed."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        entries = value if isinstance(value, list) else [value]
        for each in (key, *(f"{key}={entry}" for entry in entries if isinstance(entry, str))):
            if each in REMOVED:
                yield key, f"{each} was removed: {REMOVED[each]}"
        if isinstance(value, Mapping) and f"{prefix}*" in REMOVED:
            yield key, f"{prefix}* was removed: {REMOVED[f'{prefix}*']}"
        elif isinstance(value, Mapping) and key not in REMOVED:
            yield from find_removed(value, f"{key}.")
