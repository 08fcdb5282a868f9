"""What a run asks: its tasks, their prompts as token ids, and the room that these leave for an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from python_trainer.data import Example, Messages
from python_trainer.environment import ENVIRONMENTS, Environment
from python_trainer.errors import UserError
from python_trainer.evaluating import EvaluatingLoop
from python_trainer.evaluation import EvaluationSampling, PromptSet
from python_trainer.rollout.episodes import opening
from python_trainer.tasks.base import Task
from python_trainer.tasks.settings import load_task


class AskingLoop(EvaluatingLoop):
    """A loop that has read the prompts of its task and of its further test sets.

    Attributes:
        prompts: token ids by split, of the examples of ``task``.
        environment: makes what answers the policy's turns; None: an answer is one turn.
    """

    prompts: dict[str, list[list[int]]]
    environment: type[Environment] | None

    def _load_tasks(self) -> tuple[dict[str, Task], list[str]]:
        """Those of the named sets, and which splits of the task are needed."""
        config = self.config
        self.task = load_task(config.task)
        self.environment = None if (make := config.task.environment) is None else ENVIRONMENTS.resolve(make)
        named = {name: self._task_of_set(name) for name in config.evaluation.sets}
        splits = ["train", "test"]
        for settings in config.accelerators.chosen():
            splits += settings.splits(self.task)
        return named, splits

    def _read_prompts(self, splits: Sequence[str], named: Mapping[str, Task]) -> None:
        self.policy.chat_template_kwargs = self.config.task.chat_template_kwargs
        for task in (self.task, *named.values()):
            for function in task.reward_functions.values():
                if hasattr(function, "to"):  # a model
                    function.to(self.policy.device)
        self.prompts = {}
        for split in splits:
            self._prompts(split)
        if not self.prompts["train"]:
            raise self._no_prompts("train")

    def _prompts(self, split: str) -> list[list[int]]:
        """Token ids of the prompts of a split."""
        if split not in self.prompts:
            examples = getattr(self.task, split)
            self.prompts[split] = self.policy.encode(self._asked(examples))
            self._heed_length(split)
        return self.prompts[split]

    def _asked(self, examples: Sequence[Example]) -> list[str | Messages]:
        """What the policy is asked."""
        make = self.environment
        return [example.prompt if make is None else opening(make, example) for example in examples]

    def _task_of_set(self, name: str) -> Task:
        settings, own = self.config.task_of_set(name), self.config.task
        for field in ("environment", "max_turns", "environment_timeout", "chat_template_kwargs"):
            ours, theirs = getattr(own, field), getattr(settings, field)
            if ours != theirs:
                raise UserError(f"evaluation.sets.{name}.task.{field} must be that of task, {ours}, got {theirs}")
        return load_task(settings)

    def _heed_length(self, split: str) -> None:
        """A prompt that leaves no room for an answer ends the run, or is dropped where task.overlong says so."""
        examples, prompts = getattr(self.task, split), self.prompts[split]
        drop = self.config.task.overlong == "drop"
        left, kept = self._fitting(split, examples, prompts, self._sampling(split), drop=drop)
        if len(left) < len(examples):
            fewer: dict[str, Any] = {split: left}
            self.task, self.prompts[split] = replace(self.task, **fewer), kept
            for settings in self.config.accelerators.chosen():
                settings.splits(self.task)  # may be too few by now

    def _fitting(
        self,
        name: str,
        examples: Sequence[Example],
        prompts: list[list[int]],
        sampling: EvaluationSampling,
        *,
        drop: bool,
    ) -> tuple[Sequence[Example], list[list[int]]]:
        """Examples and prompts that leave room for the longest answer; UserError where not all do, or none."""
        limit = self._longest(sampling), self._longest_by(name, sampling)
        room = self.policy.room(*limit)
        kept = [row for row, ids in enumerate(prompts) if len(ids) <= room]
        if drop and len(kept) < len(prompts):
            longest = max(range(len(prompts)), key=lambda row: len(prompts[row]))
            counts = f"{len(prompts) - len(kept)} of {len(prompts)} {name} prompts dropped (task.overlong)"
            about = f"{counts}: more than {room} tokens"
            if not kept:
                raise UserError(f"{about}; none is left")
            self._note(f"{about}; the longest is {examples[longest].place or longest} with {len(prompts[longest])}")
            examples, prompts = [examples[row] for row in kept], [prompts[row] for row in kept]
        self.policy.check_room(name, examples, prompts, *limit)
        return examples, prompts

    def _named_set(self, name: str, task: Task) -> PromptSet:
        settings, sampling = self.config.task_of_set(name), self.config.evaluation.sets[name]
        prompts = self.policy.encode(self._asked(task.test))
        if not prompts:
            raise UserError(f"evaluation.sets.{name}.task has no test prompts")
        examples, prompts = self._fitting(
            f"evaluation.sets.{name}", task.test, prompts, sampling, drop=settings.overlong == "drop"
        )
        return PromptSet(f"set {name}", task, examples, prompts, sampling)

    def _heed_limit_of_engine(self) -> None:
        """Where it is below the model's, answers would otherwise end early without a word."""
        policy, engine = self.policy, self.engine
        if engine.max_positions < policy.max_length:
            policy.max_length, policy.limited_by = engine.max_positions, engine.limited_by
            for split in self.prompts:
                self._heed_length(split)
