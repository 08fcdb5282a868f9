"""The prompts of a run: of its task and of its further test sets, as token ids, and the order to train on them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from python_trainer.config import Config, EvaluationConfig
from python_trainer.data import Example, Group, Messages, Rollout
from python_trainer.environment import ENVIRONMENTS
from python_trainer.errors import UserError
from python_trainer.model.policy import Policy
from python_trainer.rollout.episodes import initial_prompt
from python_trainer.run.run_state import RunState
from python_trainer.tasks.base import Task
from python_trainer.tasks.prompt_order import prompt_order
from python_trainer.tasks.rewards import required_columns


def load_tasks(config: Config, device: torch.device) -> list[Task]:
    """Load the task of a run, then those of ``evaluation.sets`` in their order; reward models go to the device.

    Raises:
        UserError: a file, function or setting of a task cannot be used.
    """
    task = config.task.load()
    tasks = [task, *(config.task.load_test_set(task, path) for path in config.evaluation.sets.values())]
    for settings in config.accelerators.chosen():
        settings.check_task(task)
    for function in chain.from_iterable(each.reward_functions.values() for each in tasks):
        if hasattr(function, "to"):  # a model
            function.to(device)
    return tasks


def note_unused_template_arguments(
    policy: Policy, prompts: Iterable[str | Messages], note: Callable[[str], None]
) -> None:
    """Tell that ``task.chat_template_kwargs`` is set, but no prompt goes through the chat template."""
    if policy.chat_template_kwargs and all(isinstance(prompt, str) for prompt in prompts):
        note("task.chat_template_kwargs has no effect: no prompt is a list of messages, which a chat template writes")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of an evaluation."""

    name: str  # keys the sampling noise
    task: Task
    examples: Sequence[Example]
    opened: Sequence[str | Messages]  # the prompts, as the environment opens them
    ids: Sequence[Sequence[int]]  # token ids of each prompt
    sampling: EvaluationConfig


