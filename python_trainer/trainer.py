"""The training loop, top to bottom: prompts, plan, generate, score, collect, update, evaluate, save."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.checkpoint import list_checkpoints, load_checkpoint
from python_trainer.config import Config, dump_config
from python_trainer.data import Completion, PlannedGroup, Rollout
from python_trainer.distributed import Alone
from python_trainer.distributed.shard_files import read_shards
from python_trainer.dynamic_sampling import Refill
from python_trainer.errors import Interrupted, NotFinite, UserError
from python_trainer.evaluations import save_evaluation
from python_trainer.files import check_output_dir, publish, unusable_output_dir, write_text
from python_trainer.keyed import keyed_seed, prompt_order
from python_trainer.learner import Learner
from python_trainer.model.policy import load_policy, set_matmul_precision
from python_trainer.objective import shaped_rewards
from python_trainer.rollout import Request, SamplingParams
from python_trainer.rollout.make import make_engine
from python_trainer.run_directory import read_metrics
from python_trainer.run_state import Progress, device_name, summarise
from python_trainer.signals import StopSignal
from python_trainer.telemetry import Clock, Telemetry, choose_samples, rollout_statistics


def first_rows(limit: int | None) -> range | None:
    """Numbers of the first prompts of a split; None: all of them."""
    return None if limit is None else range(limit)


class Trainer:
    """One training run in one directory.

    Args:
        config: all settings.
        output_dir: the run directory; made when it does not exist.
        start: what the first evaluation finds, where a run of the same policy, task and seed has it already.
        ranks: the processes that share the run, by :func:`python_trainer.distributed.start`; None: this one alone.
        resume: go on from the newest checkpoint in it, if there is one.
        timer: the clock that all seconds are read from; ``time.process_time`` counts the work of this program alone.

    Raises:
        UserError: something in the settings, files or model is no good. Nothing has been written then.
    """

    def __init__(self, config: Config, output_dir: Path, *, resume: bool = False, label: str = "train",
                 console: Console | None = None, timer: Callable[[], float] = time.perf_counter,
                 start: Sequence[float] | None = None, ranks: Alone | None = None):  # fmt: skip
        self.config, self.label, self.timer, self.ranks = config, label, timer, ranks or Alone()
        if config.parallel != self.ranks.name:
            raise UserError(
                f"ranks must be of the kind that config.parallel names ({config.parallel}), got {self.ranks.name}: "
                "use `with python_trainer.distributed.start(config) as ranks`, in processes that torchrun started"
            )
        self.output_dir = self.ranks.folder(output_dir)
        self.console = self.ranks.console(console) or Console(stderr=True)
        self.checkpoints, self.start = output_dir / "checkpoints", start
        with self.ranks.together():
            saved = self._load(output_dir, resume)
        self.learner = Learner(self.policy, config, self.ranks)
        self.accelerators: list[Accelerator] = [settings.make() for settings in config.accelerators.chosen()]
        self.progress = Progress(target=config.evaluation.target_accuracy)
        if saved is not None:
            self._restore(saved)

    # set-up --------------------------------------------------------------------------------------------------

    def _load(self, output_dir: Path, resume: bool) -> dict[str, Any] | None:
        """Task, policy and engine -> what the newest checkpoint holds, if there is one to go on from."""
        config = self.config
        check_output_dir(output_dir)
        checkpoints = list_checkpoints(self.checkpoints)
        if not resume and (checkpoints or any(row["step"] for row in read_metrics(output_dir))):
            raise UserError(f"{output_dir} already holds a run: add --resume to go on, or choose another --output-dir")
        saved = load_checkpoint(checkpoints[-1], shards=False) if resume and checkpoints else None
        set_matmul_precision("highest")  # until the engine has checked the model
        self.task = config.task.load()
        self._accuracy_chosen = self.task.accuracy_chosen
        for text in self.task.notes:
            self._note(text)
        splits = ["train", "test"]
        for settings in config.accelerators.chosen():
            splits += settings.splits(self.task)
        self.policy = load_policy(config.model)
        self.prompts: dict[str, list[list[int]]] = {}
        for split in splits:
            self._prompts(split)
        if not self.prompts["train"]:
            raise self._no_prompts("train")
        self.ranks.prepare(self.policy)
        self.engine = self.ranks.engine(make_engine(config, self.policy, output_dir), self.policy)
        self._heed_limit_of_engine()
        set_matmul_precision(config.model.matmul_precision)
        return saved

    def _note(self, text: str) -> None:
        """A line for the user, about what is no error but may not be meant so."""
        self.console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def _prompts(self, split: str) -> list[list[int]]:
        """Token ids of the prompts of a split."""
        if split not in self.prompts:
            examples = getattr(self.task, split)
            length = self.config.rollout.max_completion_length
            self.prompts[split] = self.policy.encode_split(split, examples, length)
        return self.prompts[split]

    def _heed_limit_of_engine(self) -> None:
        """Where it is below the model's, answers would otherwise end early without a word."""
        policy, engine = self.policy, self.engine
        if engine.max_positions < policy.max_length:
            policy.max_length, policy.limited_by = engine.max_positions, engine.limited_by
            length = self.config.rollout.max_completion_length
            for split, encoded in self.prompts.items():
                policy.check_room(split, getattr(self.task, split), encoded, length)

    def _no_prompts(self, split: str) -> UserError:
        size, path = (getattr(self.config.task, f"{split}_{kind}", None) for kind in ("size", "path"))
        return UserError(
            f"the task must have {split} prompts: task.{split}_size and task.{split}_path decide, got {size} and {path}"
        )

    def _restore(self, saved: dict[str, Any]) -> None:
        names = {accelerator.name for accelerator in self.accelerators}
        if set(saved["accelerators"]) != names:
            raise UserError(
                f"{self.output_dir} was run with the accelerators {sorted(saved['accelerators'])}, not {sorted(names)}"
            )
        if "model" not in saved:
            saved |= read_shards(list_checkpoints(self.checkpoints)[-1], self.learner.state_dict())
        if (self.learner.critic is None) != (saved["critic"] is None):
            had, wanted = ("without", "not be gae") if saved["critic"] is None else ("with", "be gae")
            raise UserError(
                f"{self.output_dir} was run {had} a critic: algorithm.advantage must {wanted}, got "
                f"{self.config.algorithm.advantage}"
            )
        self.progress = Progress(**saved["progress"])
        self._look_back_for_target()
        try:
            self.learner.load_state_dict(saved)
        except (RuntimeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"the checkpoint in {self.output_dir} is of another model than the settings: {reason}"
            ) from error
        for accelerator in self.accelerators:
            accelerator.load_state_dict(saved["accelerators"][accelerator.name])
        if self.engine.lengths and saved.get("lengths"):
            self.engine.lengths.load_state_dict(saved["lengths"])
        self.engine.policy_updated()

    def _look_back_for_target(self) -> None:
        """Where the target is another one than before, an evaluation of before may have reached it."""
        progress, target = self.progress, self.config.evaluation.target_accuracy
        if progress.target == target:
            return
        progress.target, progress.seconds_to_target, progress.tokens_to_target = target, None, None
        for row in read_metrics(self.output_dir) if target is not None else ():
            if row["step"] <= progress.step and row.get("eval/accuracy", -1.0) >= target:
                progress.seconds_to_target = row["time/training_s"]
                progress.tokens_to_target = int(row["total/generated_tokens"])
                break

    # the loop ------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Trains, and returns what is in summary.json."""
        config, progress = self.config, self.progress
        with self.ranks.together():
            try:
                self.output_dir.mkdir(parents=True, exist_ok=True)
                write_text(self.output_dir / "config.yaml", dump_config(config))
            except OSError as error:
                raise unusable_output_dir(self.output_dir, error.strerror) from error
        self.clock = Clock(progress.seconds, self.timer)
        self.started = self.timer() - progress.wall_s
        resumed_at = progress.step or None
        if resumed_at is None:
            self._begin()
        with (
            closing(self.engine),
            StopSignal(loud=self.ranks.rank == 0) as stop,
            Telemetry(
                self.output_dir, config.max_steps, label=self.label, after_step=resumed_at, console=self.console
            ) as telemetry,
        ):
            if resumed_at is None:
                row = self._evaluation_row(config.evaluation.eval_limit, "start", known=self.start)
                if self._ended_by_target():
                    row |= self._evaluation_row(config.evaluation.eval_limit, "final")
                telemetry.log(0, row | self._clock_row())
            done = self.ranks.first(self._finished())
            while not done:
                row, samples = self.step(progress.step + 1)
                progress.step += 1
                done = self.ranks.first(self._finished())
                if not done and self._evaluation_due():
                    row |= self._evaluation_row(config.evaluation.eval_limit_during)
                    done = self._ended_by_target()
                if done:
                    row |= self._evaluation_row(config.evaluation.eval_limit, "final")
                telemetry.log(progress.step, row | self._clock_row(), left=self._seconds_left())
                telemetry.log_samples(progress.step, samples)
                stopped = self.ranks.any(stop.name)
                if done or stopped or self._save_due():
                    with self.clock.measure("checkpoint"):
                        self._save()
                if stopped and not done:
                    raise Interrupted(f"{stopped}: stopped after step {progress.step}, which is saved")
        if config.save.save_model and self.ranks.rank == 0:
            aside = self.output_dir / ".model.tmp"
            self.policy.save(aside)
            publish(aside, self.output_dir / "model")
        summary = summarise(progress, self.clock.seconds, wall_s=self._wall_seconds())
        summary |= {"target_accuracy": config.evaluation.target_accuracy, "device": device_name(self.policy.device)}
        summary["accelerators"] = {accelerator.name: accelerator.summary() for accelerator in self.accelerators}
        write_text(self.output_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        return summary

    def _begin(self) -> None:
        """Lets the accelerators prepare, on the run's clock and token counts."""
        context = RunContext(
            output_dir=self.output_dir, tokenizer=self.policy.tokenizer, prompts=self.prompts["train"],
            answer=self._answer_once, seed=self.config.seed, console=self.console,
            writes=self.ranks.rank == 0,
        )  # fmt: skip
        for accelerator in self.accelerators:
            with self.clock.measure(f"accelerator/{accelerator.name}"):
                accelerator.begin(context)

    def _answer_once(self, prompt_keys: Sequence[int], attempt: int) -> list[Rollout]:
        """One whole answer to each of these training prompts, scored; another attempt has other noise."""
        length, prompts = self.config.rollout.max_completion_length, self.prompts["train"]
        groups = [
            PlannedGroup(self.task.train[key], key, prompts[key], 1, length, sample_id=key) for key in prompt_keys
        ]
        return self._score(groups, self._generate(groups, keyed_seed(self.config.seed, "answer once", attempt)))

    def step(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One step: a batch of answers, and the update that they lead to -> metrics, a few of the answers."""
        config, clock, telemetry = self.config, self.clock, dict[str, float]()
        before, tokens_before = dict(clock.seconds), dict(self.progress.counts)
        context = StepContext(
            step=number, policy=self.policy.model, optimizer=self.learner.optimizer, engine=self.engine,
            tokenizer=self.policy.tokenizer, evaluate=self.evaluate, evaluate_each=self.evaluate_each,
            seed=keyed_seed(config.seed, "step", number), telemetry=telemetry, gate_size=len(self.task.gate),
            task=self.task, config=config, scorer=self.policy,
        )  # fmt: skip
        rollouts = self._roll_out(context)
        with clock.measure("train"):
            telemetry |= rollout_statistics(rollouts)
            telemetry |= self._learn(rollouts, number)
            self.progress.count("trained_tokens", telemetry["tokens/trained"])
        self.engine.policy_updated()
        self.progress.policy_version += 1
        for accelerator in self.accelerators:
            with clock.measure(f"accelerator/{accelerator.name}"):
                accelerator.after_update(context)
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in clock.seconds.items()}
        tokens = {name: count - tokens_before.get(name, 0) for name, count in self.progress.counts.items()}
        telemetry |= {f"tokens/{name.removesuffix('_tokens')}": count for name, count in tokens.items()}
        generated = tokens["generated_tokens"]
        telemetry["tokens_per_second"] = generated / max(sum(spent.values()), 1e-9)
        telemetry["rollout_tokens_per_second"] = generated / max(spent["rollout"], 1e-9)
        row = telemetry | {f"time/{name}_s": seconds for name, seconds in spent.items()}
        return row, choose_samples(rollouts, self.policy.decode)

    def _learn(self, rollouts: list[Rollout], number: int) -> dict[str, float]:
        """The update; where something in it is not finite the run ends, and a file tells on which answers."""
        try:
            return self.learner.update(rollouts, number)
        except NotFinite as error:
            path = self.output_dir / f"not-finite-step-{number:06d}.json"
            chosen = error.samples or range(len(rollouts))
            write_text(path, json.dumps([{"sample": i, **asdict(rollouts[i])} for i in chosen], indent=1) + "\n")
            checkpoints = list_checkpoints(self.checkpoints)
            newest = f"the newest checkpoint, from before, is {checkpoints[-1]}" if checkpoints else "no checkpoint yet"
            raise UserError(
                f"step {number}: {error}, and the run ends; {path} has the {len(chosen)} answers that "
                f"{'cause it' if error.samples else 'were trained on, none of which causes it alone'}; {newest}"
            ) from error

    def _roll_out(self, context: StepContext) -> list[Rollout]:
        """The scored answers of one step: of one round, or with dynamic sampling of as many as it takes."""
        config, refill, first = self.config.rollout, Refill(self.config.rollout.prompts_per_step), self.progress.prompts
        while refill.missing and refill.rounds < (config.max_sampling_rounds if config.dynamic_sampling else 1):
            drawn = self.progress.prompts - first
            groups = self._draw_prompts(refill.missing, first_sample=drawn * config.num_generations)
            for accelerator in self.accelerators:
                with self.clock.measure(f"accelerator/{accelerator.name}"):
                    groups = accelerator.plan(context, groups)
            with self.clock.measure("rollout"):
                completions = self._generate(groups, context.seed)
            with self.clock.measure("reward"):
                rollouts = self._score(groups, completions)
            for accelerator in self.accelerators:
                with self.clock.measure(f"accelerator/{accelerator.name}"):
                    rollouts = accelerator.collect(context, rollouts)
            if not config.dynamic_sampling:
                return rollouts
            refill.add(rollouts)
        context.telemetry |= refill.metrics()
        return refill.batch()

    def _draw_prompts(self, count: int, *, first_sample: int = 0) -> list[PlannedGroup]:
        """The next prompts; the noise of their samples is keyed by the step and by numbers from ``first_sample``."""
        rollout, prompts = self.config.rollout, self.prompts["train"]
        keys = prompt_order(self.config.seed, self.progress.prompts, count, len(prompts))
        self.progress.prompts += count
        return [
            PlannedGroup(self.task.train[key], key, prompts[key], rollout.num_generations,
                         rollout.max_completion_length, sample_id=first_sample + i * rollout.num_generations)
            for i, key in enumerate(keys)
        ]  # fmt: skip

    def _generate(self, groups: list[PlannedGroup], seed: int) -> list[Completion]:
        rollout, before = self.config.rollout, self.engine.stats
        stats = ("generated_tokens", "prefill_tokens", "cached_tokens")
        requests = [Request(g.prompt_ids, g.prefix_ids, g.num_samples, g.max_new_tokens, g.sample_id) for g in groups]
        sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, seed, tuple(rollout.stop))
        completions = self.engine.generate(requests, sampling)
        for name in stats:
            self.progress.count(name, self.engine.stats[name] - before[name])
        return completions

    def _score(self, groups: list[PlannedGroup], completions: list[Completion]) -> list[Rollout]:
        owners = [(number, group) for number, group in enumerate(groups) for _ in range(group.num_samples)]
        responses = [[*group.prefix_ids, *c.ids] for (_, group), c in zip(owners, completions, strict=True)]
        texts = [self.policy.decode(ids) for ids in responses]
        scores = self.ranks.score(self.task, [group.example for _, group in owners], texts, responses)
        rewards = shaped_rewards(scores.total, responses, self.config)
        return [
            Rollout(
                prompt_key=group.prompt_key, group=number, prompt_ids=group.prompt_ids, response_ids=responses[i],
                prefix_len=len(group.prefix_ids), logprobs=completions[i].logprobs,
                finish_reason=completions[i].finish_reason, text=texts[i], reward=rewards[i],
                rewards={name: values[i] for name, values in scores.rewards.items()}, accuracy=scores.accuracy[i],
                policy_version=self.progress.policy_version,
            )
            for i, (number, group) in enumerate(owners)
        ]  # fmt: skip

    # evaluation, clock, files --------------------------------------------------------------------------------

    def evaluate(self, split: str, limit: int | None = None) -> float:
        """Accuracy of one answer per prompt, as of :meth:`evaluate_each`."""
        return fmean(self.evaluate_each(split, first_rows(limit)))

    def evaluate_each(self, split: str, rows: range | None = None) -> list[float]:
        """1 for every prompt answered right, else 0: one answer each, at temperature 1, always with the same noise."""
        prompts, rollout = self._prompts(split), self.config.rollout
        if not prompts:
            raise self._no_prompts(split)
        rows = range(len(prompts))[rows.start : rows.stop] if rows is not None else range(len(prompts))
        requests = [Request(prompts[i], max_new_tokens=rollout.max_completion_length, sample_id=i) for i in rows]
        sampling = SamplingParams(seed=keyed_seed(self.config.seed, "evaluate", split), stop=tuple(rollout.stop))
        ids = [completion.ids for completion in self.engine.generate(requests, sampling)]
        texts = [self.policy.decode(row) for row in ids]
        scores = self.ranks.score(self.task, getattr(self.task, split)[rows.start : rows.stop], texts, ids)
        self._note_partial(scores.rewards[self.task.accuracy])
        return scores.accuracy

    def _note_partial(self, rewards: Sequence[float | None]) -> None:
        """Says once what counts as right, where nobody chose it and the rewards do not make it plain."""
        partial = [reward for reward in rewards if reward is not None and reward > 0 and reward != 1]
        if self._accuracy_chosen or not partial:
            return
        self._accuracy_chosen = True
        self._note(
            f"task.accuracy is not set, so an answer counts as right where {self.task.accuracy} gives more than 0.5, "
            f"and to {len(partial)} of {len(rewards)} answers it gave neither 0 nor 1 but {partial[0]:.3g} and the "
            "like; task.accuracy may name a reward function that gives 0 or 1 (weight 0 leaves the reward as it is)"
        )

    def _evaluation_row(self, limit: int | None, name: str | None = None, known: Sequence[float] | None = None
                        ) -> dict[str, float]:  # fmt: skip
        """Evaluates on the test split, and notes when the target was reached; with a name, each result is kept."""
        progress, target = self.progress, self.config.evaluation.target_accuracy
        if not self.prompts["test"]:
            return {}
        seconds = self._training_seconds()
        with self.clock.measure("eval"):
            correct = self.evaluate_each("test", first_rows(limit)) if known is None else known
            if name is not None:
                save_evaluation(self.output_dir, name, correct)
        accuracy = fmean(correct)
        progress.evaluations.append([progress.step, accuracy])
        if target is not None and accuracy >= target and progress.seconds_to_target is None:
            progress.seconds_to_target = seconds
            progress.tokens_to_target = progress.counts.get("generated_tokens", 0)
        return {"eval/accuracy": accuracy}

    def _evaluation_due(self) -> bool:
        every = self.config.evaluation.eval_steps
        return every > 0 and self.progress.step % every == 0

    def _save_due(self) -> bool:
        every = self.config.save.save_steps
        return every > 0 and self.progress.step % every == 0

    def _wall_seconds(self) -> float:
        """Since training began, over all resumed parts; loading the model is not in it."""
        return self.timer() - self.started

    def _training_seconds(self) -> float:
        """Wall time without evaluations."""
        return self._wall_seconds() - self.clock.seconds.get("eval", 0.0)

    def _finished(self) -> bool:
        late = self.config.max_seconds is not None and self._training_seconds() >= self.config.max_seconds
        ended = self.progress.step >= self.config.max_steps or self._ended_by_target()
        return ended or (late and self.progress.step > 0)

    def _ended_by_target(self) -> bool:
        return self.config.evaluation.stop_at_target and self.progress.seconds_to_target is not None

    def _seconds_left(self) -> float:
        """By the mean step so far, or until max_seconds."""
        spent, step = self._training_seconds(), self.progress.step
        left = spent / step * (self.config.max_steps - step)
        return left if self.config.max_seconds is None else max(min(left, self.config.max_seconds - spent), 0.0)

    def _clock_row(self) -> dict[str, float]:
        return {
            "time/wall_s": self._wall_seconds(),
            "time/training_s": self._training_seconds(),
            "total/generated_tokens": self.progress.counts.get("generated_tokens", 0),
        }

    def _save(self) -> None:
        progress = self.progress
        progress.wall_s, progress.seconds = self._wall_seconds(), dict(self.clock.seconds)
        states = {accelerator.name: accelerator.state_dict() for accelerator in self.accelerators}
        lengths = self.engine.lengths.state_dict() if self.engine.lengths else None
        state = {"progress": asdict(progress), "accelerators": states, "lengths": lengths}
        keep = self.config.save.save_total_limit
        self.ranks.save(self.checkpoints, progress.step, state, self.learner.state_dict(), keep=keep)
