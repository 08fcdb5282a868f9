"""What a run keeps: checkpoints, the newest one to go on from, and the last finished step when something fails."""

import shutil
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from python_trainer.checkpoint import list_checkpoints, load_newest, set_aside_later, step_of
from python_trainer.config import Config, dump_config
from python_trainer.distributed.shard_files import read_shards
from python_trainer.errors import NotFinite, UserError
from python_trainer.files import check_output_dir, unusable_output_dir, write_text
from python_trainer.learner import Learner, without_moments
from python_trainer.model.dtype import name_of
from python_trainer.run_directory import check_new, check_resumable, check_unlocked, locked, read_metrics
from python_trainer.run_state import RunState, best_evaluated
from python_trainer.trainer import TrainingLoop

MODEL_ASIDE = ".model.tmp"  # the trained policy, while it is being written


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Within it what a checkpoint lacks, or has in another form, is a UserError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the checkpoint in {folder} was written by another version of the trainer or something else: it "
            f"cannot be read ({type(error).__name__}: {error})"
        ) from error


def load_learned(learner: Learner, saved: dict[str, Any], folder: Path) -> None:
    """Weights and moments of a checkpoint; UserError where they do not fit the model."""
    try:
        learner.load_state_dict(saved)
    except (RuntimeError, KeyError) as error:
        lines = str(error).splitlines()  # torch's first one says that there are others
        reason = lines[min(1, len(lines) - 1)].strip()
        raise UserError(f"the checkpoint in {folder} is of another model than the settings: {reason}") from error


