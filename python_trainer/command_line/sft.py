"""Supervised steps on the reference answers of a task: ``python -m python_trainer sft``.

For base policies that hardly ever answer right: the model it writes is a ``model.path`` to train on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.config import Config
from python_trainer.data import Example, Messages, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.checkpointer import Checkpointer
from python_trainer.loop.learner import Learner
from python_trainer.loop.origin import digest_value
from python_trainer.loop.parts import load_run_policy, resolve_settings
from python_trainer.loop.prompts import note_unused_template_arguments
from python_trainer.model.packing import micro_batches, pack_rollouts
from python_trainer.rollout.episodes import encode_after
from python_trainer.run.directory import read_metrics
from python_trainer.run.logger import Logger
from python_trainer.run.run_state import RunState, summarise
from python_trainer.tasks.base import check_text
from python_trainer.tasks.prompt_order import prompt_order

HELD_OUT = 64  # test examples whose loss is measured before and after


class Sft:
    """Supervised steps in one run directory.

    Args:
        config: all settings; the section ``sft``, and of the others those of task, model, optimizer and saving.
        output_dir: gets ``model/``, ``metrics.jsonl``, ``summary.json`` and checkpoints.
        resume: continue from the newest checkpoint in it, if there is one.

    Raises:
        UserError: something in the settings, files or model cannot be used. Nothing has been written then.
    """

    def __init__(self, config: Config, output_dir: Path, *, resume: bool = False, console: Console | None = None):
        if config.parallel != "none":
            raise UserError(f"sft runs in one process: parallel must be none, got {config.parallel}")
        if config.task.environment is not None:
            raise UserError(f"sft has no turns: task.environment must be null, got {config.task.environment}")
        self.config = config
        output_dir = output_dir.absolute()  # a user's module may change the working folder
        self.folder = output_dir
        self.state = RunState()
        self.logger = Logger(output_dir, config.max_steps, label="sft", console=console)
        self.checkpointer = Checkpointer(
            config, output_dir, resume=resume, ranks=RankGroup(), state=self.state, logger=self.logger
        )
        task = config.task.load()
        # nothing generates, and neither a reference model nor a critic is needed
        chosen = config.with_changes("rollout", engine="paged", vllm_server=None, temperature=1.0)
        chosen = chosen.model_copy(update={"algorithm": AlgorithmConfig()})
        chosen = resolve_settings(chosen, self.checkpointer.saved, RankGroup(), self.logger.note, generates=False)
        self.policy, origin = load_run_policy(chosen, RankGroup(), self.logger.note)
        self.policy.chat_template_kwargs = config.task.chat_template_kwargs
        prompts = (example.prompt for example in (*task.train, *task.test))
        note_unused_template_arguments(self.policy, prompts, self.logger.note)
        self.rows = self.answers("train", task.train)
        self.held_out = self.answers("test", task.test[:HELD_OUT])
        if not self.rows:
            raise UserError(f"task {task.name} has no training examples")
        saved = self.checkpointer.saved_run
        steps_before, trained = (0, 0) if saved is None else (saved.state.step, saved.state.prompts)
        rest = max(config.sft.epochs * len(self.rows) - trained, 0)
        order = prompt_order(config.seed, trained, rest, len(self.rows))
        self.batches = list(micro_batches(self.rows, order, config.sft.batch_tokens))
        self.logger.max_steps = steps_before + len(self.batches)
        self.learner = Learner(self.policy, chosen.model_copy(update={"max_steps": self.logger.max_steps}))
        self.digest = digest_value([(answer.prompt_ids, answer.response_ids) for answer in self.rows])
        self.checkpointer.restore(self.learner, lambda: {"sft_answers": self.digest}, self.check_examples, origin)

    def check_examples(self, saved: dict[str, Any]) -> None:
        """Compare the examples of a checkpoint with those of this run; checkpoints of train lack their digest.

        Raises:
            UserError: they differ, or the checkpoint comes after the end of this run.
        """
        examples, epochs = len(self.rows), self.config.sft.epochs
        if saved["sft_answers"] != self.digest:
            raise UserError(
                f"{self.folder} began with other training examples than the {examples} of task "
                f"{self.config.task.name} now: resume it with those, or choose another --output-dir"
            )
        trained = saved["state"]["prompts"]
        if trained > epochs * examples:
            raise UserError(
                f"sft.epochs must be at least {-(-trained // examples)}, which {self.folder} has begun, got {epochs}: "
                "raise it, or choose another --output-dir"
            )

    def answers(self, split: str, examples: Sequence[Example]) -> list[Rollout]:
        """Return the reference answer to each example: its column ``answer``, then the end token.

        Without the column the last message of a chat is the answer, if it is the assistant's. Answers that are too
        long end the run or, with task.overlong=drop, are left out.

        Raises:
            UserError: an example has no such column, or an empty prompt.
        """
        policy, rows = self.policy, []
        about = f"more than {policy.max_length} tokens with its answer, {policy.limited_by}"
        pairs = [_prompt_and_answer(example) for example in examples]
        encoded = policy.encode([prompt for prompt, _ in pairs])
        for number, (example, (prompt, answer), prompt_ids) in enumerate(zip(examples, pairs, encoded)):
            place = example.place or f"{split}[{number}] of the task"
            if not isinstance(answer, str | int | float):
                known = ", ".join(example.columns) or "none"
                raise UserError(
                    f"{place} has no text or number 'answer' for sft; its columns: {known}; task.columns can rename "
                    "one: {answer: COLUMN}"
                )
            check_text(place, "answer", str(answer))
            if not prompt_ids:
                raise UserError(f"{place} has 0 tokens; allowed: 1 or more")
            ids = encode_after(policy, prompt_ids, str(answer)) + policy.ending(prompt)
            tokens = len(prompt_ids) + len(ids)
            if tokens <= policy.max_length:
                rows.append(Rollout(prompt_ids, ids, logprobs=[0.0] * len(ids)))
            elif self.config.task.overlong != "drop":
                raise UserError(f"{place} has {tokens}: {about}; task.overlong=drop leaves it out")
        if len(rows) < len(examples):
            dropped = f"{len(examples) - len(rows)} of {len(examples)} {split} examples dropped (task.overlong)"
            self.logger.note(f"{dropped}: {about}")
        return rows

    def run(self) -> dict[str, Any]:
        """Take all steps, write the model, and return the contents of summary.json.

        Raises:
            UserError: another run has the folder; NaN or infinity in a gradient.
            Interrupted: a signal came; everything is saved.
        """
        state, last = self.state, self.logger.max_steps
        with self.checkpointer.owning_folder(), self.checkpointer.stop:
            state.start_clock()
            with self.logger.recording(state.step or None):
                if state.step == 0:
                    state.results["start"] = self.held_out_loss()
                for batch in self.batches:
                    with self.checkpointer.keeping_last_step(), self.checkpointer.updating():
                        row = self.step(batch)
                        self.logger.log(state.step + 1, row)  # first: a step that is saved has its row
                        state.step += 1
                        state.prompts += len(batch)
                    self.checkpointer.after_step(done=state.step == last)
            self.policy.sync_inference_model()
            self.checkpointer.save_models()
            state.results["final"] = self.held_out_loss()
            losses = [row["sft/loss"] for row in read_metrics(self.folder)]
            summary = summarise(state, None, self.policy.device) | {"loss_first": losses[0], "loss_final": losses[-1]}
            self.logger.write_summary(summary)
            return summary

    def step(self, batch: Sequence[int]) -> dict[str, float]:
        """Take the next optimizer step, on the examples with these indices; return its metrics."""
        seconds_before = self.state.seconds.get("train", 0.0)
        with self.state.measure("train"):
            answers = [self.rows[index] for index in batch]
            metrics = self.learner.imitate(answers, self.state.step + 1)
        self.state.count("trained_tokens", metrics["tokens/trained"])
        seconds = self.state.seconds["train"] - seconds_before
        return {
            "sft/loss": metrics["loss"],
            **{name: metrics[name] for name in ("grad_norm", "learning_rate", "tokens/trained")},
            "tokens_per_second": metrics["tokens/trained"] / seconds,
            "time/train_s": seconds,
            "time/training_s": self.state.training_seconds,
            "time/wall_s": self.state.wall_seconds,
        }

    @torch.no_grad()
    def held_out_loss(self) -> dict[str, float]:
        """Return the mean of -log p over all answer tokens of held-out examples as a metric; empty without any."""
        policy, rows = self.policy, self.held_out
        num_tokens = sum(len(row.response_ids) for row in rows)
        surprisal = 0.0
        with self.state.measure("eval"), policy.packed_attention():
            limit = self.config.optimizer.micro_batch_tokens
            for part in micro_batches(rows, range(len(rows)), limit, policy.device):
                logprobs, _, _ = policy.token_logprobs(pack_rollouts(rows, part, device=policy.device), 1.0)
                surprisal -= float(logprobs.sum())
        return {"held_out_loss": surprisal / num_tokens} if num_tokens else {}


def _prompt_and_answer(example: Example) -> tuple[str | Messages, Any]:
    prompt, answer = example.prompt, example.columns.get("answer")
    if answer is None and not isinstance(prompt, str) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[:-1], prompt[-1]["content"]
    return prompt, answer
