"""The checkpointer of a run: it saves and restores the run, and saves the last finished step when something fails."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat
from safetensors import SafetensorError

from python_trainer.config import Config, changed_settings, dump_config
from python_trainer.distributed import RankGroup
from python_trainer.errors import Interrupted, NotFinite, UserError, is_shared, tell
from python_trainer.loop.learner import Learner
from python_trainer.loop.origin import Origin, check_origin
from python_trainer.model.loading import base_name, dtype_name
from python_trainer.model.lora import adapter_weights, save_adapter
from python_trainer.model.weights import set_usual_mode
from python_trainer.process.signals import StopSignal
from python_trainer.process.terminal import log_into
from python_trainer.run.checkpoint import (
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    read_shards,
    save_checkpoint,
    step_of,
)
from python_trainer.run.directory import check_run_directory, first_problem, locked, unusable_output_dir, write_text
from python_trainer.run.last_step import LastStep, copy_to_host
from python_trainer.run.logger import Logger
from python_trainer.run.run_state import RunState, best_evaluated
from python_trainer.run.weight_history import WeightHistory
from python_trainer.settings import copy_nested
from rlkernels._files import draft_of, remove_folder, replace_folder
from rlkernels.weights.checkpoints import BASE

MODELS = ("model", "adapter", "best")  # folders of a run
WEIGHTS = "weights"  # folder of the weight history
INITIAL_WEIGHTS = f"{WEIGHTS}/{BASE}"


@dataclass
class UnloggedStep:
    """A step whose update is over and whose row is not written yet, because an evaluation may follow.

    Attributes:
        row: its metrics so far.
        samples: prompts and answers for the log.
        since: the state at the row before, from which this row counts seconds and tokens.
        trained_on_stored: whether the step began with updates on stored answers.
    """

    row: dict[str, float]
    samples: list[dict[str, Any]]
    since: RunState
    trained_on_stored: bool


class SavedRun(BaseModel):
    """A checkpoint without weights and moments. Accelerators check their own states."""

    state: RunState
    origin: Origin
    dtype: str | None = None
    kernels: dict[str, dict[str, Any]] = {}
    enabled: list[str] = []
    accelerators: dict[str, dict[str, Any]] = {}
    lengths: dict[str, dict[str, FiniteFloat]] | None = None
    unlogged: UnloggedStep | None = None


def check_saved(path: Path, saved: Any) -> SavedRun:
    """Check what a checkpoint holds.

    Raises:
        UserError: something is missing, of another type or out of its range.
    """
    try:
        run = SavedRun.model_validate(saved)
        if run.state.step != step_of(path):
            raise ValueError(f"it is named {path.name} and holds step {run.state.step}")
    except ValueError as error:
        reason = f"{first_problem(error):.300}"
        raise UserError(f"{path} was written by another version of the trainer or something else: {reason}") from error
    return run


class Checkpointer:
    """Save and restore everything that a run's next step depends on.

    It first finds the newest checkpoint that is not damaged, and writes nothing. :meth:`restore` takes the other parts
    of the run, after they are made.

    Args:
        output_dir: the run directory; this rank writes to the folder of its ``logger``.
        resume: continue from the newest checkpoint, if there is one.
        notify: calls a method of all callbacks.

    Attributes:
        checkpoints: the folder of all checkpoints.
        newest: the checkpoint that the run continues from; None: it begins anew.
        saved: its contents without shards, until :meth:`restore`.
        saved_run: the same, checked.
        saved_step: step of the newest checkpoint, 0 if there is none.
        last: the last finished step.
        history: of the weights; None: not recorded.
        stop: notes signals; within it, a signal saves the last finished step at once.
    """

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        *,
        resume: bool,
        ranks: RankGroup,
        state: RunState,
        logger: Logger,
        notify: Callable[..., None] = lambda *_: None,
    ):
        self.config = config
        self.folder = logger.folder
        self.ranks = ranks
        self.state = state
        self.logger = logger
        self.notify = notify
        self.checkpoints = output_dir / "checkpoints"
        self.saved_step = 0
        self.history: WeightHistory | None = None
        self.present: list[Path] = []  # all checkpoints at the start; known to rank 0
        several = ranks.size > 1
        self._store = ranks.store_for_thread() if several else None
        self._thread_ranks = ranks.for_thread() if ranks.sharded else RankGroup()
        self.last = LastStep(self._store if ranks.sharded else None, ranks.rank, ranks.size)
        self.stop = StopSignal(self._save_early, self._signal_elsewhere if several else None)
        self._early: Path | None = None  # the checkpoint that the thread of a signal wrote
        loaded: tuple[Path, Any] | None = None
        self.changes: list[str] = []  # of settings since the run was interrupted; known to rank 0
        with ranks.fail_together():
            if ranks.rank == 0:
                check_run_directory(output_dir, resume=resume)
                self.present = list_checkpoints(self.checkpoints)
                loaded = load_newest(self.checkpoints, logger.note) if resume else None
                if loaded and (changes := changed_settings(output_dir, config)):
                    self.changes = changes
                    tell(f"resumed with other settings than before: {', '.join(changes)}")
        self.newest = ranks.broadcast(loaded and loaded[0])
        with ranks.fail_together():
            self.saved: Any = loaded[1] if loaded else self.newest and load_checkpoint(self.newest)
            self.saved_run = None if self.newest is None else check_saved(self.newest, self.saved)

    def restore(
        self,
        learner: Learner,
        progress: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        origin: Origin,
        late_progress: Callable[[], dict[str, Any]] = dict,
    ) -> bool:
        """Restore the checkpoint that the run continues from into the run's other parts; return whether it existed.

        Args:
            progress: returns what a checkpoint holds beside weights, moments and ``state``, once an update is over.
            load: takes that from a checkpoint.
            late_progress: returns the part of it that evaluations and rows of metrics change.
        """
        self.policy = learner.policy
        self.learner = learner
        self.progress = progress
        self.late_progress = late_progress
        limit = self.config.save.weight_history
        if limit is not None:
            self.history = WeightHistory(self.policy, self.folder / WEIGHTS, limit, self.ranks, self.logger.note)
        saved, self.saved = self.saved, None  # to free its memory
        self.origin = origin
        run = self.saved_run
        if self.newest is None or run is None:
            return False
        try:
            with self.ranks.fail_together():
                check_origin(run.origin, origin, self.folder, self.config.model.path)
                load(saved)
                self.state.load(run.state)
                if self.state.step > learner.max_steps:
                    raise UserError(
                        f"{self.folder} has done {self.state.step} steps, and these settings make {learner.max_steps}: "
                        "raise max_steps, or choose another --output-dir"
                    )
            self.saved_step = self.state.step
            self._load_learned(self.newest, saved)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the checkpoint in {self.folder} was written by another version of the trainer or something else: it "
                f"cannot be read ({type(error).__name__}: {error})"
            ) from error
        return True

    def _load_learned(self, path: Path, saved: dict[str, Any]) -> None:
        """Load weights and moments; ``saved`` is the checkpoint without shards, which are added to it."""
        if "model" not in saved:
            saved |= read_shards(path, self.learner.state_dict(), alone=self.ranks.name == "none")
        with self.ranks.fail_together():
            had_critic = saved.get("critic") is not None
            if (self.learner.critic is not None) != had_critic:
                kind, allowed = ("with", "be gae") if had_critic else ("without", "not be gae")
                raise UserError(
                    f"{self.folder} was run {kind} a critic: algorithm.advantage must {allowed}, got "
                    f"{self.config.algorithm.advantage}"
                )
            try:
                self.learner.load_state_dict(saved)
            except (RuntimeError, KeyError) as error:
                lines = str(error).splitlines()  # torch's first line only announces the others
                reason = lines[min(1, len(lines) - 1)].strip()
                raise UserError(
                    f"the checkpoint in {self.folder} is of another model than the settings: {reason}"
                ) from error

    @contextmanager
    def owning_folder(self) -> Iterator[None]:
        """Make and lock the run directory, and remove what a killed run left there.

        Raises:
            UserError: another run has the folder or wrote checkpoints since this one was set up, or it cannot be
                written.
        """
        with ExitStack() as held:
            with self.ranks.fail_together():
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(locked(self.folder))
                    log_into(self.checkpoints.parent)
                    if self.ranks.rank == 0:
                        self._clear_folder()
                    self._write_config()
                except OSError as error:
                    raise unusable_output_dir(self.folder, error.strerror) from error
            if self.history is not None:
                if self.state.step == 0:
                    self._write_policy(INITIAL_WEIGHTS)
                self.history.begin(self.state.step)
            yield

    def _write_config(self) -> None:
        """Write config.yaml; keep the one of the steps before if a resumed run has other settings."""
        path = self.folder / "config.yaml"
        earlier_path = path.with_name(f"config-until-step-{self.state.step}.yaml")
        if self.changes and not earlier_path.exists():  # else this run was resumed from the step before
            write_text(earlier_path, path.read_text(encoding="utf-8"))
        write_text(path, dump_config(self.config))

    def _clear_folder(self) -> None:
        if list_checkpoints(self.checkpoints) != self.present:
            raise UserError(f"another run has written to {self.checkpoints} in the meantime: start again")
        for path in self.present:
            if step_of(path) > self.state.step:  # the run could not be resumed from it
                target = path.with_name(f"damaged-{path.name}")
                remove_folder(target)
                path.rename(target)
        for name in (*MODELS, INITIAL_WEIGHTS):  # a killed run may have left drafts
            shutil.rmtree(draft_of(self.folder / name), ignore_errors=True)

    def after_step(self, *, done: bool) -> None:
        """Save the run if ``save.save_steps`` asks for it, the run is over, or a signal came."""
        step, every = self.state.step, self.config.save.save_steps
        signal = self._conclude_signal()
        if done or signal or (every and step % every == 0):
            with self.state.measure("checkpoint"):
                self._save(self._contents() if self.last.contents is None else self._renewed(self.last.contents))
        if signal and not done:
            raise Interrupted(f"{signal}: stopped after step {step}, which is saved; a resumed run continues from it")

    def _save(self, contents: dict[str, Any]) -> None:
        with self.last.section(writes=True):
            path = self._write_checkpoint(contents, self.last.learned or self.learner.state_dict(), self.ranks)
            if self.ranks.rank == 0 and self._early is not None and self._early != path:
                remove_folder(self._early)
            self._early = None
            self.last.note(None)
        self.notify("on_save", self.saved_step, path)

    def _write_checkpoint(self, contents: dict[str, Any], learned: dict[str, Any], ranks: RankGroup) -> Path:
        step = contents["state"]["step"]
        path = save_checkpoint(
            self.checkpoints,
            step,
            contents if ranks.sharded else contents | learned,
            keep=self.config.save.save_total_limit + (self._early is not None),
            spare=best_evaluated(self.state, {step, *map(step_of, list_checkpoints(self.checkpoints))}),
            ranks=ranks,
            shards=learned if ranks.sharded else None,
        )
        self.saved_step = step
        return path

    def _save_early(self, signal: str, ended: Event) -> None:
        """Save the last finished step while the next is under way: in the thread of a signal.

        The checkpoint of the next step takes its place. Without shards rank 0 saves alone.
        """
        if self._store is not None:
            self._store.set("signal", signal)
        if self.ranks.rank > 0 and not self.ranks.sharded:
            return
        if self.policy.device.type == "cuda":
            torch.cuda.set_device(self.policy.device)  # a new thread has the first one
        with self.last.copied(self.learner.state_dict, ended) as copied:
            if copied is None:
                return
            contents, learned = copied
            self._early = checkpoint_path(self.checkpoints, contents["state"]["step"])
            try:
                self._write_checkpoint(contents, learned, self._thread_ranks)
            except UserError as unwritten:
                self._early = None
                return tell(str(unwritten))
        tell(f"{signal}: step {self.saved_step} is saved, and the step under way goes on")

    def _signal_elsewhere(self) -> str | None:
        """Return the signal that another rank told of, if any."""
        assert self._store is not None
        return self._store.get("signal").decode() if self._store.check(["signal"]) else None

    def _conclude_signal(self) -> str | None:
        """Return the signal that came to any rank, once no thread writes a checkpoint because of it."""
        signal = next(filter(None, self.ranks.gather(self.stop.name)), None)
        if signal is not None:
            self.stop.conclude(signal)
        return signal

    def _contents(self) -> dict[str, Any]:
        """Return everything in a checkpoint but weights and moments; the step that follows does not change it."""
        return self._renewed(copy_nested(self.progress()))

    def _renewed(self, contents: dict[str, Any]) -> dict[str, Any]:
        """Return the contents with what has changed since the update."""
        state, dtype = self.state, dtype_name(self.policy.inference_model.dtype)
        state.wall_s = state.wall_seconds
        contents |= {"state": asdict(state), "dtype": dtype, "origin": self.origin.model_dump()}
        return contents | copy_nested(self.late_progress())

    @contextmanager
    def updating(self, *, keeps_copy: bool = False) -> Iterator[None]:
        """Let the block change weights and moments; where it ends a step, that is now the last finished one.

        Args:
            keeps_copy: where there is room, keep what the block changes in the memory of the host, since it ends no
                step and so leaves nothing else to save.
        """
        last = self.last
        with last.section():
            step_before = self.state.step
            if keeps_copy and last.contents is not None:
                copy = copy_to_host(self.learner.state_dict())
                last.learned = copy if all(self.ranks.gather(copy is not None)) else None
            try:
                yield
            finally:
                if self.state.step > step_before:
                    with self.state.measure("checkpoint"):
                        if self.history is not None:
                            self.history.add(self.state.step)
                        last.note(self._contents())
                elif self.learner.changed and last.learned is None:
                    last.note(None)

    def renew_last_step(self) -> None:
        """Note what has changed since the update of the last finished step."""
        if self.last.contents is not None:
            with self.state.measure("checkpoint"):
                self.last.contents = self._renewed(self.last.contents)

    @contextmanager
    def keeping_last_step(self) -> Iterator[None]:
        """Save the last finished step on an error inside the block, if its weights still exist."""
        step = self.state.step
        self.learner.changed = False
        try:
            yield
        except Exception as error:
            self._keep(error)
            if isinstance(error, NotFinite):
                rate = self.config.optimizer.learning_rate
                raise UserError(
                    f"{error}: optimizer.learning_rate {rate:g} may be too high, after {step} steps; "
                    f"{self.how_to_go_on()}"
                ) from error
            error.add_note(self.how_to_go_on())
            raise

    def _keep(self, error: Exception) -> None:
        """Save the last finished step if possible, after an error in the one that follows or in its evaluation."""
        all_ranks_fail = isinstance(error, UserError) or is_shared(error)
        if self.ranks.size > 1 and not all_ranks_fail:  # several processes save together
            return
        try:
            self._conclude_signal()
            if self.last.contents is not None:
                self._save(self.last.contents)
        except UserError as unwritten:
            error.add_note(str(unwritten))
        self.ranks.broadcast(None)  # wait: where one rank ends, torchrun ends the others, even one that still writes

    def how_to_go_on(self) -> str:
        """Return a sentence on the step from which a resumed run would continue."""
        return f"step {self.saved_step} is saved: --resume continues from it" if self.saved_step else "no step is saved"

    def save_models(self) -> None:
        """Write the policy to RUN/model and, if an earlier checkpoint was evaluated best, that one to RUN/best.

        With ``model.lora``, RUN/adapter gets the adapters of the last step.
        """
        policy, lora = self.policy, self.config.model.lora
        steps = set(map(step_of, list_checkpoints(self.checkpoints)))
        self._write_policy("model")
        if lora is not None:
            parts = (adapter_weights(policy.model), policy.model, policy.inference_model, lora)
            self._write("adapter", partial(save_adapter, *parts, base=base_name(self.config.model)))
        best = self.ranks.broadcast(best_evaluated(self.state, steps))
        if best is not None and best != self.state.step:
            self._load_step(best)
            self._write_policy("best")
            self._load_step(self.state.step)
            self.logger.note(f"step {best} was evaluated best: {self.folder / 'best'}")
        elif self.ranks.rank == 0:
            remove_folder(self.folder / "best")  # of a run that was shorter

    def _write_policy(self, name: str) -> None:
        self.policy.restore_inference_model()
        self._write(name, self.policy.save)

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        """Replace a folder of the run by what ``write`` writes, complete or not at all."""
        folder = self.folder / name
        if self.ranks.rank == 0:
            draft = draft_of(folder)
            try:
                write(draft)
                set_usual_mode(draft)
                replace_folder(folder)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(draft, ignore_errors=True)
                raise UserError(
                    f"{folder} cannot be written: {error}: make room there, or let it be written to; "
                    f"{self.how_to_go_on()}"
                ) from error

    def _load_step(self, step: int) -> None:
        path = checkpoint_path(self.checkpoints, step)
        with self.ranks.fail_together():
            saved = load_checkpoint(path)
        self._load_learned(path, saved)
        self.policy.sync_inference_model()
