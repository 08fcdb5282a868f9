"""The trainer: one run in one directory.

A step chooses prompts, plans, generates, scores, collects, updates, evaluates and saves; :meth:`Trainer.step` is that
list. Everything else is a part of the trainer, with a file of its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.config import Config
from python_trainer.data import Group, Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.checkpointer import Checkpointer, UnloggedStep
from python_trainer.loop.dynamic_sampling import StepSampler
from python_trainer.loop.evaluation import Evaluator
from python_trainer.loop.kernels import settle_kernels
from python_trainer.loop.learner import Learner
from python_trainer.loop.origin import compare_inputs, compare_settings
from python_trainer.loop.parts import load_run_policy, make_engine, resolve_settings
from python_trainer.loop.prompts import Prompts, load_tasks
from python_trainer.loop.scoring import Scorer
from python_trainer.model.loading import choose_device, dtype_name
from python_trainer.model.schedule import schedule
from python_trainer.model.turns import missing_stop_token
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run.callbacks import Callback, make_callbacks
from python_trainer.run.logger import Logger, choose_samples, group_spread, rollout_statistics
from python_trainer.run.run_state import RunState, summarise
from python_trainer.tasks.base import Task
from rlkernels.sampling.keys import keyed_seed

STORED_WARMUP_UPDATES = 5  # updates on stored answers alone, over which their learning rate rises to the full one
MAX_LOGPROB_GAP = 0.5  # largest gap between sampler and trainer that rounding to 4 or 8 bits explains
CUT_OFF_SHARE = 0.5  # of the answers, from which on they may lack a stop token
ENGINE_COUNTERS = ("generated_tokens", "prefill_tokens", "cached_tokens")  # that a run adds up


class Trainer:
    """One training run in one directory.

    Args:
        config: all settings.
        output_dir: the run directory; made if it does not exist.
        callbacks: more than those in the settings: objects, classes, names or ``module:Class``.
        resume: continue from the newest checkpoint in it, if there is one.
        label: name of the run on the terminal.
        console: where progress goes; None for standard error.
        timer: the clock that all seconds are read from; ``time.process_time`` counts the work of this program alone.
        ranks: the processes that share the run, by :func:`python_trainer.distributed.start`; None: this one alone.

    Attributes:
        state: how far the run is.
        done: whether its last step is over.

    Raises:
        UserError: something in the settings, files or model cannot be used. Nothing has been written then.
    """

    def __init__(
        self,
        config: Config,
        output_dir: str | Path,
        *,
        callbacks: Sequence[Callback | type[Callback] | str] = (),
        resume: bool = False,
        label: str = "train",
        console: Console | None = None,
        timer: Callable[[], float] = time.perf_counter,
        ranks: RankGroup | None = None,
    ):
        if not isinstance(config, Config):
            raise UserError(f"config must be a Config, as load_config returns one, got {config!r:.80}")
        ranks = ranks or RankGroup()
        if config.parallel != ranks.name:
            raise UserError(
                f"ranks must be of the kind that config.parallel names ({config.parallel}), got {ranks.name}: "
                "use `with python_trainer.distributed.start(config.parallel) as ranks`, in processes that torchrun "
                "started"
            )
        compare_settings(config, ranks)
        output_dir = Path(output_dir).absolute()  # a reward function may change the working folder
        self.config = config
        self.ranks = ranks
        self.folder = ranks.folder(output_dir)
        console = console if ranks.rank == 0 else Console(quiet=True)
        self.logger = Logger(self.folder, config.max_steps, label=label, console=console)
        self.state = RunState(timer=timer)
        self.done = False
        self.unlogged: UnloggedStep | None = None  # the last step, until its row is written
        self.noted: set[str] = set()  # kinds of warnings that were printed
        self.checkpointer = Checkpointer(
            config, output_dir, resume=resume, ranks=ranks, state=self.state, logger=self.logger, notify=self.notify
        )  # fmt: skip
        with ranks.fail_together():
            self.callbacks = make_callbacks([*config.callbacks, *callbacks])
            tasks = load_tasks(config, choose_device(config.model.device))
        note, saved = self.logger.note, self.checkpointer.saved
        resolved = resolve_settings(config, saved, ranks, note)
        self.kernels = settle_kernels(resolved, saved, ranks, note)
        self.policy, origin = load_run_policy(resolved, ranks, note)
        self.engine = make_engine(resolved, self.policy, output_dir, ranks, self.logger.log_work)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.engine.close)
            with ranks.fail_together():
                self.prompts = Prompts(resolved, tasks, self.policy, self.state, note)
                self.learner = Learner(self.policy, resolved, ranks)
                self.accelerators = resolved.accelerators.make()
            compare_inputs(resolved, self.policy, self.prompts, origin, self.checkpointer.newest, ranks)
            self.scorer = Scorer(resolved, self.prompts, ranks)
            self.evaluator = Evaluator(self.scorer, self.engine, self.logger, self.notify)
            self.run_context = self.make_run_context()
            if self.checkpointer.restore(self.learner, self.progress, self.load_progress, origin, self.late_progress):
                self.engine.policy_updated()
                self.engine.policy_version = self.state.policy_version
            unless_ready.pop_all()
        self.state_at_last_row = self.state.copy()

    def make_run_context(self) -> RunContext:
        """Return the parts of the run that accelerators may use."""
        return RunContext(
            config=self.config,
            folder=self.folder,
            task=self.task,
            prompts=self.prompts.ids["train"],
            policy=self.policy,
            optimizer=self.learner.optimizer,
            engine=self.engine,
            answer=self.answer_once,
            score_stored=self.scorer.score_stored,
            evaluate_each=self.evaluate_each,
            on_rank0=self.ranks.on_rank0,
            note=self.logger.note,
            seconds=lambda: self.state.training_seconds,
        )

    @property
    def task(self) -> Task:
        return self.prompts.task

    def run(self) -> dict[str, Any]:
        """Train to the end; return the contents of summary.json.

        Raises:
            UserError: another run has the folder, or something in the settings or in a reward function ended this one.
            Interrupted: a signal came; everything is saved.
        """
        state = self.state
        if (dtype := torch.get_default_dtype()) is not torch.float32:
            raise UserError(
                f"torch's default dtype must be float32 while the trainer runs, got {dtype}: a module that the "
                "settings name has set it, and may set it back"
            )
        with self.checkpointer.owning_folder():
            state.start_clock()
            with closing(self.engine):
                if state.step == 0:
                    for accelerator in self.timed(self.accelerators):  # on the run's clock and token counts
                        accelerator.begin(self.run_context)
                last_row = None if state.step == 0 else state.step - (self.unlogged is not None)
                with self.checkpointer.stop, self.logger.recording(last_row):
                    self.done = self.finished()
                    if state.step == 0:
                        self.log(self.evaluator.evaluate("start"))
                    elif self.unlogged is not None:
                        self.close_step(self.unlogged)
                        self.checkpointer.after_step(done=self.done)
                    elif self.done and state.evaluations and "final" not in state.results:
                        row = self.evaluator.evaluate("final")  # max_steps was larger before
                        self.log(row)
                        self.notify("on_step", state.step, row)
                        self.checkpointer.after_step(done=True)
                    while not self.done:
                        self.step(state.step + 1)
            with self.checkpointer.stop:
                if self.policy.streams_weights:
                    self.engine.sleep()  # for its memory
                self.checkpointer.save_models()
                summary = self.summary()
                self.logger.write_summary(summary)
                self.notify("on_end", summary)
                return summary

    def summary(self) -> dict[str, Any]:
        """Return the contents of summary.json."""
        counters: dict[str, str] = {}
        for settings in self.config.accelerators.chosen():
            counters |= settings.counters
        return summarise(self.state, self.config.evaluation.target_accuracy, self.policy.device) | {
            "dtype": dtype_name(self.policy.inference_model.dtype),
            "accelerators": {a.name: a.summary() for a in self.accelerators if a.enabled},
            "counters": counters,
        }

    def step(self, number: int) -> dict[str, float]:
        """Train on one batch of prompts; return its row of metrics.jsonl.

        Raises:
            Interrupted: a signal came, and the step is saved.
        """
        with self.checkpointer.keeping_last_step():
            context = self.context(number)
            trained_on_stored = self.train_on_stored(context)
            sampler = StepSampler(self.config.rollout)
            prompts_before = self.state.prompts
            while sampler.missing:
                drawn = self.state.prompts - prompts_before  # in earlier rounds of this step
                prompt_indices = self.prompts.draw(sampler.missing)
                groups = self.plan(context, self.prompts.groups(prompt_indices, drawn))
                with self.state.measure("rollout"):
                    rollouts = self.generate(groups, context.seed)
                with self.state.measure("reward"):
                    self.scorer.score(groups, rollouts)
                sampler.add(self.collect(context, rollouts))
            rollouts = sampler.rollouts()
            self.notify("on_rollouts", number, rollouts)
            context.telemetry |= sampler.metrics() | group_spread(rollouts) | rollout_statistics(sampler.all_rollouts())
            samples = choose_samples(rollouts, self.policy.decode, partial(self.prompts.text, "train"))
            with self.checkpointer.updating():
                self.update(context, rollouts)
                self.state.step = number
                self.state.results.pop("final", None)  # of a run that ended earlier and went on
                row = {name: float(value) for name, value in context.telemetry.items()}
                self.unlogged = UnloggedStep(row, samples, self.state_at_last_row, trained_on_stored)
            row = self.close_step(self.unlogged)
        self.warn(number, row, rollouts)
        self.checkpointer.after_step(done=self.done)
        return row

    def close_step(self, step: UnloggedStep) -> dict[str, float]:
        """Evaluate if that is due, and write the row of the step whose update is over; return it."""
        row = dict(step.row)
        try:
            row |= self.evaluate_if_due(trained_on_stored=step.trained_on_stored)
        finally:  # the update has happened, so its row is written even if the evaluation fails
            row |= self.state.metrics_since(step.since)
            self.log(row)
            self.logger.log_samples(self.state.step, step.samples)
        self.unlogged = None
        self.checkpointer.renew_last_step()
        self.notify("on_step", self.state.step, row)
        return row

    def warn(self, number: int, row: dict[str, float], rollouts: Sequence[Rollout]) -> None:
        """Warn once about suspicious metrics."""
        warnings: dict[str, str] = {}
        clipped = row.get("completions/clipped_ratio", 0.0)
        cut_off: list[list[int]] = []
        if clipped > CUT_OFF_SHARE:
            cut_off = [rollout.policy_ids for rollout in rollouts if rollout.finish_reason == "length"]
        if (token := missing_stop_token(self.policy, cut_off)) is not None:
            text = self.policy.tokenizer.decode([token])
            warnings["stop token"] = (
                f"in step {number} {clipped:.0%} of the answers were cut at rollout.max_completion_length, and most of "
                f"these hold {text!r}, which does not end answers: if it should, add {token} to eos_token_id in "
                "generation_config.json of the model"
            )
        elif number == 1 and clipped == 1:
            warnings["length"] = "no answer of the first step ended within rollout.max_completion_length"
        gap = row.get("sampling/logp_difference/mean", 0.0)
        if gap > MAX_LOGPROB_GAP:
            warnings["engine"] = (
                f"in step {number} rollout.engine samples from another model than the one that trains: "
                f"log-probabilities differ by {gap:.2f} on average, which is usually below 0.05"
            )
        for kind in warnings.keys() - self.noted:
            self.noted.add(kind)
            self.logger.note(warnings[kind])

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        """Let accelerators change the requests."""
        for accelerator in self.timed(self.accelerators):
            groups = accelerator.plan(context, groups)
        return groups

    def generate(self, requests: Sequence[Request], seed: int) -> list[Rollout]:
        """Return the engine's answers, in the order of the requests, and count its tokens."""
        settings = self.config.rollout
        sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, seed, tuple(settings.stop))
        with self.counting_tokens():
            rollouts = self.engine.generate(requests, sampling)
        if self.engine.lengths:
            self.engine.lengths.observe(requests, rollouts)
        return rollouts

    @contextmanager
    def counting_tokens(self) -> Iterator[None]:
        """Count the tokens that the engine computes within it."""
        stats_before = self.engine.stats
        yield
        for name in ENGINE_COUNTERS:
            self.state.count(name, self.engine.stats[name] - stats_before[name])

    def evaluate_each(self, split: str, rows: range) -> list[float]:
        """Evaluate for an accelerator, as :meth:`Evaluator.evaluate_each`; seconds and tokens are those of training."""
        with self.state.measure("rollout"), self.counting_tokens():
            return self.evaluator.evaluate_each(split, rows)

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Let accelerators change the scored rollouts and add stored answers; return the rollouts to train on."""
        for accelerator in self.timed(reversed(self.accelerators)):
            rollouts = accelerator.collect(context, rollouts)
        return rollouts

    def train_on_stored(self, context: StepContext) -> bool:
        """Update on stored answers alone, before the step generates; return whether there were any.

        The learning rate rises with each update.
        """
        batches: list[list[Rollout]] = []
        for accelerator in self.timed(self.accelerators):
            batches += accelerator.before_step(context)
        if not batches:
            return False
        with self.checkpointer.updating(keeps_copy=True):
            with self.state.measure("rollout"):
                self.engine.sleep()
            for number, batch in enumerate(batches, 1):
                lr_scale = schedule(number, warmup_steps=STORED_WARMUP_UPDATES)
                with self.state.measure("train"):
                    metrics = self.learner.update(batch, context.step, lr_scale=lr_scale)
                self.state.count("trained_tokens", metrics["tokens/trained"])
                self.logger.log_work(number, len(batches), "stored answers in batches")
            self.engine.policy_updated()
        return True

    def update(self, context: StepContext, rollouts: list[Rollout]) -> None:
        """Train the policy, then call engine and accelerators."""
        with self.state.measure("rollout"):
            self.engine.sleep()
        with self.state.measure("train"):
            metrics = self.learner.update(rollouts, context.step)
        self.state.count("trained_tokens", metrics["tokens/trained"])
        context.telemetry |= metrics
        self.engine.policy_updated()
        for accelerator in self.timed(self.accelerators):
            accelerator.after_update(context)

    def evaluate_if_due(self, *, trained_on_stored: bool) -> dict[str, float]:
        """Evaluate after a step if that is due, and note whether the run is over; return metrics.

        After updates on stored answers an evaluation is due whatever the step.
        """
        self.done = self.finished()
        if self.done:
            return self.evaluator.evaluate("final")
        every = self.config.evaluation.eval_steps
        due = every and (self.state.step % every == 0 or trained_on_stored)
        return self.evaluator.evaluate() if due else {}

    def evaluate(self, split: str, limit: int | None = None) -> float:
        """Return the accuracy of answers to the first ``limit`` prompts of a split; None: to all of them."""
        scores, _ = self.evaluator.answer(self.prompts.split(split), slice(limit))
        return fmean(scores.accuracy)

    def answer_once(self, prompt_indices: Sequence[int], attempt: int) -> list[Rollout]:
        """Return one whole answer to each of these training prompts, scored; another attempt has other noise."""
        train = self.prompts.split("train")
        groups = self.prompts.groups_of(train, prompt_indices, 1, noise_ids=prompt_indices)
        rollouts = self.generate(groups, keyed_seed(self.config.seed, "answer once", attempt))
        self.scorer.score(groups, rollouts)
        return rollouts

    def context(self, number: int) -> StepContext:
        """Return what accelerators may see in a step."""
        return StepContext(self.run_context, number, keyed_seed(self.config.seed, "step", number))

    def finished(self) -> bool:
        """Return whether steps or time are used up; the same on all ranks."""
        state, max_seconds = self.state, self.config.max_seconds
        out_of_time = max_seconds is not None and state.step > 0 and state.training_seconds >= max_seconds
        return self.ranks.broadcast(out_of_time or state.step >= self.config.max_steps)

    def log(self, row: dict[str, float]) -> None:
        """Add totals of the run to a row of metrics and write it; the next row counts from here."""
        if (weight_bytes := self.engine.stats.get("weight_bytes")) is not None:
            row["total/weight_bytes"] = weight_bytes
        row |= {
            "time/wall_s": self.state.wall_seconds,
            "time/training_s": self.state.training_seconds,
            "total/generated_tokens": self.state.counts.get("generated_tokens", 0),
        }
        self.logger.log(self.state.step, row)
        self.state_at_last_row = self.state.copy()

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside weights, moments and ``state``, once an update is over."""
        self.state.policy_version = self.engine.policy_version
        return {
            "accelerators": {a.name: a.state_dict() for a in self.accelerators},
            "enabled": [a.name for a in self.accelerators if a.enabled],
            "prompts": self.task.fingerprint,
            "kernels": self.kernels,
        }

    def late_progress(self) -> dict[str, Any]:
        """Return the part of the progress that evaluations and rows of metrics change."""
        lengths = self.engine.lengths.state_dict() if self.engine.lengths else None
        return {"lengths": lengths, "unlogged": None if self.unlogged is None else asdict(self.unlogged)}

    def load_progress(self, saved: dict[str, Any]) -> None:
        """Undo :meth:`progress` and :meth:`late_progress`.

        Raises:
            UserError: the run had other accelerators, or their prompt indices mean other prompts now.
        """
        names = sorted(accelerator.name for accelerator in self.accelerators if accelerator.enabled)
        if sorted(saved["enabled"]) != names:
            raise UserError(f"{self.folder} was run with the accelerators {sorted(saved['enabled'])}, not {names}")
        prompts_differ = saved["prompts"] != self.task.fingerprint
        if prompts_differ and names:
            raise UserError(
                f"{self.folder} was run on other training prompts than task has now, also where those too long for "
                f"rollout were left out, and what its accelerators {names} have learned is of those: resume it with "
                f"task and rollout of its config.yaml, or begin a new run with model.path={self.folder / 'model'}"
            )
        if prompts_differ:
            self.logger.note("the training prompts are others than before")
        for accelerator in self.accelerators:
            if accelerator.name in saved["accelerators"]:  # recording may be new
                accelerator.load_state_dict(saved["accelerators"][accelerator.name])
        run = self.checkpointer.saved_run
        self.unlogged = run.unlogged if run else None
        if self.engine.lengths and saved["lengths"]:
            self.engine.lengths.load_state_dict(saved["lengths"])

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of all callbacks, on rank 0; an error ends all ranks.

        Raises:
            UserError: a callback raised an exception.
        """
        if not self.callbacks:
            return
        with self.ranks.fail_together():
            for callback in self.callbacks if self.ranks.rank == 0 else ():
                try:
                    getattr(callback, method)(self, *arguments)
                except (Exception, SystemExit) as error:  # sys.exit would end the run unsaved
                    name = f"{type(callback).__name__}.{method}"
                    raise UserError(f"callback {name} raised {type(error).__name__}: {error}") from error

    def timed(self, accelerators: Iterable[Accelerator]) -> Iterator[Accelerator]:
        """Yield accelerators one by one; the time until the next one counts as theirs."""
        for accelerator in accelerators:
            with self.state.measure(f"accelerator/{accelerator.name}"):
                yield accelerator
