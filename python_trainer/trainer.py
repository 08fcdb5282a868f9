"""The trainer: one run in one directory.

A step chooses prompts, plans, generates, scores, collects, updates, evaluates and saves; :meth:`Trainer.step` is that
list. Everything else is a part of the trainer, with a file of its own.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.callbacks import Callback, make_callbacks
from python_trainer.checkpointer import Checkpointer
from python_trainer.config import Config
from python_trainer.data import Group, Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.dynamic_sampling import StepSampler
from python_trainer.errors import UserError
from python_trainer.evaluation import Evaluator, Scorer
from python_trainer.kernels import settle_kernels
from python_trainer.keyed import keyed_seed
from python_trainer.learner import Learner
from python_trainer.logger import Logger, choose_samples, group_spread, rollout_statistics
from python_trainer.model.loading import dtype_name, ignored_settings
from python_trainer.model.policy import choose_device
from python_trainer.model.precision import set_matmul_precision
from python_trainer.model.turns import missing_stop_token
from python_trainer.origin import compare_inputs, compare_settings, find_origin
from python_trainer.parts import make_engine, resolve_settings
from python_trainer.prompts import Prompts, load_tasks
from python_trainer.rollout.engine import SamplingParams
from python_trainer.run_state import RunState, summarise
from python_trainer.tasks.base import Task

REHEARSAL_RISE = 5  # updates on stored answers alone until their learning rate is the full one
FAR_APART = 0.5  # log-probabilities of sampler and trainer; rounding to 4 or 8 bits stays below
COUNTED = ("generated_tokens", "prefill_tokens", "cached_tokens")  # of the engine's counters


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
        self.config, self.ranks = config, ranks or RankGroup()
        ranks, output_dir = self.ranks, Path(output_dir)
        if config.parallel != ranks.name:
            raise UserError(
                f"ranks must be of the kind that config.parallel names ({config.parallel}), got {ranks.name}: "
                "use `with python_trainer.distributed.start(config.parallel) as ranks`, in processes that torchrun "
                "started"
            )
        compare_settings(config, ranks)
        self.folder = ranks.folder(output_dir)
        console = console if ranks.rank == 0 else Console(quiet=True)
        self.logger = Logger(self.folder, config.max_steps, label=label, console=console)
        self.state, self.done, self.rehearsed = RunState(timer=timer), False, False
        self.unlogged: dict[str, Any] | None = None  # the last step, until its row is written
        self.noted: set[str] = set()  # oddities of a step
        note = self.logger.note
        self.checkpointer = Checkpointer(
            config, output_dir, resume=resume, ranks=ranks, state=self.state, logger=self.logger, notify=self.notify
        )  # fmt: skip
        with ranks.together():
            self.callbacks = make_callbacks([*config.callbacks, *callbacks])
            tasks = load_tasks(config, choose_device(config.model.device))
        chosen = resolve_settings(config, self.checkpointer.saved, ranks, note)
        self.kernels = settle_kernels(chosen, self.checkpointer.saved, ranks, note)
        self.policy = ranks.load(chosen.model, offload=chosen.optimizer.offload)
        if ignored := ignored_settings(self.policy.inference_model):
            note(ignored)
        origin = find_origin(config, self.policy, ranks)
        self.engine = make_engine(chosen, self.policy, output_dir, ranks)
        set_matmul_precision(chosen.model.matmul_precision)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.engine.close)
            self.engine.on_progress = self.logger.log_work  # of several processes the first tells of its part
            with ranks.together():
                self.prompts = Prompts(config, tasks, self.policy, self.state, note)
                self.learner = Learner(self.policy, chosen, ranks)
                self.accelerators = config.accelerators.make()
            compare_inputs(config, self.policy, self.prompts, origin, self.checkpointer.newest, ranks)
            self.scorer = Scorer(config, self.prompts, ranks)
            self.evaluator = Evaluator(self.scorer, self.engine, self.logger, self.notify)
            self.run_context = RunContext(
                config=config, folder=self.folder, task=self.task, prompts=self.prompts.ids["train"],
                policy=self.policy, optimizer=self.learner.optimizer, engine=self.engine, answer=self.answer_once,
                judge=self.scorer.judge, evaluate_each=self.evaluator.evaluate_each, once=ranks.once, note=note,
                seconds=lambda: self.state.training_seconds,
            )  # fmt: skip
            parts = (self.progress, self.load_progress, origin, self.late_progress)
            if self.checkpointer.restore(self.learner, *parts):
                self.engine.policy_updated()
                self.engine.policy_version = self.state.policy_version
            self.logged = asdict(self.state)  # at the newest row of metrics
            unless_ready.pop_all()

    @property
    def task(self) -> Task:
        return self.prompts.task

    def run(self) -> dict[str, Any]:
        """Trains to the end -> what is in summary.json.

        Raises:
            UserError: another run has the folder, or something in the settings or in a reward function ended this one.
            Interrupted: a signal came; everything is saved.
        """
        state = self.state
        with self.checkpointer.owning_folder():
            state.start_clock()
            with closing(self.engine):
                if state.step == 0:
                    for accelerator in self.timed(self.accelerators):  # on the run's clock and token counts
                        accelerator.begin(self.run_context)
                recorded = None if state.step == 0 else state.step - (self.unlogged is not None)
                with self.checkpointer.stop, self.logger.recording(recorded):
                    self.done = self.finished()
                    if state.step == 0:
                        self.log(self.evaluator.evaluate("start"))
                    elif self.unlogged is not None:
                        self.close_step(self.unlogged)
                        self.checkpointer.after_step(done=self.done)
                    elif self.done and state.evaluations and state.evaluations[-1][0] != state.step:
                        row = self.evaluator.evaluate("final")  # max_steps was larger then
                        self.log(row)
                        self.notify("on_step", state.step, row)
                        self.checkpointer.after_step(done=True)
                    while not self.done:
                        self.step(state.step + 1)
            with self.checkpointer.stop:
                if self.policy.streams_weights:
                    self.engine.sleep()  # for its memory
                self.checkpointer.save_models()
                summary = summarise(state, self.config.evaluation.target_accuracy, self.policy.device) | {
                    "dtype": dtype_name(self.policy.inference_model.dtype),
                    "accelerators": {a.name: a.summary() for a in self.accelerators if a.enabled},
                    "counters": {
                        metric: text
                        for settings in self.config.accelerators.chosen()
                        for metric, text in settings.counters.items()
                    },
                }
                self.logger.write_summary(summary)
                self.notify("on_end", summary)
                return summary

    def step(self, number: int) -> dict[str, float]:
        """Trains on one batch of prompts -> its row of metrics.jsonl.

        Raises:
            Interrupted: a signal came, and the step is saved.
        """
        with self.checkpointer.keeping_last_step():
            context = self.context(number)
            self.train_on_stored(context)
            sampler = StepSampler(self.config.rollout)
            while sampler.missing:
                asked = self.state.prompts - self.logged["prompts"]  # in this step
                groups = self.plan(context, self.prompts.groups(self.prompts.draw(sampler.missing), asked))
                with self.state.measure("rollout"):
                    rollouts = self.generate(groups, context.seed)
                with self.state.measure("reward"):
                    self.scorer.score(groups, rollouts)
                sampler.add(self.collect(context, rollouts))
            rollouts = sampler.rollouts()
            self.notify("on_rollouts", number, rollouts)
            context.telemetry |= sampler.metrics() | group_spread(rollouts) | rollout_statistics(sampler.generated())
            samples = choose_samples(rollouts, self.policy.decode, self.prompts.text)
            with self.checkpointer.updating():
                self.update(context, rollouts)
                self.state.step = number
                row = {name: float(value) for name, value in context.telemetry.items()}
                self.unlogged = {"row": row, "samples": samples, "since": self.logged, "rehearsed": self.rehearsed}
            row = self.close_step(self.unlogged)
        self.note_oddities(number, row, rollouts)
        self.checkpointer.after_step(done=self.done)
        return row

    def close_step(self, unlogged: dict[str, Any]) -> dict[str, float]:
        """Evaluate if that is due, and write the row of the step whose update is over; return it."""
        row, self.logged, self.rehearsed = dict(unlogged["row"]), unlogged["since"], unlogged["rehearsed"]
        try:
            row |= self.evaluate_if_due()
        finally:
            row |= self.state.metrics_since(self.logged)
            self.log(row)
            self.logger.log_samples(self.state.step, unlogged["samples"])
        self.unlogged = None
        self.checkpointer.renew_last_step()
        self.notify("on_step", self.state.step, row)
        return row

    def note_oddities(self, number: int, row: dict[str, float], rollouts: Sequence[Rollout]) -> None:
        """Warn about suspicious metrics of a step, once about each."""
        found, clipped = dict[str, str](), row.get("completions/clipped_ratio", 0.0)
        cut = [rollout.own_ids for rollout in rollouts if rollout.finish_reason == "length"] if clipped > 0.5 else []
        if (token := missing_stop_token(self.policy, cut)) is not None:
            text = self.policy.tokenizer.decode([token])
            found["stop token"] = (
                f"in step {number} {clipped:.0%} of the answers were cut at rollout.max_completion_length, and most of "
                f"these hold {text!r}, which does not end answers: if it should, add {token} to eos_token_id in "
                "generation_config.json of the model"
            )
        elif number == 1 and clipped == 1:
            found["length"] = "no answer of the first step ended within rollout.max_completion_length"
        apart = row.get("sampling/logp_difference/mean", 0.0)
        if apart > FAR_APART:
            found["engine"] = (
                f"in step {number} rollout.engine samples from another model than the one that trains: "
                f"log-probabilities differ by {apart:.2f} on average, which is usually below 0.05"
            )
        for kind in found.keys() - self.noted:
            self.noted.add(kind)
            self.logger.note(found[kind])

    def plan(self, context: StepContext, groups: list[Group]) -> list[Group]:
        """Lets accelerators change the requests."""
        for accelerator in self.timed(self.accelerators):
            groups = accelerator.plan(context, groups)
        return groups

    def generate(self, requests: Sequence[Request], seed: int) -> list[Rollout]:
        """Returns the engine's answers, in the order of the requests, and counts its tokens."""
        settings, before = self.config.rollout, self.engine.stats
        sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, seed, tuple(settings.stop))
        rollouts = self.engine.generate(requests, sampling)
        if self.engine.lengths:
            self.engine.lengths.observe(requests, rollouts)
        for name in COUNTED:
            self.state.count(name, self.engine.stats[name] - before[name])
        return rollouts

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Returns the scored rollouts as accelerators want them trained on, with stored answers."""
        for accelerator in self.timed(reversed(self.accelerators)):
            rollouts = accelerator.collect(context, rollouts)
        return rollouts

    def train_on_stored(self, context: StepContext) -> None:
        """Updates on stored answers alone, before the step generates; the learning rate rises with each update."""
        batches: list[list[Rollout]] = []
        for accelerator in self.timed(self.accelerators):
            batches += accelerator.before_step(context)
        self.rehearsed = bool(batches)
        if not batches:
            return
        with self.checkpointer.updating(keeps_copy=True):
            with self.state.measure("rollout"):
                self.engine.sleep()
            for number, batch in enumerate(batches, 1):
                with self.state.measure("train"):
                    learned = self.learner.update(batch, context.step, rise=number / REHEARSAL_RISE)
                self.state.count("trained_tokens", learned["tokens/trained"])
                self.logger.log_work(number, len(batches), "stored answers in batches")
            self.engine.policy_updated()

    def update(self, context: StepContext, rollouts: list[Rollout]) -> None:
        """Trains the policy, and tells engine and accelerators."""
        with self.state.measure("rollout"):
            self.engine.sleep()
        with self.state.measure("train"):
            learned = self.learner.update(rollouts, context.step)
        self.state.count("trained_tokens", learned["tokens/trained"])
        context.telemetry |= learned
        self.engine.policy_updated()
        for accelerator in self.timed(self.accelerators):
            accelerator.after_update(context)

    def evaluate_if_due(self) -> dict[str, float]:
        """Evaluates after a step if it is due, and finds out whether the run is over -> metrics."""
        self.done = self.finished()
        if self.done:
            return self.evaluator.evaluate("final")
        every = self.config.evaluation.eval_steps
        due = every and (self.state.step % every == 0 or self.rehearsed)
        return self.evaluator.evaluate() if due else {}

    def evaluate(self, split: str, limit: int | None = None) -> float:
        """Returns the accuracy of answers to the first ``limit`` prompts of a split; None: to all of them."""
        return fmean(self.evaluator.answer(self.prompts.split(split), slice(limit)).accuracy)

    def answer_once(self, prompt_keys: Sequence[int], attempt: int) -> list[Rollout]:
        """Returns one whole answer to each of these training prompts, scored; another attempt has other noise."""
        groups = self.prompts.groups(prompt_keys)
        for group in groups:
            group.num_samples, group.sample_id = 1, group.prompt_key
        rollouts = self.generate(groups, keyed_seed(self.config.seed, "answer once", attempt))
        self.scorer.score(groups, rollouts)
        return rollouts

    def context(self, number: int) -> StepContext:
        """Returns what accelerators may see in a step."""
        return StepContext(self.run_context, number, keyed_seed(self.config.seed, "step", number))

    def finished(self) -> bool:
        """Tells whether steps or time are used up; the same on all ranks."""
        limit, state = self.config.max_seconds, self.state
        late = limit is not None and state.step > 0 and self.state.training_seconds >= limit
        return self.ranks.first(late or state.step >= self.config.max_steps)

    def log(self, row: dict[str, float]) -> None:
        """Adds totals to a row of metrics and writes it; the row after it counts from here."""
        row |= self.totals()
        self.logger.log(self.state.step, row)
        self.logged = asdict(self.state)

    def totals(self) -> dict[str, float]:
        """Returns seconds, tokens and bytes since the run began, as metrics."""
        sent = self.engine.stats.get("weight_bytes")
        return ({} if sent is None else {"total/weight_bytes": sent}) | {
            "time/wall_s": self.state.wall_seconds,
            "time/training_s": self.state.training_seconds,
            "total/generated_tokens": self.state.counts.get("generated_tokens", 0),
        }

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
        return {"lengths": vars(self.engine.lengths) if self.engine.lengths else None, "unlogged": self.unlogged}

    def load_progress(self, saved: dict[str, Any]) -> None:
        """Undoes :meth:`progress` and :meth:`late_progress`.

        Raises:
            UserError: it is of other accelerators, or they know prompts by numbers that are other prompts now.
        """
        names = sorted(accelerator.name for accelerator in self.accelerators if accelerator.enabled)
        if sorted(saved["enabled"]) != names:
            raise UserError(f"{self.folder} was run with the accelerators {sorted(saved['enabled'])}, not {names}")
        others = saved["prompts"] != self.task.fingerprint
        if others and names:
            raise UserError(
                f"{self.folder} was run on other training prompts than task has now, also where those too long for "
                f"rollout were left out, and what its accelerators {names} have learned is of those: resume it with "
                f"task and rollout of its config.yaml, or begin a new run with model.path={self.folder / 'model'}"
            )
        if others:
            self.logger.note("the training prompts are others than before")
        for accelerator in self.accelerators:
            if accelerator.name in saved["accelerators"]:  # recording may be new
                accelerator.load_state_dict(saved["accelerators"][accelerator.name])
        self.unlogged = saved.get("unlogged")
        if self.engine.lengths and saved["lengths"]:
            vars(self.engine.lengths).update(saved["lengths"])

    def notify(self, method: str, *arguments: Any) -> None:
        """Calls a method of all callbacks, on the first rank; an error ends all ranks.

        Raises:
            UserError: a callback raised an exception.
        """
        if not self.callbacks:
            return
        with self.ranks.together():
            for callback in self.callbacks if self.ranks.rank == 0 else ():
                try:
                    getattr(callback, method)(self, *arguments)
                except (Exception, SystemExit) as error:  # sys.exit would end the run unsaved
                    name = f"{type(callback).__name__}.{method}"
                    raise UserError(f"callback {name} raised {type(error).__name__}: {error}") from error

    def timed(self, accelerators: Iterable[Accelerator]) -> Iterator[Accelerator]:
        """Yields accelerators one by one; the time until the next one counts as theirs."""
        for accelerator in accelerators:
            with self.state.measure(f"accelerator/{accelerator.name}"):
                yield accelerator