class SavingLoop(TrainingLoop):
    """A loop whose steps are kept in a run directory.

    Attributes:
        config: all settings.
        checkpoints: the folder of all checkpoints.
        checkpoint: the one that the run goes on from, None for a new run.
        saved_step: of the newest checkpoint, 0 where there is none.
    """

    config: Config
    checkpoints: Path
    checkpoint: Path | None
    saved_step: int
    _seen: list[Path]  # all checkpoints, when the run was set up

    @abstractmethod
    def _note(self, text: str) -> None:
        """Tells the user something that is no metric."""

    @abstractmethod
    def _wall_seconds(self) -> float:
        """Since the run began, its interruptions left out."""

    def _find(self, output_dir: Path, resume: bool) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be used and what it holds, if there is one to go on from."""
        check_output_dir(output_dir)
        check_unlocked(output_dir)
        (check_resumable if resume else check_new)(output_dir)
        self._seen = list_checkpoints(self.checkpoints)
        found = load_newest(self.checkpoints, self._note) if resume else None
        if found and step_of(found[0]) > self.config.max_steps:
            raise UserError(
                f"max_steps must be at least {step_of(found[0])}, the steps that {output_dir} has done, got "
                f"{self.config.max_steps}"
            )
        return found

    def _restore(self, saved: dict[str, Any]) -> None:
        with reading_checkpoint(self.folder):
            self._take_over(saved)

    def _take_over(self, saved: dict[str, Any]) -> None:
        with self.ranks.together():
            names = {accelerator.name for accelerator in self.accelerators if not accelerator.watches}
            if set(saved["accelerators"]) != names:
                raise UserError(
                    f"{self.folder} was run with the accelerators {sorted(saved['accelerators'])}, not {sorted(names)}"
                )
            self._check_prompts(saved.get("prompts"))
        if "model" not in saved:
            assert self.checkpoint is not None
            saved |= read_shards(self.checkpoint, self.learner.state_dict())
        with self.ranks.together():
            self._take_over_learned(saved)
            states = saved["accelerators"] | saved.get("watchers", {})
            for accelerator in self.accelerators:
                if accelerator.name in states:  # a watcher may be new
                    accelerator.load_state_dict(states[accelerator.name])
            if self.engine.lengths and saved.get("lengths"):
                self.engine.lengths.load_state_dict(saved["lengths"])
        self.engine.policy_updated()
        self.engine.policy_version = self.state.policy_version

    def _take_over_learned(self, saved: dict[str, Any]) -> None:
        if (self.learner.critic is None) != (saved["critic"] is None):
            had, wanted = ("without", "not be gae") if saved["critic"] is None else ("with", "be gae")
            raise UserError(
                f"{self.folder} was run {had} a critic: algorithm.advantage must {wanted}, got "
                f"{self.config.algorithm.advantage}"
            )
        if not self.config.save.older_moments and without_moments(saved) is saved:
            self._note("save.older_moments is false: the optimizer's moments begin anew")
        self.state = RunState(**saved["state"])
        self.saved_step = self.state.step
        self._look_back_for_target()
        load_learned(self.learner, saved, self.folder)

    def _check_prompts(self, before: str | None) -> None:
        """What some accelerators have learned of prompts is kept by their numbers."""
        if before is None or before == self.task.fingerprint:
            return
        names = [accelerator.name for accelerator in self.accelerators if accelerator.numbers_prompts]
        if names:
            model = self.folder / "model"
            path = str(model) if model.is_dir() else f"{self.folder / 'export'}, which `export {self.folder}` writes"
            raise UserError(
                f"{self.folder} was run on other training prompts than task has now, also where those too long for "
                f"rollout were left out, and what its accelerators {sorted(names)} have learned is of those: resume it "
                f"with task and rollout of its config.yaml, or begin a new run with model.path={path}"
            )
        self._note("the training prompts are others than before")

    def _look_back_for_target(self) -> None:
        """Where the target is another one than before, an evaluation of before may have reached it."""
        state, target = self.state, self.config.evaluation.target_accuracy
        if state.target == target:
            return
        state.target, state.seconds_to_target, state.tokens_to_target = target, None, None
        for row in read_metrics(self.folder) if target is not None else ():
            if row["step"] <= state.step and row.get("eval/accuracy", -1.0) >= target:
                state.seconds_to_target = row["time/training_s"]
                state.tokens_to_target = int(row["total/generated_tokens"])
                break

    def _take_folder(self, held: ExitStack) -> None:
        """Makes the run directory, and keeps other processes from writing there as long as ``held`` is open."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(self.folder))
            if self.ranks.rank == 0:
                self._tidy()
            write_text(self.folder / "config.yaml", dump_config(self.config))
        except OSError as error:
            raise unusable_output_dir(self.folder, error.strerror) from error

    def _tidy(self) -> None:
        """Removes what a killed run left behind, unless another has been here since this one was set up."""
        if list_checkpoints(self.checkpoints) != self._seen:
            raise UserError(f"another run has written to {self.checkpoints} in the meantime: start again")
        set_aside_later(self.checkpoints, self.state.step)
        shutil.rmtree(self.folder / MODEL_ASIDE, ignore_errors=True)

    def save_due(self) -> bool:
        every = self.config.save.save_steps
        return every > 0 and self.state.step % every == 0

    def save(self) -> None:
        self._save(self._progress())

    def _save(self, progress: dict[str, Any]) -> None:
        step, settings = progress["state"]["step"], self.config.save
        steps = {step, *map(step_of, list_checkpoints(self.checkpoints))}
        spare = best_evaluated(self.state.evaluations, steps) if settings.save_best else None
        learned, keep = self.learner.state_dict(), settings.save_total_limit
        older = None if settings.older_moments else without_moments
        self.ranks.save(self.checkpoints, step, progress, learned, keep=keep, spare=spare, older=older)
        self.saved_step = step
        self.tell_callbacks("on_save", step, self.checkpoints / f"step-{step:06d}")

    def _progress(self, *, lasting: bool = False) -> dict[str, Any]:
        """What a checkpoint holds besides weights and moments; ``lasting``: whatever a step does until its update."""
        state = self.state
        state.wall_s, state.seconds = self._wall_seconds(), dict(self.clock.seconds)
        state.policy_version = self.engine.policy_version
        states = {a: a.snapshot() if lasting else a.state_dict() for a in self.accelerators}
        lengths = self.engine.lengths.state_dict() if self.engine.lengths else None
        dtype = name_of(self.policy.whole.dtype)
        return {
            "state": asdict(state),
            "accelerators": {a.name: own for a, own in states.items() if not a.watches},
            "watchers": {a.name: own for a, own in states.items() if a.watches},
            "lengths": lengths,
            "dtype": dtype,
            "prompts": self.task.fingerprint,
        }

    @contextmanager
    def keeping(self) -> Iterator[None]:
        step, learner, rate = self.state.step, self.learner, self.config.optimizer.learning_rate
        with self.clock.measure("checkpoint"):
            progress = None if step == self.saved_step else self._progress(lasting=True)
        learner.changed = False
        try:
            yield
        except NotFinite as error:
            self._keep(step, progress, error)
            raise UserError(
                f"{error}: optimizer.learning_rate {rate:g} may be too high, after {step} steps; {self._kept()}"
            ) from error
        except Exception as error:
            self._keep(step, progress, error)
            error.add_note(self._kept())
            raise

    def _keep(self, step: int, progress: dict[str, Any] | None, error: Exception) -> None:
        """Saves the last finished step where it can be, after an error in the one that follows ``step``."""
        if not self.ranks.all_know(error):  # several processes save together
            return
        try:
            if self.state.step > step:  # its evaluation failed, or its row of metrics
                self.save()
            elif progress and not self.learner.changed:
                self._save(progress)
        except UserError as unwritten:
            error.add_note(str(unwritten))
        self.ranks.first(None)  # none ends before: torchrun then ends the others, even one that is still writing

    def _kept(self) -> str:
        return f"step {self.saved_step} is saved: --resume goes on from it" if self.saved_step else "no step is saved"