class Prompts:
    """All prompts of a run. Each leaves room for the longest answer to it.

    Attributes:
        task: the run's task, without the examples that ``task.overlong`` dropped.
        opened: the prompts by split (train, test and gate), as the environment opens them.
        ids: their token ids, by split.
        sets: the test sets of ``evaluation.sets``.

    Raises:
        UserError: there are no training prompts; a prompt is too long, and ``task.overlong`` does not drop it.
    """

    def __init__(
        self, config: Config, tasks: Sequence[Task], policy: Policy, state: RunState, note: Callable[[str], None]
    ):
        self.config = config
        self.policy = policy
        self.state = state
        self.note = note
        self.task, *set_tasks = tasks
        policy.chat_template_kwargs = config.task.chat_template_kwargs
        self.opened: dict[str, list[str | Messages]] = {}
        self.ids: dict[str, list[list[int]]] = {}
        for split in ("train", "test", "gate"):
            examples = getattr(self.task, split)
            self._note_missing_columns(split, self.task, examples)
            fitting, self.opened[split], self.ids[split] = self._encode_fitting(split, examples)
            if len(fitting) < len(examples):
                changes: dict[str, Any] = {split: fitting}
                self.task = replace(self.task, **changes)
        if not self.ids["train"]:
            raise UserError(f"task {self.task.name} has no training prompts")
        self.sets: list[PromptSet] = []
        for name, task in zip(config.evaluation.sets, set_tasks):
            self._note_missing_columns(f"evaluation.sets.{name}", task, task.test)
            fitting_prompts = self._encode_fitting(f"evaluation.sets.{name}", task.test)
            self.sets.append(PromptSet(f"set {name}", task, *fitting_prompts, config.evaluation))
        all_prompts = chain(*self.opened.values(), *(prompt_set.opened for prompt_set in self.sets))
        note_unused_template_arguments(policy, all_prompts, note)

    def draw(self, count: int) -> list[int]:
        """Return the indices of the next ``count`` training prompts; every epoch visits each prompt once, shuffled."""
        first = self.state.prompts
        self.state.prompts += count
        return prompt_order(self.config.seed, first, count, len(self.ids["train"]))

    def groups(self, prompt_indices: Sequence[int], first: int = 0) -> list[Group]:
        """Return the usual request for answers to each of these training prompts.

        Args:
            first: how many prompts had the same seed before, so that every answer has noise of its own.
        """
        noise_ids = range(first, first + len(prompt_indices))
        num_generations = self.config.rollout.num_generations
        return self.groups_of(self.split("train"), prompt_indices, num_generations, noise_ids=noise_ids)

    def groups_of(
        self, prompt_set: "PromptSet", prompt_indices: Sequence[int], num_generations: int, *, noise_ids: Sequence[int]
    ) -> list[Group]:
        """Return requests for whole answers to these prompts of a set.

        Args:
            noise_ids: one per prompt; with one seed, answers under different ids draw different noise.
        """
        return [
            Group(
                prompt_set.ids[index],
                num_generations=num_generations,
                max_new_tokens=self.config.rollout.max_completion_length,
                sample_id=noise_id * num_generations,
                example=prompt_set.examples[index],
                prompt_index=index,
            )
            for index, noise_id in zip(prompt_indices, noise_ids, strict=True)
        ]

    def split(self, name: str) -> PromptSet:
        """Return the prompts of a split for an evaluation: test with its settings, others with one sample each."""
        sampling = self.config.evaluation if name == "test" else EvaluationConfig()
        return PromptSet(name, self.task, getattr(self.task, name), self.opened[name], self.ids[name], sampling)

    def text(self, split: str, rollout: Rollout) -> str:
        """Return the prompt of a rollout as written; of messages their contents, without a template."""
        prompt = self.opened[split][rollout.prompt_index]
        return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)

    def _note_missing_columns(self, name: str, task: Task, examples: Sequence[Example]) -> None:
        """Tell which columns that a reward function needs no example of a set has: it may find every answer wrong."""
        known = {column for example in examples for column in example.columns}
        for function_name, function in task.reward_functions.items() if examples else ():
            if missing := [column for column in required_columns(function) if column not in known]:
                self.note(
                    f"reward function {function_name} gets None for column {missing[0]!r}, which {name} prompts lack"
                )

    def _encode_fitting(
        self, name: str, examples: Sequence[Example]
    ) -> tuple[Sequence[Example], list[str | Messages], list[list[int]]]:
        """Return the examples whose prompts leave room for the longest answer, their prompts, and the token ids."""
        prompts = self._open(examples)
        ids = self.policy.encode(prompts)
        chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
        continued = sum(chat[-1]["role"] == "assistant" for chat in chats)
        if continued:
            self.note(
                f"{continued} of {len(prompts)} {name} prompts end in a message of the assistant, which answers "
                "continue"
            )
        max_completion_length = self.config.rollout.max_completion_length
        room = self.policy.room(max_completion_length)
        fitting = [row for row, prompt in enumerate(ids) if len(prompt) <= room]
        if self.config.task.overlong == "drop" and len(fitting) < len(ids):
            longest = max(range(len(ids)), key=lambda row: len(ids[row]))
            counts = f"{len(ids) - len(fitting)} of {len(ids)} {name} prompts dropped (task.overlong)"
            about = f"{counts}: more than {room} tokens"
            if not fitting:
                raise UserError(f"{about}; none is left")
            self.note(f"{about}; the longest is {examples[longest].place or longest} with {len(ids[longest])}")
            examples = [examples[row] for row in fitting]
            prompts = [prompts[row] for row in fitting]
            ids = [ids[row] for row in fitting]
        for index, (example, prompt) in enumerate(zip(examples, ids)):
            if not 0 < len(prompt) <= room:
                raise UserError(
                    f"prompt {example.place or f'{index} of the {name} split'} has {len(prompt)} tokens; with "
                    f"rollout.max_completion_length {max_completion_length} and {self.policy.limited_by} of "
                    f"{self.policy.max_length} tokens it may have 1 to {room}: {str(example.prompt)[:60]!r}"
                )
        return examples, prompts, ids

    def _open(self, examples: Sequence[Example]) -> list[str | Messages]:
        """Return the prompts of examples, as the environment opens them."""
        if self.config.task.environment is None:
            return [example.prompt for example in examples]
        make = ENVIRONMENTS.resolve(self.config.task.environment)
        return [initial_prompt(make, example) for example in examples]
