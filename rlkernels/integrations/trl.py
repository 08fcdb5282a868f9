"""Shared prefixes, suffix rollouts, gated extrapolation and a record of all answers in TRL's ``GRPOTrainer``.

    trainer = SharedPrefixGRPOTrainer(...)  # all arguments of GRPOTrainer; each prompt is computed once

    suffixes, recorder = SuffixRollouts(), HistoryRecorder("history.bin")
    trainer = GRPOTrainer(
        ..., rollout_func=suffixes, reward_funcs=recorder.watch(suffixes.watch(reward)),
        callbacks=[recorder, GatedExtrapolation(evaluate, 2048)],
    )

Needs trl 1.16 or newer, below 2. Its hook for rollouts is experimental.
"""

import functools
import inspect
import json
import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import trl
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from trl.models import unwrap_model_for_generation

from rlkernels import _check
from rlkernels.extrapolation import Attempt, Gate, RankOneTrajectory
from rlkernels.history import RolloutHistory
from rlkernels.integrations.trl_dpo import SharedPrefixDPOTrainer
from rlkernels.integrations.trl_shared import SharedPrefixGRPOTrainer, SharedPrefixRLOOTrainer
from rlkernels.rank1.projections import Projections, view_of

__all__ = [
    "GatedExtrapolation",
    "HistoryRecorder",
    "SharedPrefixDPOTrainer",
    "SharedPrefixGRPOTrainer",
    "SharedPrefixRLOOTrainer",
    "SuffixRollouts",
]

Reward = Callable[..., Sequence[float | None]]
logger = logging.getLogger(__name__)

if not (1, 16) <= tuple(int(part) for part in trl.__version__.split(".")[:2]) < (2, 0):
    raise ImportError(f"rlkernels.integrations.trl needs trl >= 1.16, < 2, found {trl.__version__}")


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def _tokenize(prompts: list, tokenizer: Any, options: dict[str, Any] | None) -> list[list[int]]:
    """Return the token ids that TRL gives a prompt of text, or of messages, without tools."""
    if isinstance(prompts[0], str):
        return tokenizer(text=prompts)["input_ids"]
    contents = [message["content"] for prompt in prompts for message in prompt]
    if any(part["type"] != "text" for content in contents if isinstance(content, list) for part in content):
        raise ValueError(f"prompts must be of text alone, got {prompts[0]!r:.200}")
    return tokenizer.apply_chat_template(
        conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **(options or {})
    )["input_ids"]


def _watch(reward: Reward, see: Callable[..., None]) -> Reward:
    """Return the same reward function; ``see`` gets what it returns and, by name, what it was given."""
    if inspect.iscoroutinefunction(reward):
        raise TypeError(f"reward must be a plain function, got {reward!r}, which is async")

    @functools.wraps(reward)
    def watched(**given: Any) -> Sequence[float | None]:
        values = reward(**given)
        see(values, **given)
        return values

    return watched


def _gather(values: list) -> list:
    """Join the lists of all processes, in their order."""
    if not dist.is_initialized():
        return values
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return [value for part in parts for value in part]


