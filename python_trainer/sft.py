"""Supervised steps on the reference answers of a task: ``python -m python_trainer sft``.

For base policies that hardly ever answer right: the model it writes is a ``model.path`` to train on.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.checkpoint import load_newest, save_checkpoint
from python_trainer.checkpointer import load_learned, reading_checkpoint, save_model
from python_trainer.config import Config, dump_config
from python_trainer.data import Example, Rollout
from python_trainer.errors import Interrupted, NotFinite, StopSignal, UserError
from python_trainer.keyed import prompt_order
from python_trainer.learner import Learner
from python_trainer.logger import Logger
from python_trainer.memory import RECOMPUTES, needs_recomputing
from python_trainer.model.loading import dtype_name, keep_dtype, saved_dtype
from python_trainer.model.optimizer import learning_rate
from python_trainer.model.packing import micro_batches, pack
from python_trainer.model.policy import Policy, load_policy, recompute_activations, set_matmul_precision
from python_trainer.model.settings import OptimizerConfig
from python_trainer.parts import make_learner
from python_trainer.run_directory import check_new, check_output_dir, check_resumable, locked, read_metrics, write_text
from python_trainer.run_state import device_name, versions
from python_trainer.tasks.base import fingerprint_of
from python_trainer.tasks.checking import check_text
from python_trainer.tasks.settings import load_task


def reference_answers(policy: Policy, examples: Sequence[Example], column: str) -> list[Rollout]:
    """What the policy should have answered: the column of each example, then the end token.

    Raises:
        UserError: names an example without such a column, or whose prompt is empty.
    """
    for example in examples:
        answer = example.columns.get(column)
        if not isinstance(answer, str | int | float):
            known = ", ".join(example.columns) or "none"
            raise UserError(f"sft.column: {place_of(example)} has no text or number {column!r}; its columns: {known}")
        check_text(place_of(example), column, str(answer))
    prompts = policy.encode([example.prompt for example in examples])
    answers = [policy.tokenizer(str(e.columns[column]), add_special_tokens=False)["input_ids"] for e in examples]
    for example, prompt in zip(examples, prompts):
        if not prompt:
            raise UserError(f"{place_of(example)} has 0 tokens; allowed: 1 or more")
    return [Rollout(prompt, [*ids, policy.tokenizer.eos_token_id]) for prompt, ids in zip(prompts, answers)]


def tokens_of(row: Rollout) -> int:
    """Of prompt and answer."""
    return len(row.prompt_ids) + len(row.response_ids)


def place_of(example: Example) -> str:
    return example.place or f"the prompt {str(example.prompt)[:60]!r}"


def token_losses(
    policy: Policy, rows: Sequence[Rollout], samples: Sequence[int], settings: OptimizerConfig
) -> Iterator[torch.Tensor]:
    """-log p of the tokens of these answers, micro-batch by micro-batch; the sum of all is their mean over tokens."""
    count = sum(len(rows[index].response_ids) for index in samples)
    for part in micro_batches(rows, samples, settings.micro_batch_tokens, share=settings.share_prefixes):
        packed = pack(rows, part, share=settings.share_prefixes).to(policy.device)
        yield -policy.score(packed, 1.0)[0].sum() / count


@torch.no_grad()
def mean_loss(policy: Policy, rows: Sequence[Rollout], settings: OptimizerConfig) -> float | None:
    """In nats a token, of answers that are not trained on; None where there are none."""
    if not rows:
        return None
    with policy.packed_attention():
        return sum(map(float, token_losses(policy, rows, range(len(rows)), settings)))


class Sft:
    """Supervised steps in one run directory.

    Args:
        config: all settings; the section ``sft``, and of the others what describes task, model, optimizer and saving.
        output_dir: gets ``model/``, ``metrics.jsonl``, ``summary.json`` and checkpoints.
        resume: go on from the newest checkpoint in it, if there is one.

    Raises:
        UserError: something in the settings, files or model is no good. Nothing has been written then.
    """

    def __init__(
        self, config: Config, output_dir: Path, *, resume: bool = False, console: Console | None = None
    ) -> None:
        if config.parallel != "none":
            raise UserError(f"sft runs in one process: parallel must be none, got {config.parallel}")
        self.config, self.folder = config, output_dir
        self.logger = Logger(output_dir, config.max_steps, label="sft", console=console)
        self.checkpoints = output_dir / "checkpoints"
        check_output_dir(output_dir)
        if config.task.environment is not None:
            raise UserError(f"sft has no turns: task.environment must be null, got {config.task.environment}")
        (check_resumable if resume else check_new)(output_dir)
        task = load_task(config.task)
        found = load_newest(self.checkpoints, self.logger.note) if resume else None
        self.policy = load_policy(keep_dtype(config.model, saved_dtype(found and found[1])))
        self.policy.chat_template_kwargs = config.task.chat_template_kwargs
        set_matmul_precision(config.model.matmul_precision)
        examples, self.rows = self._lessons("train", task.train)
        if not self.rows:
            raise UserError(f"task {task.name} has no training examples")
        others, self.held_out = self._lessons("test", task.test[: config.sft.held_out])
        self.fingerprint = fingerprint_of([e.prompt, str(e.columns[config.sft.column])] for e in [*examples, *others])
        longest = max(self.rows, key=tokens_of)
        if needs_recomputing(self._alone(len(longest.response_ids)), 1, len(longest.prompt_ids)):
            self.logger.note(RECOMPUTES)
            recompute_activations(self.policy.model)
        order = prompt_order(config.seed, 0, config.sft.epochs * len(self.rows), len(self.rows))
        self.batches = list(micro_batches(self.rows, order, config.sft.batch_tokens, share=False))
        self.logger.max_steps = len(self.batches)
        self.settings = config.optimizer.model_copy(update={"learning_rate": config.sft.learning_rate})
        self.step, self.seconds, self.eval_s = 0, 0.0, 0.0  # of all steps; of losses on held-out answers
        self.before: float | None = None  # loss on held-out answers
        self.learner = self._learner()
        if found:
            with reading_checkpoint(self.folder):
                self._restore(found[1])

    def _lessons(self, split: str, examples: Sequence[Example]) -> tuple[list[Example], list[Rollout]]:
        """Examples with their answers; too long ones end the run or, where task.overlong says so, are left out."""
        policy, rows = self.policy, reference_answers(self.policy, examples, self.config.sft.column)
        kept = [(example, row) for example, row in zip(examples, rows) if tokens_of(row) <= policy.max_length]
        if len(kept) < len(rows):
            example, row = max(zip(examples, rows), key=lambda pair: tokens_of(pair[1]))
            place, length = place_of(example), tokens_of(row)
            if self.config.task.overlong != "drop":
                raise UserError(
                    f"{place} has {len(row.prompt_ids)} tokens and {length} with its answer; allowed: at most "
                    f"{policy.max_length} with its answer, {policy.limited_by}; task.overlong=drop leaves it out"
                )
            counts = f"{len(rows) - len(kept)} of {len(rows)} {split} examples dropped (task.overlong)"
            about = f"{counts}: more than {policy.max_length} tokens with their answers"
            if not kept:
                raise UserError(f"{about}; none is left")
            self.logger.note(f"{about}; the longest is {place} with {length}")
        return [example for example, _ in kept], [row for _, row in kept]

    def _alone(self, answer: int) -> Config:
        """Settings of a training run that takes the same memory: answers of so many tokens that come from elsewhere."""
        server: dict[str, Any] = {"engine": "vllm", "vllm_server": "elsewhere"}
        answers = {"prompts_per_step": len(self.rows), "num_generations": 1, "max_completion_length": answer}
        update = {"rollout": self.config.rollout.model_copy(update=server | answers), "algorithm": AlgorithmConfig()}
        return self.config.model_copy(update=update)

    def _learner(self) -> Learner:
        """Only for its optimizer and what a checkpoint holds; it has no reference model and no critic."""
        update = {"optimizer": self.settings, "algorithm": AlgorithmConfig(), "max_steps": len(self.batches)}
        return make_learner(self.config.model_copy(update=update), self.policy)

    def _restore(self, saved: dict[str, Any]) -> None:
        if saved["steps"] != len(self.batches):
            raise UserError(
                f"{self.folder} was run with {saved['steps']} steps, and these settings make {len(self.batches)}: "
                "change sft and task back, or choose another --output-dir"
            )
        if saved.get("examples", self.fingerprint) != self.fingerprint:
            self.logger.note("the examples are others than before")
        self.step, self.seconds, self.before = saved["step"], saved["seconds"], saved["before"]
        self.eval_s = saved.get("eval_s", 0.0)
        load_learned(self.learner, saved, self.folder)

    def run(self) -> dict[str, Any]:
        """All steps, then the model -> what is in summary.json.

        Raises:
            UserError: another run has the folder; NaN or infinity in a gradient.
            Interrupted: it was asked to stop, and is saved.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            write_text(self.folder / "config.yaml", dump_config(self.config))
            with StopSignal() as stop, self.logger.recording(self.step or None):
                if self.step == 0:
                    self.before = self._held_out_loss()
                while self.step < len(self.batches):
                    row = self._step()
                    self.logger.log(self.step, row, left=self._seconds_left())
                    every = self.config.save.save_steps
                    if stop.name or (every and self.step % every == 0):
                        self._save()
                    if stop.name and self.step < len(self.batches):
                        raise Interrupted(f"{stop.name}: stopped after step {self.step}, which is saved")
            return self._finish()

    def _step(self) -> dict[str, float]:
        """One optimizer step -> its metrics."""
        begun, samples = time.perf_counter(), self.batches[self.step]
        lr, loss = learning_rate(self.settings, self.step + 1, len(self.batches)), 0.0
        with self.policy.packed_attention():
            for part in token_losses(self.policy, self.rows, samples, self.settings):
                part.backward()
                loss += float(part.detach())
        try:
            norm = self.learner.optimizer.step(lr)
        except NotFinite as error:
            raise UserError(
                f"step {self.step + 1}: {error}; sft.learning_rate {self.settings.learning_rate:g} may be too high"
            ) from error
        seconds = time.perf_counter() - begun
        self.step, self.seconds = self.step + 1, self.seconds + seconds
        tokens = sum(tokens_of(self.rows[index]) for index in samples)
        return {
            "sft/loss": loss,
            "grad_norm": norm,
            "learning_rate": lr,
            "tokens/trained": tokens,
            "tokens_per_second": tokens / seconds,
            "time/train_s": seconds,
            "time/training_s": self.seconds,
            "time/wall_s": self.seconds + self.eval_s,
        }

    def _held_out_loss(self) -> float | None:
        begun = time.perf_counter()
        loss = mean_loss(self.policy, self.held_out, self.settings)
        self.eval_s += time.perf_counter() - begun
        return loss

    def _seconds_left(self) -> float:
        return self.seconds / self.step * (len(self.batches) - self.step)

    def _save(self) -> None:
        state = {
            "step": self.step,
            "steps": len(self.batches),
            "seconds": self.seconds,
            "eval_s": self.eval_s,
            "before": self.before,
            "dtype": dtype_name(self.policy.inference_model.dtype),
            "examples": self.fingerprint,
        }
        learned, keep = self.learner.state_dict(), self.config.save.save_total_limit
        save_checkpoint(self.checkpoints, self.step, state | learned, keep=keep)

    def _finish(self) -> dict[str, Any]:
        """Writes the model and the summary."""
        self.policy.sync_inference_model()
        save_model(self.policy.save, self.folder / "model")
        losses = [row["sft/loss"] for row in read_metrics(self.folder)]
        summary = {
            "steps": self.step,
            "examples": len(self.rows),
            "answer_tokens": sum(len(row.response_ids) for row in self.rows),
            "loss_first": losses[0],
            "loss_final": losses[-1],
            "held_out": len(self.held_out),
            "held_out_loss_start": self.before,
            "held_out_loss_final": self._held_out_loss(),
            "wall_s": self.seconds + self.eval_s,
            "training_s": self.seconds,
            "train_s": self.seconds,
            "eval_s": self.eval_s,
            "device": device_name(self.policy.device),
            "versions": versions(),
        }
        self.logger.write_summary(summary)
        return summary
