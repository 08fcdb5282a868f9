"""The checkpointer of a run: saves it, restores it, and keeps the last finished step when something fails."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from python_trainer.accelerators.base import Accelerator
from python_trainer.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    load_newest,
    read_shards,
    save_checkpoint,
    step_of,
)
from python_trainer.config import Config, dump_config
from python_trainer.distributed import RankGroup
from python_trainer.errors import NotFinite, UserError
from python_trainer.learner import Learner
from python_trainer.logger import Logger
from python_trainer.model.loading import base_name, dtype_name
from python_trainer.model.lora import adapter_weights, save_adapter
from python_trainer.model.policy import Policy
from python_trainer.rollout.engine import Engine
from python_trainer.run_directory import check_run_directory, locked, publish, unusable_output_dir, write_text
from python_trainer.run_state import Clock, RunState, best_evaluated

MODEL_ASIDE = ".model.tmp"  # the trained policy, while it is being written


def copy_containers(state: Any) -> Any:
    """Copies nested dictionaries and lists, but not the tensors in them."""
    if isinstance(state, dict):
        return {key: copy_containers(value) for key, value in state.items()}
    return [copy_containers(value) for value in state] if isinstance(state, list) else state


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Within it a checkpoint with missing or malformed contents raises UserError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the checkpoint in {folder} was written by another version of the trainer or something else: it "
            f"cannot be read ({type(error).__name__}: {error})"
        ) from error


def load_learned(learner: Learner, saved: dict[str, Any], folder: Path) -> None:
    """Loads weights and moments of a checkpoint; UserError if they do not fit the model."""
    try:
        learner.load_state_dict(saved)
    except (RuntimeError, KeyError) as error:
        lines = str(error).splitlines()  # torch's first one says that there are others
        reason = lines[min(1, len(lines) - 1)].strip()
        raise UserError(f"the checkpoint in {folder} is of another model than the settings: {reason}") from error


def save_model(write: Callable[[Path], None], folder: Path) -> None:
    """Replaces ``folder`` by what ``write`` writes, complete or not at all."""
    aside = folder.with_name(MODEL_ASIDE)
    write(aside)
    publish(aside, folder)


class Checkpointer:
    """Saves and restores everything that a run's next step depends on.

    It first finds the newest checkpoint that is not damaged, and writes nothing. Once the other parts of the run are
    there, :meth:`restore` takes them.

    Args:
        output_dir: the run directory; ``folder`` is where this rank writes.
        resume: go on from the newest checkpoint, if there is one.
        notify: calls a method of all callbacks.

    Attributes:
        checkpoints: the folder of all checkpoints.
        saved: contents of the checkpoint that the run goes on from, without shards; None: it begins anew.
        saved_step: of the newest checkpoint, 0 if there is none.

    Raises:
        UserError: the folder cannot be used, is in use, or holds a run that was not to be resumed.
    """

    def __init__(
        self,
        config: Config,
        output_dir: Path,
        folder: Path,
        *,
        resume: bool,
        ranks: RankGroup,
        state: RunState,
        clock: Clock,
        logger: Logger,
        notify: Callable[..., None],
    ):
        self.config, self.folder, self.ranks, self.state = config, folder, ranks, state
        self.clock, self.logger, self.notify = clock, logger, notify
        self.checkpoints, self.saved_step = output_dir / "checkpoints", 0
        self.present: list[Path] = []  # all checkpoints there were; known to rank 0
        found = None
        with ranks.together():
            if ranks.rank == 0:
                check_run_directory(output_dir, resume=resume)
                self.present = list_checkpoints(self.checkpoints)
                found = load_newest(self.checkpoints, logger.note) if resume else None
                if found and step_of(found[0]) > config.max_steps:
                    raise UserError(
                        f"max_steps must be at least {step_of(found[0])}, the steps that {output_dir} has done, got "
                        f"{config.max_steps}"
                    )
        self.newest = ranks.first(found and found[0])
        with ranks.together():
            self.saved: Any = found[1] if found else None
            if found is None and self.newest is not None:
                self.saved = load_checkpoint(self.newest)

    def restore(
        self,
        policy: Policy,
        learner: Learner,
        engine: Engine,
        accelerators: Sequence[Accelerator],
        fingerprint: str,
    ) -> None:
        """Takes the other parts of the run, and loads the checkpoint that it is resumed from, if there is one.

        Args:
            fingerprint: of the training prompts.

        Raises:
            UserError: the checkpoint does not fit the settings, or was written by something else.
        """
        self.policy, self.learner, self.engine, self.accelerators = policy, learner, engine, accelerators
        self.fingerprint = fingerprint
        saved, self.saved = self.saved, None  # to free its memory
        if saved is None:
            return
        with reading_checkpoint(self.folder):
            with self.ranks.together():
                self._check(saved)
            if "model" not in saved:
                assert self.newest is not None
                saved |= read_shards(self.newest, learner.state_dict())
            with self.ranks.together():
                if (learner.critic is None) != (saved["critic"] is None):
                    had, wanted = ("without", "not be gae") if saved["critic"] is None else ("with", "be gae")
                    raise UserError(
                        f"{self.folder} was run {had} a critic: algorithm.advantage must {wanted}, got "
                        f"{self.config.algorithm.advantage}"
                    )
                vars(self.state).update(vars(RunState(**saved["state"])))
                self.saved_step = self.state.step
                load_learned(learner, saved, self.folder)
                for accelerator in accelerators:
                    if accelerator.name in saved["accelerators"]:  # recording may be new
                        accelerator.load_state_dict(saved["accelerators"][accelerator.name])
                if engine.lengths and saved.get("lengths"):
                    engine.lengths.load_state_dict(saved["lengths"])
            engine.policy_updated()
            engine.policy_version = self.state.policy_version

    def _check(self, saved: dict[str, Any]) -> None:
        """Raises UserError for other accelerators, or if they know prompts by numbers which are other prompts now."""
        names = sorted(accelerator.name for accelerator in self.accelerators if accelerator.enabled)
        if sorted(saved["enabled"]) != names:
            raise UserError(f"{self.folder} was run with the accelerators {sorted(saved['enabled'])}, not {names}")
        if saved["prompts"] == self.fingerprint:
            return
        if names:
            raise UserError(
                f"{self.folder} was run on other training prompts than task has now, also where those too long for "
                f"rollout were left out, and what its accelerators {names} have learned is of those: resume it with "
                f"task and rollout of its config.yaml, or begin a new run with model.path={self.folder / 'model'}"
            )
        self.logger.note("the training prompts are others than before")

    @contextmanager
    def owning_folder(self) -> Iterator[None]:
        """Makes and locks the run directory, and removes what a killed run left there.

        Raises:
            UserError: another run has the folder or wrote checkpoints since this one was set up, or it cannot be
                written.
        """
        with ExitStack() as held:
            with self.ranks.together():
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    held.enter_context(locked(self.folder))
                    if self.ranks.rank == 0:
                        if list_checkpoints(self.checkpoints) != self.present:
                            raise UserError(
                                f"another run has written to {self.checkpoints} in the meantime: start again"
                            )
                        for path in self.present:
                            if step_of(path) > self.state.step:  # the run could not be resumed from it
                                target = path.with_name(f"damaged-{path.name}")
                                shutil.rmtree(target, ignore_errors=True)
                                path.rename(target)
                        shutil.rmtree(self.folder / MODEL_ASIDE, ignore_errors=True)
                    write_text(self.folder / "config.yaml", dump_config(self.config))
                except OSError as error:
                    raise unusable_output_dir(self.folder, error.strerror) from error
            yield

    def due(self) -> bool:
        """Whether ``save.save_steps`` wants a checkpoint after this step."""
        every = self.config.save.save_steps
        return every > 0 and self.state.step % every == 0

    def save(self) -> None:
        """Writes a checkpoint of the run as it is."""
        with self.clock.measure("checkpoint"):
            self._save(self._progress())

    def _save(self, progress: dict[str, Any]) -> None:
        step, sharded = progress["state"]["step"], self.ranks.sharded
        best = best_evaluated(self.state.evaluations, {step, *map(step_of, list_checkpoints(self.checkpoints))})
        learned = self.learner.state_dict()
        path = save_checkpoint(
            self.checkpoints,
            step,
            progress if sharded else progress | learned,
            keep=self.config.save.save_total_limit,
            spare=best,
            ranks=self.ranks,
            shards=learned if sharded else None,
        )
        self.saved_step = step
        self.notify("on_save", step, path)

    def _progress(self) -> dict[str, Any]:
        """Returns everything in a checkpoint but weights and moments; the step that follows does not change it."""
        state = self.state
        state.wall_s, state.seconds = self.clock.wall_seconds, dict(self.clock.seconds)
        state.policy_version = self.engine.policy_version
        return {
            "state": asdict(state),
            "accelerators": {a.name: copy_containers(a.state_dict()) for a in self.accelerators},
            "enabled": [a.name for a in self.accelerators if a.enabled],
            "lengths": self.engine.lengths.state_dict() if self.engine.lengths else None,
            "dtype": dtype_name(self.policy.inference_model.dtype),
            "prompts": self.fingerprint,
        }

    @contextmanager
    def keeping_last_step(self) -> Iterator[None]:
        """Within it an error first saves the last finished step, if its weights are still there."""
        step, learner, rate = self.state.step, self.learner, self.config.optimizer.learning_rate
        with self.clock.measure("checkpoint"):
            progress = None if step == self.saved_step else self._progress()
        learner.changed = False
        try:
            yield
        except Exception as error:
            self._keep(step, progress, error)
            if isinstance(error, NotFinite):
                raise UserError(
                    f"{error}: optimizer.learning_rate {rate:g} may be too high, after {step} steps; "
                    f"{self.how_to_go_on()}"
                ) from error
            error.add_note(self.how_to_go_on())
            raise

    def _keep(self, step: int, progress: dict[str, Any] | None, error: Exception) -> None:
        """Saves the last finished step if possible, after an error in the one that follows ``step``."""
        if not self.ranks.all_know(error):  # several processes save together
            return
        try:
            if self.state.step > step:  # its evaluation failed, or its row of metrics
                self._save(self._progress())
            elif progress and not self.learner.changed:
                self._save(progress)
        except UserError as unwritten:
            error.add_note(str(unwritten))
        self.ranks.first(None)  # none ends before: torchrun then ends the others, even one that is still writing

    def how_to_go_on(self) -> str:
        """Tells which step a resumed run would go on from."""
        return f"step {self.saved_step} is saved: --resume goes on from it" if self.saved_step else "no step is saved"

    def save_models(self) -> None:
        """Writes the policy to RUN/model and, if an earlier checkpoint was evaluated best, that one to RUN/best.

        With ``model.lora``, RUN/adapter gets the adapters of the last step.

        Raises:
            UserError: something cannot be written.
        """
        if self.policy.streams_weights:
            self.engine.sleep()  # for its memory
        self._write("model")
        if self.policy.adapted:
            self._write("adapter")
        steps = [step_of(path) for path in list_checkpoints(self.checkpoints)]
        best = self.ranks.first(best_evaluated(self.state.evaluations, steps))
        if best not in (None, self.state.step):
            assert best is not None
            self._load_weights(best)
            self._write("best")
            self._load_weights(self.state.step)
            self.logger.note(f"step {best} was evaluated best: {self.folder / 'best'}")
        elif self.ranks.rank == 0:
            shutil.rmtree(self.folder / "best", ignore_errors=True)  # of a run that was shorter

    def _write(self, name: str) -> None:
        policy, folder, model = self.policy, self.folder / name, self.config.model
        write: Callable[[Path], None] = policy.save
        if name == "adapter":
            assert model.lora is not None
            models = (adapter_weights(policy.model), policy.model, policy.inference_model, model.lora)
            write = partial(save_adapter, *models, base=base_name(model))
        elif policy.streams_weights:
            policy.restore_inference_model()
        if self.ranks.rank == 0:
            try:
                save_model(write, folder)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{folder} cannot be written: {error}; {self.how_to_go_on()}") from error

    def _load_weights(self, step: int) -> None:
        path = self.checkpoints / f"step-{step:06d}"
        with self.ranks.together():
            saved = load_checkpoint(path)
        if "model" not in saved:
            saved |= read_shards(path, self.learner.state_dict())
        load_learned(self.learner, saved, self.folder)
        self.policy.sync_inference_model()
