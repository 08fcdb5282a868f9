"""The training loop, top to bottom: choose prompts, plan, generate, score, collect, update, evaluate, save.

What it runs on, how it is evaluated and what is written is set up by :mod:`python_trainer.run`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from python_trainer.accelerators.base import Accelerator, StepContext
from python_trainer.callbacks import Callbacks
from python_trainer.data import Example, Group, Messages, Request, Rollout
from python_trainer.distributed import RankGroup
from python_trainer.dynamic_sampling import Refill
from python_trainer.errors import Interrupted, NotFinite, UserError
from python_trainer.files import write_text
from python_trainer.keyed import keyed_seed
from python_trainer.learner import Learner
from python_trainer.model.policy import Policy
from python_trainer.objective import shaped_rewards
from python_trainer.prompts import next_prompts
from python_trainer.rollout.engine import Engine, SamplingParams
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.run_state import Clock, RunState
from python_trainer.signals import StopSignal
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import Scores
from python_trainer.telemetry import Telemetry, choose_samples, rollout_statistics

REHEARSAL_RISE = 5  # updates on stored answers alone until their learning rate is the full one
COUNTED = ("generated_tokens", "prefill_tokens", "cached_tokens")  # of the engine's counters


class TrainingLoop(ABC):
    """Steps of training; whoever derives from it sets the attributes, and evaluates and saves.

    Attributes:
        prompts: token ids of the prompts, by split of the task.
        generation: the section ``rollout`` of the settings.
        accelerators: in the order in which they run.
        state: how far the run is.
        facts, rules: as of :class:`StepContext`.
    """

    task: Task
    prompts: dict[str, list[list[int]]]
    policy: Policy
    engine: Engine
    learner: Learner
    ranks: RankGroup
    generation: RolloutConfig
    accelerators: list[Accelerator]
    callbacks: Callbacks
    seed: int
    state: RunState
    clock: Clock
    folder: Path
    facts: Mapping[str, Any]
    rules: Mapping[str, Any]
    rehearsed = False  # in the present step

    def loop(self, telemetry: Telemetry, stop: StopSignal) -> None:
        """Steps until the run is finished; all rows of metrics go to ``telemetry``.

        Raises:
            Interrupted: a signal came; what was done is saved.
        """
        state, done = self.state, self.finished()
        while not done:
            with self.keeping():
                row, samples = self.step(state.step + 1)
                state.step += 1
                try:
                    if not (done := self.finished()) and self.evaluation_due():
                        row |= self.evaluation_row()
                        done = self.finished()
                    if done:
                        row |= self.evaluation_row("final")
                finally:
                    row |= self.totals()
                    telemetry.log(state.step, row, left=self.seconds_left())
                    telemetry.log_samples(state.step, samples)
                self.tell_callbacks("on_step", state.step, row)
            stopped = self.ranks.any(stop.name)
            if done or stopped or self.save_due():
                with self.clock.measure("checkpoint"):
                    self.save()
            if stopped and not done:
                raise Interrupted(f"{stopped}: stopped after step {state.step}, which is saved")

    def step(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One step: a batch of answers, and the update that they lead to -> metrics, a few of the answers."""
        clock, context = self.clock, self.context(number)
        telemetry, before, tokens_before = context.telemetry, dict(clock.seconds), dict(self.state.counts)
        self.rehearse(context)
        rollouts = self.roll_out(context)
        self.tell_callbacks("on_rollouts", number, rollouts)
        with clock.measure("rollout"):
            self.engine.rest()
        with clock.measure("train"):
            learned = self.update(rollouts, number)
            telemetry |= rollout_statistics(rollouts) | learned
            self.state.count("trained_tokens", telemetry["tokens/trained"])
        self.engine.policy_updated()
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                accelerator.after_update(context)
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in clock.seconds.items()}
        tokens = {name: count - tokens_before.get(name, 0) for name, count in self.state.counts.items()}
        telemetry |= {f"tokens/{name.removesuffix('_tokens')}": count for name, count in tokens.items()}
        generated = tokens["generated_tokens"]
        telemetry["tokens_per_second"] = generated / max(sum(spent.values()), 1e-9)
        telemetry["rollout_tokens_per_second"] = generated / max(spent["rollout"], 1e-9)
        row = telemetry | {f"time/{name}_s": seconds for name, seconds in spent.items()}
        return row, choose_samples(rollouts, self.policy.decode, self.asked)

    def asked(self, rollout: Rollout) -> str:
        """The prompt of a training answer as it was given; of messages their contents, without the template's text."""
        (prompt,) = self._asked([self.task.train[rollout.prompt_key]])
        return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)

    def rehearse(self, context: StepContext) -> None:
        """Updates on stored answers alone, with a rise of the learning rate of their own."""
        batches: list[list[Rollout]] = []
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                batches += accelerator.rehearse(context)
        self.rehearsed = bool(batches)
        if batches:
            with self.clock.measure("rollout"):
                self.engine.rest()
        for number, batch in enumerate(batches, 1):
            with self.clock.measure("train"):
                with self.telling_culprits(batch, context.step):
                    learned = self.learner.rehearse(batch, number / REHEARSAL_RISE)
                self.state.count("trained_tokens", learned["tokens/trained"])
            self.tell_work("stored answers in batches", number, len(batches))
        if batches:
            self.engine.policy_updated()

    def roll_out(self, context: StepContext) -> list[Rollout]:
        """The scored answers of one step: of one round, or with dynamic sampling of as many as it takes."""
        settings = self.generation
        if not settings.dynamic_sampling:
            return self.round(context, settings.prompts_per_step)
        refill = Refill(settings.prompts_per_step)
        while refill.missing and refill.rounds < settings.max_sampling_rounds:
            refill.add(self.round(context, refill.missing))
        context.telemetry |= refill.metrics()
        return refill.batch()

    def round(self, context: StepContext, count: int) -> list[Rollout]:
        """Scored answers to ``count`` prompts."""
        groups = self.choose(context, count)
        for group in groups:  # the noise of the samples is keyed by the step and these numbers
            group.sample_id, context.samples = context.samples, context.samples + group.num_samples
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                groups = accelerator.plan(context, groups)
        with self.clock.measure("rollout"):
            rollouts = self.generate(groups, context.seed)
        with self.clock.measure("reward"):
            self.score(groups, rollouts)
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                rollouts = accelerator.collect(context, rollouts)
        stored = []
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                stored += accelerator.replay(context, rollouts)
        return rollouts + stored

    def choose(self, context: StepContext, count: int) -> list[Group]:
        """The groups that the first accelerator with a choice of its own wants, or the next prompts in plain order."""
        for accelerator in self.accelerators:
            with self.timed(accelerator):
                groups = accelerator.choose(context, count)
            if groups is not None:
                return groups
        return context.groups_of(context.plain_order(count))

    def plain_order(self, count: int) -> list[int]:
        """Numbers of the next training prompts, by ``rollout.prompt_order``."""
        first, self.state.prompts = self.state.prompts, self.state.prompts + count
        lengths, done = [len(prompt) for prompt in self.prompts["train"]], self.state.step / self.learner.max_steps
        return next_prompts(self.generation.prompt_order, lengths, self.seed, first, count, done)

    def groups_of(self, keys: Sequence[int]) -> list[Group]:
        """The usual request for answers to these training prompts."""
        count, longest = self.generation.num_generations, self.generation.max_completion_length
        examples, prompts = self.task.train, self.prompts["train"]
        return [
            Group(prompts[key], [], count, longest, i * count, example=examples[key], prompt_key=key)
            for i, key in enumerate(keys)
        ]

    def generate(self, requests: Sequence[Request], seed: int) -> list[Rollout]:
        """The engine's answers, its tokens counted."""
        settings, before = self.generation, self.engine.stats
        sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, seed, tuple(settings.stop))
        rollouts = self.engine.generate(requests, sampling)
        for name in COUNTED:
            self.state.count(name, self.engine.stats[name] - before[name])
        return rollouts

    def score(self, groups: Sequence[Group], rollouts: Sequence[Rollout]) -> None:
        """Text, rewards and accuracy of every rollout; they come in the order of the groups."""
        owners = [(number, group) for number, group in enumerate(groups) for _ in range(group.num_samples)]
        texts = [self.policy.decode(rollout.response_ids) for rollout in rollouts]
        examples = [rollout.judged(group.example) for rollout, (_, group) in zip(rollouts, owners, strict=True)]
        said = [rollout.said(text) for rollout, text in zip(rollouts, texts)]
        scores = self.judge(examples, said, [r.response_ids for r in rollouts])
        for i, (rollout, (number, group)) in enumerate(zip(rollouts, owners, strict=True)):
            rollout.group, rollout.prompt_key, rollout.text = number, group.prompt_key, texts[i]
            rollout.reward, rollout.accuracy = scores.total[i], scores.accuracy[i]
            rollout.merit = None if scores.merit is None else scores.merit[i]
            rollout.rewards = {name: values[i] for name, values in scores.rewards.items()}

    def update(self, rollouts: list[Rollout], number: int) -> dict[str, float]:
        """New weights -> metrics."""
        with self.telling_culprits(rollouts, number):
            return self.learner.update(rollouts, number)

    @contextmanager
    def telling_culprits(self, rollouts: Sequence[Rollout], number: int) -> Iterator[None]:
        """Where something is not finite the run ends, and a file tells on which of these answers."""
        try:
            yield
        except NotFinite as error:
            path = self.folder / f"not-finite-step-{number:06d}.json"
            chosen = error.samples or range(len(rollouts))
            write_text(path, json.dumps([{"sample": i, **asdict(rollouts[i])} for i in chosen], indent=1) + "\n")
            cause = "cause it" if error.samples else "were trained on, none of which causes it alone"
            raise UserError(f"step {number}: {error}; {path} has the {len(chosen)} answers that {cause}") from error

    def context(self, number: int) -> StepContext:
        """What the accelerators may see in a step."""
        return StepContext(
            step=number,
            policy=self.policy,
            optimizer=self.learner.optimizer,
            engine=self.engine,
            task=self.task,
            seed=keyed_seed(self.seed, "step", number),
            judge=self.judge,
            evaluate_each=self.evaluate_each,
            groups_of=self.groups_of,
            plain_order=self.plain_order,
            generation=self.generation,
            micro_batch_tokens=self.learner.settings.micro_batch_tokens,
            max_steps=self.learner.max_steps,
            once=self.ranks.once,
            facts=self.facts,
            rules=self.rules,
        )

    def judge(
        self, examples: Sequence[Example], texts: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        """What answers are worth: the task's rewards, ``total`` shaped as the loss sees it."""
        scores = self.raw_scores(examples, texts, ids)
        longest = self.generation.max_completion_length
        return replace(scores, total=shaped_rewards(scores.total, ids, self.learner.algorithm, longest))

    def raw_scores(
        self, examples: Sequence[Example], texts: Sequence[str | Messages], ids: Sequence[Sequence[int]]
    ) -> Scores:
        """What the task says; once its rewards have shown that nothing is right or wrong, that holds for the run."""
        scores = self.ranks.score(self.task, examples, texts, ids)
        self.state.judged &= scores.merit is None
        return replace(scores, merit=None if self.state.judged else scores.total)

    def tell_callbacks(self, method: str, *arguments: Any) -> None:
        """Calls a method of all callbacks, on the first rank; an error ends all."""
        if self.callbacks:
            with self.ranks.together():
                if self.ranks.rank == 0:
                    self.callbacks.call(method, self, *arguments)

    def timed(self, accelerator: Accelerator) -> Any:
        """Within it, time counts as the accelerator's."""
        return self.clock.measure(f"accelerator/{accelerator.name}")

    @abstractmethod
    def _asked(self, examples: Sequence[Example]) -> list[str | Messages]:
        """What the policy is asked."""

    @abstractmethod
    def evaluate_each(self, split: str, rows: range | None = None) -> list[float]:
        """1 for every prompt answered right, else 0; or the raw reward where nothing is right or wrong."""

    @abstractmethod
    def tell_work(self, what: str, done: int, total: int) -> None:
        """Shows how far long work within a step is."""

    @abstractmethod
    def evaluation_due(self) -> bool: ...

    @abstractmethod
    def evaluation_row(self, name: str | None = None) -> dict[str, float]:
        """Metrics of an evaluation; with a name, of the start or the end of the run, each result is kept."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether steps or time are used up, or the target is reached; the same on all ranks."""

    @abstractmethod
    def keeping(self) -> Any:
        """Within it, whatever fails leaves the last finished step saved, if its weights are still there."""

    @abstractmethod
    def save_due(self) -> bool: ...

    @abstractmethod
    def save(self) -> None:
        """A checkpoint."""

    @abstractmethod
    def totals(self) -> dict[str, float]:
        """Seconds and tokens since the run began."""

    @abstractmethod
    def seconds_left(self) -> float: ...
