"""Shared prefixes, suffix rollouts and gated extrapolation in TRL's ``GRPOTrainer``.

    trainer = SharedPrefixGRPOTrainer(...)  # all arguments of GRPOTrainer; each prompt is computed once

    suffixes = SuffixRollouts()
    trainer = GRPOTrainer(
        ..., rollout_func=suffixes, reward_funcs=suffixes.watch(reward), callbacks=[GatedExtrapolation(evaluate, 2048)]
    )

Needs trl 1.16 or newer, below 2. Its hook for rollouts is experimental.
"""

import functools
import inspect
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trl
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from rlkernels import _check
from rlkernels.extrapolation import Attempt, Gate, Limits, RankOneTrajectory
from rlkernels.integrations.trl_shared import SharedPrefixGRPOTrainer, SharedPrefixMixin
from rlkernels.rank1.stream import default_filter

__all__ = ["GatedExtrapolation", "SharedPrefixGRPOTrainer", "SharedPrefixMixin", "SuffixRollouts"]

if not (1, 16) <= tuple(int(part) for part in trl.__version__.split(".")[:2]) < (2, 0):
    raise ImportError(f"rlkernels.integrations.trl needs trl >= 1.16, < 2, found {trl.__version__}")


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


class SuffixRollouts:
    """TRL's ``rollout_func``: only the last part of an answer is generated (RPO, arXiv 2601.19404).

    A prompt that was answered right before begins with a part of that answer, cut at a random place that its group
    shares. The part given counts as the completion's beginning for reward functions and is left out of the loss
    (TRL's ``env_mask``). Evaluation answers from the start. Changes the objective: the policy learns to finish answers.

    Each process remembers the prompts that it has seen. Checkpoints of TRL do not hold ``answers``: save them beside.

    Args:
        cut_share: longest cut as a share of the remembered answer; the cut is uniform between one token and this.
        right: an answer is remembered if the watched reward exceeds this and it has come to its end.
        seed: of the cuts, and of which right answer of a group is remembered.

    Attributes:
        answers: prompt (messages as JSON) -> token ids of a whole answer.
        continued: rows of the last call that were given a beginning.
    """

    def __init__(self, *, cut_share: float = 1.0, right: float = 0.5, seed: int = 0):
        _check.number("cut_share", cut_share)
        if not 0 < cut_share <= 1:
            raise ValueError(f"cut_share must be above 0 and at most 1, got {cut_share!r}")
        self.cut_share, self.right, self.seed = cut_share, right, seed
        self.answers: dict[str, list[int]] = {}
        self.continued = 0
        self._watching = False
        self._step: int | None = None  # of the last rollouts for training; None: they were for evaluation
        self._ends: frozenset[int] = frozenset()

    def beginning(self, prompt: Any, step: int, longest: int) -> list[int]:
        """What answers to the prompt begin with at a step: fewer than ``longest`` tokens, none if it is new."""
        answer = self.answers.get(_key(prompt), [])
        if not 0 < len(answer) <= longest:
            return []
        most = max(int(self.cut_share * len(answer)), 1)
        return answer[: len(answer) - random.Random(f"{self.seed}/{step}/{_key(prompt)}").randint(1, most)]

    def __call__(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """Answers of TRL's own generation (``generate``, vLLM) to each prompt and its beginning.

        Raises:
            ValueError: a process that holds a part of a group only, prompts with images, tools, or no watched reward
                function and no ``answers``.
        """
        if not (self._watching or self.answers):
            raise ValueError("reward_funcs must hold the function that watch(reward) of these SuffixRollouts returned")
        training = trainer.model.training
        size = trainer.num_generations if training else trainer.num_generations_eval
        if any(prompts[i] != prompts[i - i % size] for i in range(len(prompts))) or len(prompts) % size:
            raise ValueError(
                f"per_device_train_batch_size must give each process whole groups of {size} answers, got a batch of "
                f"{len(prompts)} whose groups are split"
            )
        prompt_ids, images, multimodal = trainer._tokenize_prompts(prompts)
        if images or multimodal:
            raise ValueError(f"prompts must be of text alone for SuffixRollouts, got {prompts[0]!r:.200}")
        if trainer.tools:
            raise ValueError(f"tools must be None for SuffixRollouts, got {trainer.tools!r:.200}")
        step, longest = trainer.state.global_step, trainer.max_completion_length
        self._step, self._ends = (step if training else None), frozenset(trainer.eos_token_ids)
        given = [self.beginning(prompt, step, longest) if training else [] for prompt in prompts]
        self.continued = sum(map(bool, given))
        new, logprobs = trainer._generate_single_turn(
            [ids + begun for ids, begun in zip(prompt_ids, given)], None, {}, size
        )
        new = [ids[: longest - len(begun)] for ids, begun in zip(new, given)]
        if logprobs is not None:  # of the sampler; those of the beginnings are masked like the loss
            logprobs = [[0.0] * len(begun) + row[: len(ids)] for begun, ids, row in zip(given, new, logprobs)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [begun + ids for begun, ids in zip(given, new)],
            "logprobs": logprobs,
            "env_mask": [[0] * len(begun) + [1] * len(ids) for begun, ids in zip(given, new)],
        }

    def watch(self, reward: Callable[..., Sequence[float | None]]) -> Callable[..., Sequence[float | None]]:
        """The same reward function; what it finds right is remembered.

        Raises:
            TypeError: an async function.
        """
        if inspect.iscoroutinefunction(reward):
            raise TypeError(f"reward must be a plain function, got {reward!r}, which is async")

        self._watching = True

        @functools.wraps(reward)
        def watched(*, prompts: list, completion_ids: list, **columns: Any) -> Sequence[float | None]:
            values = reward(prompts=prompts, completion_ids=completion_ids, **columns)
            if self._step is not None:
                self._remember(prompts, completion_ids, values)
            return values

        return watched

    def _remember(self, prompts: list, completion_ids: list, values: Sequence[float | None]) -> None:
        options: dict[str, list[list[int]]] = {}
        for prompt, ids, value in zip(prompts, completion_ids, values, strict=True):
            if value is not None and value > self.right and ids and ids[-1] in self._ends:
                options.setdefault(_key(prompt), []).append(list(ids))
        for key, rows in options.items():
            self.answers[key] = random.Random(f"{self.seed}/{self._step}/kept/{key}").choice(rows)


class GatedExtrapolation(TrainerCallback):
    """Weights go on along the direction in which training moved them, if a paired test on held-out prompts says so.

    After AlphaRL (arXiv 2510.00553). Every ``track_steps`` steps the update is added to a
    :class:`rlkernels.RankOneTrajectory`. Where :func:`rlkernels.refusal` has nothing against it, predicted weights are
    written, ``evaluate`` answers the held-out prompts, and they stay only if :class:`rlkernels.Gate` accepts them;
    otherwise candidates nearer to the present weights are tried, and at last the present ones are put back bit for bit.

    For one process and weights that are trained whole (no LoRA). Set ``logging_steps=1``: accuracy comes from the logs,
    at least one for ``track_steps`` steps.

    Args:
        evaluate: model, range of numbers -> 0 or 1 for each of these held-out prompts. It is called in evaluation mode,
            without gradients and with the same state of torch's random numbers every time.
        prompts: how many held-out prompts there are, in random order; at least some hundred. Most attempts are decided
            by a part of them.
        track_steps: keep factors of the update every so many steps.
        first_step, every: first attempt, and steps from one decision to the next attempt.
        predictor, horizon: one of ``rlkernels.extrapolation.PREDICTORS``; the target is this many times the tracked
            steps.
        level: chance per run of accepting weights that are no better, at most.
        max_tries, shrink: candidates in one attempt; each takes this share of the way of the one before.
        limits: when to refuse. None: rlkernels' own.
        metric: the logged mean reward that stands for accuracy; averaged over its last ``smoothing`` values.

    Attributes:
        events: a dictionary for every attempt, refused ones included.
    """

    def __init__(self, evaluate: Callable[[Any, range], Sequence[float]], prompts: int, *, track_steps: int = 2,
                 first_step: int = 20, every: int = 20, predictor: str = "full", horizon: float = 2.0,
                 level: float = 0.05, max_tries: int = 3, shrink: float = 0.5, limits: Limits | None = None,
                 metric: str = "reward", smoothing: int = 5):  # fmt: skip
        for name, value in (("track_steps", track_steps), ("first_step", first_step), ("every", every),
                            ("smoothing", smoothing)):  # fmt: skip
            _check.integer(name, value, 1)
        self.rules = Attempt(predictor=predictor, horizon=horizon, limits=limits or Limits(), prompts=prompts,
                             max_tries=max_tries, shrink=shrink)  # fmt: skip
        self.evaluate, self.gate = evaluate, Gate(level)
        self.track_steps, self.next_attempt, self.every = track_steps, first_step, every
        self.metric, self.smoothing = metric, smoothing
        self.events: list[dict[str, Any]] = []
        self.trajectory: RankOneTrajectory | None = None
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._anchor = 0
        self._rewards: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:
            raise ValueError(f"GatedExtrapolation needs one process, got {args.world_size}")
        strategy, every = IntervalStrategy(args.logging_strategy).value, state.logging_steps
        if strategy != "steps" or self.track_steps % every:
            raise ValueError(
                f"logging_steps must divide track_steps {self.track_steps} of GatedExtrapolation, which reads "
                f"rewards from the logs, got {every} with logging_strategy {strategy!r}"
            )
        named = kwargs["model"].named_parameters()
        self._weights = {n: p for n, p in named if p.requires_grad and p.ndim == 2 and default_filter(n)}
        if not self._weights or any("lora_" in name for name in self._weights):
            found = next((name for name in self._weights if "lora_" in name), "none that is trained")
            raise ValueError(
                f"model must have 2-D projections that GatedExtrapolation can follow, trained themselves, not by LoRA; "
                f"got {type(kwargs['model']).__name__} with {found}"
            )
        self._restart(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:  # fmt: skip
        """After each training step, where its reward is known."""
        if logs is None or self.trajectory is None:
            return
        if self.metric not in logs:
            if "loss" in logs:  # of a step, not of an evaluation or the whole run
                raise ValueError(f"metric must be one of {sorted(logs)}, which TRL logs, got {self.metric!r}")
            return
        self._rewards.append(float(logs[self.metric]))
        step = state.global_step
        if step % self.track_steps or step == self._anchor:
            return
        window = self._rewards[-self.smoothing :]
        self.trajectory.track(self._weights, step=step - self._anchor, accuracy=sum(window) / len(window))
        if step >= self.next_attempt:
            self._attempt(step, kwargs["model"], kwargs["optimizer"])

    def _restart(self, step: int) -> None:
        """The weights as they are become the base of a new trajectory."""
        base = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.trajectory, self._anchor, self._rewards = RankOneTrajectory(base), step, []

    def _attempt(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert self.trajectory is not None
        objection = self.rules.refusal(self.trajectory)
        if objection is not None:
            self.events.append({"step": step, "accepted": False, "refused": str(objection)})
            return
        predicted = self.rules.predict(self.trajectory, self._weights)
        tries = self.rules.judge(self.gate, predicted, {name: [self._weights[name]] for name in predicted},
                                 functools.partial(self._answers, model), available=self.rules.prompts)  # fmt: skip
        self.events.append({"step": step, "accepted": tries[-1]["accepted"], "tries": tries})
        self.next_attempt = step + self.every
        if tries[-1]["accepted"]:
            for name in predicted:  # Adam's mean gradient is of where the weights were
                mean = optimizer.state.get(self._weights[name], {}).get("exp_avg")
                if mean is not None:
                    mean.zero_()
            self._restart(step)

    def _answers(self, model: torch.nn.Module, rows: range) -> Sequence[float]:
        training = model.training
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.eval()
            try:
                return self.evaluate(model, rows)
            finally:
                model.train(training)
