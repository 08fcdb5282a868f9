"""One training run in one directory: set-up and end. The loop is in ``trainer.py``, what it asks in ``asking.py``."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

import rlkernels.backend
from python_trainer.accelerators.base import RunContext
from python_trainer.asking import AskingLoop
from python_trainer.callbacks import Callback, Callbacks
from python_trainer.checkpoint import load_checkpoint
from python_trainer.config import Config
from python_trainer.data import Rollout
from python_trainer.distributed import RankGroup
from python_trainer.engine_choice import choose_engine
from python_trainer.errors import UserError
from python_trainer.evaluation import Evaluated
from python_trainer.files import publish, write_text
from python_trainer.keyed import keyed_seed
from python_trainer.learner import Learner, bytes_to_come
from python_trainer.model.dtype import dtype_before, going_on, name_of, told_of_change
from python_trainer.model.gathering import fill_whole
from python_trainer.model.policy import Policy, set_matmul_precision
from python_trainer.plan.command import RECOMPUTES, needs_recomputing
from python_trainer.registry import load
from python_trainer.rollout.episodes import EpisodeEngine
from python_trainer.rollout.make import make_engine
from python_trainer.run_state import Clock, RunState, device_name, summarise
from python_trainer.saving import MODEL_ASIDE, SavingLoop
from python_trainer.signals import StopSignal
from python_trainer.telemetry import Telemetry


def check_backend() -> None:
    """The kernels that the environment asks for have to be there."""
    try:
        rlkernels.backend.wanted()
    except ValueError as error:
        raise UserError(str(error)) from error


def make_learner(config: Config, policy: Policy, ranks: RankGroup | None = None) -> Learner:
    """What updates the policy, by these settings."""
    return Learner(
        policy,
        algorithm=config.algorithm.with_sampler(config.rollout.engine),
        optimizer=config.optimizer,
        critic=config.critic,
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        max_steps=config.max_steps,
        ranks=ranks,
    )


def facts_of(config: Config) -> dict[str, Any]:
    """What describes a run; settings of accelerators stay out, they may hold the password of a database."""
    settings = config.model_dump(mode="json") | {"accelerators": config.accelerators.enabled}
    return {"algorithm": config.algorithm.advantage, "settings": settings}


def rules_of(config: Config) -> dict[str, Any]:
    """What decides the reward of an answer, and whether it is right."""
    shape = {name: getattr(config.algorithm, name) for name in ("overlong_cache", "overlong_penalty")}
    return {"task": config.task.model_dump(mode="json"), "longest": config.rollout.max_completion_length, **shape}


class Trainer(AskingLoop, SavingLoop):
    """One training run in one directory.

    Args:
        config: all settings.
        output_dir: the run directory; made when it does not exist.
        callbacks: more than those in the settings: objects, classes, names or ``module:Class``.
        start: metrics of the first evaluation and what each prompt was answered with in it, where a run of the same
            policy, task and seed has them already, as :func:`python_trainer.compare.known_start` finds them.
        ranks: the processes that share the run, by :func:`python_trainer.distributed.start`; None: this one alone.
        resume: go on from the newest checkpoint in it, if there is one.
        timer: the clock that all seconds are read from; ``time.process_time`` counts the work of this program alone.

    Raises:
        UserError: something in the settings, files or model is no good. Nothing has been written then.
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
        start: Evaluated | None = None,
        ranks: RankGroup | None = None,
    ):
        if not isinstance(config, Config):
            raise UserError(f"config must be a Config, as load_config returns one, got {config!r:.80}")
        self._chosen, self._said_of_engine = choose_engine(config)  # the run directory keeps what was given
        self.config, self.label, self.timer, self.ranks = config, label, timer, ranks or RankGroup()
        output_dir = Path(output_dir)
        if config.parallel != self.ranks.name:
            raise UserError(
                f"ranks must be of the kind that config.parallel names ({config.parallel}), got {self.ranks.name}: "
                "use `with python_trainer.distributed.start(config.parallel) as ranks`, in processes that torchrun "
                "started"
            )
        self.generation, self.seed = config.rollout, config.seed
        self.folder = self.ranks.folder(output_dir)
        self.console = self.ranks.console(console) or Console(stderr=True)
        self.checkpoints, self.start = output_dir / "checkpoints", start
        with self.ranks.together():
            found = self._find(output_dir, resume) if self.ranks.rank == 0 else None
        self.checkpoint = self.ranks.first(found and found[0])
        with self.ranks.together():
            self.callbacks = Callbacks([*config.callbacks, *callbacks])
            saved = found[1] if found else load_checkpoint(self.checkpoint) if self.checkpoint else None
            before = dtype_before(saved)
            model = going_on(self._chosen.model, before)  # with weights of another type it would be another run
            self._chosen = self._chosen.model_copy(update={"model": model})
        self._load(output_dir)
        if said := told_of_change(config.model.dtype, before, self.policy.whole):
            self._note(said)
        with self.ranks.together():
            self.learner = make_learner(self._chosen, self.policy, self.ranks)
            self.accelerators = [settings.make() for settings in config.accelerators.chosen()]
            idle = [(x, name) for x in config.accelerators.others() if (name := x.idle()) is not None]
            self.accelerators += [load(name)(x) for x, name in idle]
        self.state = RunState(target=config.evaluation.target_accuracy)
        self.saved_step = 0  # of the newest checkpoint
        self.told: Telemetry | None = None
        self.facts, self.rules = facts_of(config), rules_of(config)
        if saved is not None:
            self._restore(saved)

    def _load(self, output_dir: Path) -> None:
        """Task, policy and engine."""
        config = self.config
        with self.ranks.together():
            check_backend()
            set_matmul_precision("highest")  # until the policy's model has been checked
            named, splits = self._load_tasks()
            for text in [*self.task.notes, *filter(None, [self._said_of_engine, config.accelerators.said])]:
                self._note(text)
        model = self._chosen.model
        if self.ranks.once(lambda: needs_recomputing(self._chosen, self.ranks.size)):
            self._note(RECOMPUTES)
            model = model.model_copy(update={"gradient_checkpointing": True})
        self.policy = self.ranks.load(model, self._note)
        with self.ranks.together():
            self._read_prompts(splits, named)
        shards = self.ranks.size if config.parallel == "fsdp2" else 1
        offload = config.optimizer.offload and self.policy.device.type != "cpu"
        reserved = bytes_to_come(self.policy, config.algorithm, config.critic, shards, offload=offload)
        engine = make_engine(
            self._chosen.rollout,
            self._chosen.model,
            self.policy,
            output_dir,
            reserved_bytes=reserved,
            longest_draft=max((x.longest_draft() for x in config.accelerators.chosen()), default=0),
            ranks=self.ranks,
            note=self._note,
        )
        if self.environment is not None:
            engine = EpisodeEngine(
                engine,
                self.environment,
                encode=self.policy.encode_said,
                decode=self.policy.decode,
                max_turns=config.task.max_turns,
                timeout=config.task.environment_timeout,
                note=self._note,
            )
        self.engine = self.ranks.engine(engine, self.policy)
        self.engine.tell = self._tell_work  # of several processes each generates a part, and the first tells of its own
        with self.ranks.together():
            self._heed_limit_of_engine()
            self.named_sets = [self._named_set(name, task) for name, task in named.items()]
        set_matmul_precision(config.model.matmul_precision)

    def _note(self, text: str) -> None:
        """A line for the user, about what is no error but may not be meant so."""
        self.console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def _tell_work(self, done: int, total: int) -> None:
        self.tell_work(self._work, done, total)

    def tell_work(self, what: str, done: int, total: int) -> None:
        if self.told is not None:
            self.told.log_work(what, done, total)

    def run(self) -> dict[str, Any]:
        """Trains, and returns what is in summary.json.

        Raises:
            UserError: another run has the folder, or something in the settings or in a reward function ended this one.
            Interrupted: it was asked to stop, and is saved.
        """
        with ExitStack() as held:
            with self.ranks.together():
                self._take_folder(held)
            return self._run()

    def _run(self) -> dict[str, Any]:
        config, state = self.config, self.state
        self.clock = Clock(state.seconds, self.timer)
        self.started = self.timer() - state.wall_s
        resumed_at = state.step or None
        if resumed_at is None:
            self._begin()
        options: dict[str, Any] = {"label": self.label, "after_step": resumed_at, "console": self.console}
        with StopSignal(loud=self.ranks.rank == 0) as stop:
            with closing(self.engine), Telemetry(self.folder, config.max_steps, **options) as telemetry:
                self.told = telemetry
                if resumed_at is None:
                    row = self.evaluation_row("start", known=self.start)
                    if self._target_ends_it():
                        row |= self.evaluation_row("final")
                    telemetry.log(0, row | self.totals())
                elif self.finished() and state.evaluations and state.evaluations[-1][0] != state.step:
                    self.evaluation_row("final")  # it failed then
                self.loop(telemetry, stop)
            return self._finish()

    def _finish(self) -> dict[str, Any]:
        """Writes the trained policy and the summary."""
        config, state = self.config, self.state
        if config.save.save_model and self.policy.lean:
            self.engine.rest()  # for its memory
            fill_whole(self.policy)
        if config.save.save_model and self.ranks.rank == 0:
            aside = self.folder / MODEL_ASIDE
            try:
                self.policy.save(aside)
                publish(aside, self.folder / "model")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.folder / 'model'} cannot be written: {error}; {self._kept()}") from error
        summary = summarise(state, self.clock.seconds, wall_s=self._wall_seconds())
        summary |= {"target_accuracy": config.evaluation.target_accuracy, "device": device_name(self.policy.device)}
        summary["dtype"] = name_of(self.policy.whole.dtype)
        summary["accelerators"] = {a.name: a.summary() for a in self.accelerators if not a.watches}
        write_text(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.tell_callbacks("on_end", summary)
        return summary

    def _begin(self) -> None:
        """Lets the accelerators prepare, on the run's clock and token counts."""
        context = RunContext(
            output_dir=self.folder,
            tokenizer=self.policy.tokenizer,
            prompts=self.prompts["train"],
            answer=self._answer_once,
            seed=self.seed,
            console=self.console,
            once=self.ranks.once,
        )
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                accelerator.begin(context)

    def _answer_once(self, prompt_keys: Sequence[int], attempt: int) -> list[Rollout]:
        """One whole answer to each of these training prompts, scored; another attempt has other noise."""
        groups = self.groups_of(prompt_keys)
        for group in groups:
            group.num_samples, group.sample_id = 1, group.prompt_key
        rollouts = self.generate(groups, keyed_seed(self.seed, "answer once", attempt))
        self.score(groups, rollouts)
        return rollouts

    def _wall_seconds(self) -> float:
        """Since training began, over all resumed parts; loading the model is not in it."""
        return self.timer() - self.started

    def _training_seconds(self) -> float:
        """Wall time without evaluations."""
        return self._wall_seconds() - self.clock.seconds.get("eval", 0.0)

    def finished(self) -> bool:
        late = self.config.max_seconds is not None and self._training_seconds() >= self.config.max_seconds
        ended = self.state.step >= self.config.max_steps or self._target_ends_it()
        return self.ranks.first(ended or (late and self.state.step > 0))

    def seconds_left(self) -> float:
        """By the mean step so far, or until max_seconds."""
        spent, step = self._training_seconds(), self.state.step
        left = spent / step * (self.config.max_steps - step)
        return left if self.config.max_seconds is None else max(min(left, self.config.max_seconds - spent), 0.0)

    def totals(self) -> dict[str, float]:
        sent = self.engine.stats.get("weight_bytes")
        return ({} if sent is None else {"total/weight_bytes": sent}) | {
            "time/wall_s": self._wall_seconds(),
            "time/training_s": self._training_seconds(),
            "total/generated_tokens": self.state.counts.get("generated_tokens", 0),
        }