class SuffixRollouts:
    """TRL's ``rollout_func``: only the last part of an answer is generated (RPO, arXiv 2601.19404).

    A prompt that was answered right before begins with a part of that answer, cut at a random place that its group
    shares. The part given counts as the completion's beginning for reward functions and is left out of the loss
    (TRL's ``env_mask``). Evaluation answers from the start. Changes the objective: the policy learns to finish answers.

    Each process remembers the prompts that it has seen. Checkpoints of TRL do not hold ``answers``: save them beside.

    Args:
        right: an answer is remembered if the watched reward exceeds this and it has come to its end.
        seed: of the cuts, and of which right answer of a group is remembered.

    Attributes:
        answers: prompt (messages as JSON) -> token ids of a whole answer.
        continued: rows of the last call that were given a beginning.
    """

    def __init__(self, *, right: float = 0.5, seed: int = 0):
        self.right, self.seed = right, seed
        self.answers: dict[str, list[int]] = {}
        self.continued = 0
        self._watching = False
        self._step: int | None = None  # of the last rollouts for training; None: they were for evaluation
        self._ends: frozenset[int] = frozenset()

    def beginning(self, prompt: Any, step: int, longest: int) -> list[int]:
        """Return what answers to the prompt begin with at a step: fewer than ``longest`` tokens, none if it is new."""
        answer = self.answers.get(_key(prompt), [])
        if not 0 < len(answer) <= longest:
            return []
        return answer[: -random.Random(f"{self.seed}/{step}/{_key(prompt)}").randint(1, len(answer))]

    def __call__(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """Generate an answer to each prompt and its beginning, by vLLM if TRL uses it, else by ``generate``.

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
        if trainer.tools:
            raise ValueError(f"tools must be None for SuffixRollouts, got {trainer.tools!r:.200}")
        prompt_ids = _tokenize(prompts, trainer.processing_class, trainer.chat_template_kwargs)
        step, longest = trainer.state.global_step, trainer.max_completion_length
        self._step, self._ends = (step if training else None), frozenset(trainer.eos_token_ids)
        given = [self.beginning(prompt, step, longest) if training else [] for prompt in prompts]
        self.continued = sum(map(bool, given))
        generate = self._generate_by_vllm if trainer.use_vllm else self._generate
        new, logprobs = generate(trainer, [ids + begun for ids, begun in zip(prompt_ids, given)], size)
        new = [ids[: longest - len(begun)] for ids, begun in zip(new, given)]
        if logprobs is not None:  # of the sampler; those of the beginnings are masked like the loss
            logprobs = [[0.0] * len(begun) + row[: len(ids)] for begun, ids, row in zip(given, new, logprobs)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [begun + ids for begun, ids in zip(given, new)],
            "logprobs": logprobs,
            "env_mask": [[0] * len(begun) + [1] * len(ids) for begun, ids in zip(given, new)],
        }

    @torch.no_grad()
    def _generate(self, trainer: Any, rows: list[list[int]], size: int) -> tuple[list[list[int]], None]:
        width, device = max(map(len, rows)), trainer.accelerator.device
        pad = getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        with unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, trainer.args.ds3_gather_for_generation,
            trainer.generation_kwargs, trainer.args.gradient_checkpointing_kwargs,
        ) as model:  # fmt: skip
            found = model.generate(input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config)
        rows = found[:, width:].tolist()
        lengths = (next((i + 1 for i, token in enumerate(row) if token in self._ends), None) for row in rows)
        return [row[:length] for row, length in zip(rows, lengths)], None

    def _generate_by_vllm(self, trainer: Any, rows: list[list[int]], size: int) -> tuple[list, list]:
        """Generate by TRL's vLLM, whose weights TRL sends before it calls a ``rollout_func``."""
        _, new, logprobs, _ = trainer.vllm_generation.generate(prompts=rows, images=None, num_generations=size)
        return new, [[of_token[0] for of_token in row] for row in logprobs]

    def watch(self, reward: Reward) -> Reward:
        """Return the same reward function; what it finds right is remembered.

        Raises:
            TypeError: an async function.
        """
        watched = _watch(reward, self._remember)
        self._watching = True
        return watched

    def _remember(self, values: Sequence[float | None], *, prompts: list, completion_ids: list, **_: Any) -> None:
        if self._step is None:
            return
        options: dict[str, list[list[int]]] = {}
        for prompt, ids, value in zip(prompts, completion_ids, values, strict=True):
            if value is not None and value > self.right and ids and ids[-1] in self._ends:
                options.setdefault(_key(prompt), []).append(list(ids))
        for key, rows in options.items():
            self.answers[key] = random.Random(f"{self.seed}/{self._step}/kept/{key}").choice(rows)


class HistoryRecorder(TrainerCallback):
    """Stores the answers of a run in a file from which :class:`rlkernels.integrations.vllm.HistoryProposer` drafts.

    ``vllm serve`` takes it by ``--additional-config '{"rlkernels_history": PATH}'`` beside ``--speculative-config``,
    and reads it again when it is replaced. Answers to prompts of text or messages without tools are stored with their
    reward, and with the pass over the data as their epoch. The first process writes those of all.

    Args:
        path: of the file. One that is there already is continued; a missing folder is made.
        every: write after so many steps, and at the end.
        max_tokens: most tokens of answers that are kept.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 10, max_tokens: int = 10_000_000):
        self.path, self.every = path, _check.integer("every", every, 1)
        self.history = RolloutHistory.load(path) if os.path.exists(path) else RolloutHistory()
        self.history.resize(max_tokens)
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._new: list[tuple[list[int], list[int], float, int]] = []
        self._tokenize: Callable[[list], list[list[int]]] | None = None
        self._model: Any = None

    def watch(self, reward: Reward) -> Reward:
        """Return the same reward function; what it is given in training is recorded.

        Raises:
            TypeError: an async function.
        """
        return _watch(reward, self._record)

    def _record(self, values: Sequence[float | None], *, prompts: list, completion_ids: list, trainer_state: Any,
                **_: Any) -> None:  # fmt: skip
        if self._tokenize is None:
            raise ValueError("callbacks must hold the HistoryRecorder whose watch(reward) is in reward_funcs")
        if self._model.training:
            epoch, rows = int(trainer_state.epoch or 0), zip(self._tokenize(prompts), completion_ids, values)
            for prompt, answer, value in rows:  # TRL leaves None and NaN out, too
                reward_of = 0.0 if value is None or not math.isfinite(value) else float(value)
                self._new.append((prompt, answer, reward_of, epoch))

    def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
        self._model, tokenizer = kwargs["model"], kwargs["processing_class"]
        self._tokenize = functools.partial(_tokenize, tokenizer=tokenizer, options=args.chat_template_kwargs)

    on_init_end = on_train_begin  # an evaluation may come before training

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._write()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._write()

    def _write(self) -> None:
        rows, self._new = _gather(self._new), []
        if not dist.is_initialized() or dist.get_rank() == 0:
            for prompt, answer, reward, epoch in rows:
                self.history.add(prompt, answer, reward=reward, epoch=epoch)
            self.history.save(self.path)


class GatedExtrapolation(TrainerCallback):
    """Weights go on along the direction in which training moved them, if a paired test on held-out prompts says so.

    After AlphaRL (arXiv 2510.00553). Every ``track_steps`` steps the update is added to a
    :class:`rlkernels.RankOneTrajectory`. Where :func:`rlkernels.refusal` has nothing against it,
    :meth:`rlkernels.extrapolation.Attempt.judge` tries predicted weights on the held-out prompts.

    For weights that each process holds and trains whole: no LoRA, no shards. Several processes share the held-out
    prompts. Set ``logging_steps=1``: accuracy comes from the logs, at least one for ``track_steps`` steps.

    Args:
        evaluate: model, range of numbers -> 0 or 1 for each of these held-out prompts. It is called in evaluation mode,
            without gradients and with the same state of torch's random numbers every time; each process gets a part
            of the range.
        prompts: how many held-out prompts there are, in random order; at least some hundred. Most attempts are decided
            by a part of them.
        track_steps: keep factors of the update every so many steps.
        first_step, every: first attempt, and steps from one decision to the next attempt.
        level: chance per run of accepting weights that are no better, at most.
        metric: the logged mean reward, used as accuracy; averaged over its last ``smoothing`` values.
        rules: fields of :class:`rlkernels.extrapolation.Attempt`, such as ``predictor``, ``horizon`` and ``limits``.

    Attributes:
        events: a dictionary for every attempt, refused ones included.
    """

    def __init__(self, evaluate: Callable[[Any, range], Sequence[float]], prompts: int, *, track_steps: int = 2,
                 first_step: int = 20, every: int = 20, level: float = 0.05, metric: str = "reward", smoothing: int = 5,
                 **rules: Any):  # fmt: skip
        for name, value in (("track_steps", track_steps), ("first_step", first_step), ("every", every),
                            ("smoothing", smoothing)):  # fmt: skip
            _check.integer(name, value, 1)
        self.rules = Attempt(prompts=prompts, **rules)
        self.evaluate, self.gate = evaluate, Gate(level)
        self.track_steps, self.next_attempt, self.every = track_steps, first_step, every
        self.metric, self.smoothing = metric, smoothing
        self.events: list[dict[str, Any]] = []
        self.trajectory: RankOneTrajectory | None = None
        self._weights = Projections.of({})
        self._anchor = 0
        self._rewards: list[float] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        strategy, every = IntervalStrategy(args.logging_strategy).value, state.logging_steps
        if strategy != "steps" or self.track_steps % every:
            raise ValueError(
                f"logging_steps must divide track_steps {self.track_steps} of GatedExtrapolation, which reads "
                f"rewards from the logs, got {every} with logging_strategy {strategy!r}"
            )
        trained = {name: p for name, p in kwargs["model"].named_parameters() if p.requires_grad}
        self._weights = Projections.of(trained)
        logger.info("GatedExtrapolation: %s", self._weights.describe_left_out())
        wrong = [name for name, weight in self._weights.items() if "lora_" in name or hasattr(weight, "full_tensor")]
        if not self._weights or wrong:
            raise ValueError(
                f"model must have projections that GatedExtrapolation can follow, trained themselves, not by LoRA, "
                f"and whole in each process; got {type(kwargs['model']).__name__} with "
                f"{wrong[0] if wrong else 'none that is trained'}"
            )
        self._restart(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:  # fmt: skip
        """Track a training step, and attempt an extrapolation when one is due."""
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
        """Start a new trajectory at the present weights."""
        base = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self.trajectory, self._anchor, self._rewards = RankOneTrajectory(base), step, []

    def _attempt(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert self.trajectory is not None
        objection = self.rules.refusal(self.trajectory)
        if objection is not None:
            self.events.append({"step": step, "accepted": False, "refused": str(objection)})
            return
        predicted = self.rules.predict(self.trajectory, self._weights)
        if dist.is_initialized():
            for weight in predicted.values():
                dist.broadcast(weight, 0)
        tries = self.rules.judge(self.gate, predicted, {name: [self._weights[name]] for name in predicted},
                                 functools.partial(self._answers, model), available=self.rules.prompts)  # fmt: skip
        self.events.append({"step": step, "accepted": tries[-1]["accepted"], "tries": tries})
        self.next_attempt = step + self.every
        if tries[-1]["accepted"]:
            for name in predicted:  # Adam's mean gradient is of where the weights were
                parameter = self._weights.weights[self._weights.names[name]]
                mean = optimizer.state.get(parameter, {}).get("exp_avg")
                if mean is not None:
                    view_of(name, mean).zero_()
            self._restart(step)

    def _answers(self, model: torch.nn.Module, rows: range) -> Sequence[float]:
        training = model.training
        parts, part = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        own = rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.eval()
            try:
                return _gather(list(self.evaluate(model, own)) if own else [])
            finally:
                model.train(training)
