"""Shared prefixes, suffix rollouts, gated extrapolation and a record of all answers in TRL's ``GRPOTrainer``.

    trainer = SharedPrefixGRPOTrainer(...)  # all arguments of GRPOTrainer; each prompt is computed once

    suffixes, recorder = SuffixRollouts(), HistoryRecorder("history.bin")
    trainer = GRPOTrainer(
        ..., rollout_func=suffixes, reward_funcs=recorder.watch(suffixes.watch(reward)),
        callbacks=[recorder, GatedExtrapolation(evaluate, 2048)],
    )

Needs trl 1.16 or newer, below 2. Its hook for rollouts is experimental.
"""

import contextlib
import copy
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, cast

import torch
import trl
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SchedulerType
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import is_async_callable

from rlkernels import _check
from rlkernels.extrapolation import Attempt, Extrapolator, Gate, forget_momentum
from rlkernels.history import HISTORY_TOKENS, RolloutHistory
from rlkernels.history.suffixes import SuffixMemory
from rlkernels.integrations.trl_dpo import SharedPrefixDPOTrainer
from rlkernels.integrations.trl_shared import SharedPrefixGRPOTrainer, SharedPrefixRLOOTrainer
from rlkernels.rank1.projections import Projections
from rlkernels.sampling.keys import keyed_seed

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


def _watch(reward: Reward, record: Callable[..., None]) -> Reward:
    """Return the same reward function; ``record`` gets its values and its keyword arguments."""
    if is_async_callable(reward):
        raise TypeError(f"reward must be a plain function, got {reward!r}, which is async")

    @functools.wraps(reward)
    def watched(**arguments: Any) -> Sequence[float | None]:
        values = list(reward(**arguments))  # an iterator gives them once
        record(values, **arguments)
        return values

    return watched


def _call_on_rank0(function: Callable[[], Any]) -> Any:
    """Call a function in the first process, and return its result in all of them."""
    return broadcast_object_list([function() if PartialState().is_main_process else None])[0]


class SuffixRollouts:
    """TRL's ``rollout_func`` that generates only the last part of an answer (RPO, arXiv 2601.19404).

    If an earlier answer to a prompt was right, new ones begin with a prefix of it, cut at a random place that the group
    shares (see :mod:`rlkernels.history.suffixes`). Reward functions see the prefix as the completion's beginning; the
    loss leaves it out (TRL's ``env_mask``). Evaluation answers from the start. Changes the objective: the policy learns
    to finish answers.

    Each process remembers the prompts that it has seen. Checkpoints of TRL do not hold ``answers``: save them yourself.

    Args:
        right: a finished answer is remembered if its watched reward exceeds this.
        seed: of the cuts, and of the choice among a group's right answers.
        whole_share: share of the groups that answer from the start. If their watched rewards become clearly worse,
            all groups do. 0: none, and no such check.

    Attributes:
        answers: prompt (messages as JSON) -> token ids of a whole answer.
        continued: rows of the last call that began with a prefix.
    """

    def __init__(self, *, right: float = 0.5, seed: int = 0, whole_share: float = 0.25):
        self.right, self.seed = right, seed
        self._memory = SuffixMemory(whole_share=whole_share)
        self.continued = 0
        self._watching = False
        self._surplus_noted = False
        self._step: int | None = None  # of the last training rollouts; None: the last ones were for evaluation
        self._ends: frozenset[int] = frozenset()  # end-of-sequence tokens

    @property
    def answers(self) -> dict[Any, list[int]]:
        return self._memory.answers

    @answers.setter
    def answers(self, answers: dict[Any, list[int]]) -> None:
        self._memory.answers = answers

    def beginning(self, prompt: Any, step: int, longest: int) -> list[int]:
        """Return the prefix of answers to the prompt at a step: below ``longest`` tokens, none for a new prompt."""
        return self._memory.draw_prefix(_key(prompt), keyed_seed(self.seed, step), longest)

    def __call__(self, prompts: list, trainer: Any) -> dict[str, Any]:
        """Generate an answer to each prompt and its prefix, by vLLM if TRL uses it.

        Else ``generate`` runs once; where rows would pass the model's context, once for each length of the prefixes.

        Raises:
            ValueError: a process that holds a part of a group only, prompts with images, tools, or no watched reward
                function and no ``answers``.
        """
        if not (self._watching or self.answers):
            raise ValueError("reward_funcs must hold the function that watch(reward) of these SuffixRollouts returned")
        training = trainer.model.training
        num_generations = trainer.num_generations if training else trainer.num_generations_eval
        splits_groups = any(prompt != prompts[i - i % num_generations] for i, prompt in enumerate(prompts))
        if training and (splits_groups or len(prompts) % num_generations):
            raise ValueError(
                f"per_device_train_batch_size must give each process whole groups of {num_generations} answers, got a "
                f"batch of {len(prompts)} whose groups are split"
            )
        if trainer.tools:
            raise ValueError(f"tools must be None for SuffixRollouts, got {trainer.tools!r:.200}")
        prompt_ids = _tokenize(prompts, trainer.processing_class, trainer.chat_template_kwargs)
        step = trainer.state.global_step
        longest = trainer.max_completion_length
        self._step = step if training else None
        if training and (fall := self._memory.end_if_worse()) is not None:
            logger.warning("SuffixRollouts: %s", fall)
        self._ends = frozenset(trainer.eos_token_ids)
        prefixes = [self.beginning(prompt, step, longest) if training else [] for prompt in prompts]
        self.continued = sum(map(bool, prefixes))
        generate = self._generate_by_vllm if trainer.use_vllm else self._generate
        inputs = [ids + prefix for ids, prefix in zip(prompt_ids, prefixes)]
        suffixes, logprobs = generate(trainer, inputs, num_generations, [longest - len(prefix) for prefix in prefixes])
        surplus = sum(max(len(prefix) + len(ids) - longest, 0) for ids, prefix in zip(suffixes, prefixes))
        if surplus and trainer.use_vllm and not self._surplus_noted:
            self._surplus_noted = True
            logger.warning(
                "SuffixRollouts: %d tokens behind prefixes passed max_completion_length %d and were cut: vLLM "
                "generates all rows up to one longest length",
                surplus, longest,
            )  # fmt: skip
        suffixes = [ids[: longest - len(prefix)] for ids, prefix in zip(suffixes, prefixes)]
        if logprobs is not None:  # of the sampler; zeros for prefixes, which env_mask leaves out of the loss
            logprobs = [[0.0] * len(prefix) + row[: len(ids)] for prefix, ids, row in zip(prefixes, suffixes, logprobs)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [prefix + ids for prefix, ids in zip(prefixes, suffixes)],
            "logprobs": logprobs,
            "env_mask": [[0] * len(prefix) + [1] * len(ids) for prefix, ids in zip(prefixes, suffixes)],
        }

    @torch.no_grad()
    def _generate(
        self, trainer: Any, rows: list[list[int]], size: int, room: list[int]
    ) -> tuple[list[list[int]], None]:
        """Generate by the model's ``generate``, each row up to its end-of-sequence token.

        ``room``: the most new tokens of each row. Where the context of the model is too short for all rows with the
        most room, only rows with the same room are generated together. Else all run to the most room of any, and the
        caller cuts them. Processes that share a model make the same calls, with one token where one has no row.
        """
        suffixes = [list[int]()] * len(rows)
        device = trainer.accelerator.device
        pad = getattr(trainer.processing_class, "tokenizer", trainer.processing_class).pad_token_id
        config = copy.copy(trainer.generation_config)
        most_of_all = config.max_new_tokens or max(room)
        context = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        sizes = [(len(row), most) for row, most in zip(rows, room)]
        if sharded:
            sizes = gather_object(sizes)
        calls = sorted({most for _, most in sizes}, reverse=True)
        if context is None or max(length for length, _ in sizes) + calls[0] <= context:
            calls = calls[:1]
            room = [calls[0]] * len(rows)
        wrapped = trainer.model_wrapped
        with (
            unwrap_model_for_generation(
                wrapped, trainer.accelerator, trainer.args.ds3_gather_for_generation, trainer.generation_kwargs,
                trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            # the model within lacks the hooks that gather the outermost weights of FSDP 1
            FullyShardedDataParallel.summon_full_params(wrapped, recurse=False)
            if isinstance(wrapped, FullyShardedDataParallel)
            else contextlib.nullcontext(),
        ):  # fmt: skip
            for most in calls:
                chosen = [i for i, its_room in enumerate(room) if its_room == most]
                chosen_rows = [rows[i] for i in chosen] or [rows[0][:1]]
                inputs = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in chosen_rows]
                ids = pad_sequence(inputs, True, pad, "left").to(device)
                mask = pad_sequence([torch.ones_like(row) for row in inputs], True, 0, "left").to(device)
                config.max_new_tokens = min(most, most_of_all)
                output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
                for i, row in zip(chosen, output[:, ids.shape[1] :].tolist()):
                    end = next((place + 1 for place, token in enumerate(row) if token in self._ends), None)
                    suffixes[i] = row[:end]
        return suffixes, None

    def _generate_by_vllm(self, trainer: Any, rows: list[list[int]], size: int, room: list[int]) -> tuple[list, list]:
        """Generate by TRL's vLLM, whose weights TRL sends before it calls a ``rollout_func``.

        TRL joins the rows of all processes in one call, for which it has one longest length.
        """
        _, suffixes, logprobs, _ = trainer.vllm_generation.generate(prompts=rows, images=None, num_generations=size)
        return suffixes, [[candidates[0] for candidates in row] for row in logprobs]

    def watch(self, reward: Reward) -> Reward:
        """Return the same reward function; answers that it finds right are remembered.

        Raises:
            TypeError: an async function.
        """
        watched = _watch(reward, self._remember)
        self._watching = True
        return watched

    def _remember(self, values: Sequence[float | None], /, *, prompts: list, completion_ids: list, **_: Any) -> None:
        if self._step is None:
            return
        seed = keyed_seed(self.seed, self._step)
        groups: dict[str, list[tuple[list[int], float]]] = {}
        for prompt, ids, value in zip(prompts, completion_ids, values, strict=True):
            if value is not None and math.isfinite(value):  # TRL leaves None and NaN out, too
                groups.setdefault(_key(prompt), []).append((ids, float(value)))
        whole = [group for key, group in groups.items() if self._memory.is_whole(key, seed)]
        self._memory.watch(self._step, [fmean(value for _, value in group) for group in whole])
        for key, group in groups.items():
            right = [(ids, value) for ids, value in group if value > self.right and ids and ids[-1] in self._ends]
            self._memory.remember(key, seed, [ids for ids, _ in right], [value for _, value in right])


class HistoryRecorder(TrainerCallback):
    """Store the answers of a run in a file from which :class:`rlkernels.integrations.vllm.HistoryProposer` drafts.

    ``vllm serve`` takes it by ``--additional-config '{"rlkernels_history": PATH}'`` with ``--speculative-config``,
    and reads it again when it is replaced. Answers to prompts of text or messages without tools are stored with their
    reward, and with the pass over the data as their epoch. A new run counts on from the last epoch in the file, a
    resumed one goes on in it. The first process writes the answers of all.

    Args:
        path: of the file. An existing file is continued; a missing folder is made.
        every: steps between two writes; the file is also written at the end.
        max_tokens: most tokens of answers in the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 10, max_tokens: int = HISTORY_TOKENS):
        self.path, self.every = path, _check.integer("every", every, 1)
        self.history = RolloutHistory.load(path) if os.path.exists(path) else RolloutHistory()
        self.history.resize(max_tokens)
        newest = self.history.stats["newest_epoch"]
        self._stored_epochs = 0 if newest is None else newest + 1  # of earlier runs, and of this one
        self._first_epoch = 0  # of this run, in the file
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._new: list[tuple[list[int], list[int], float, int]] = []
        self._watching = False
        self._tokenize: Callable[[list], list[list[int]]] | None = None
        self._model: Any = None

    def watch(self, reward: Reward) -> Reward:
        """Return the same reward function; the answers that it scores in training are recorded.

        Raises:
            TypeError: an async function.
        """
        watched = _watch(reward, self._record)
        self._watching = True
        return watched

    def _record(self, values: Sequence[float | None], /, *, prompts: list, completion_ids: list, trainer_state: Any,
                **_: Any) -> None:  # fmt: skip
        if self._tokenize is None:
            raise ValueError("callbacks must hold the HistoryRecorder whose watch(reward) is in reward_funcs")
        if self._model.training:
            epoch = self._first_epoch + int(trainer_state.epoch or 0)
            for prompt, answer, value in zip(self._tokenize(prompts), completion_ids, values):
                # TRL leaves None and NaN out, too
                recorded = 0.0 if value is None or not math.isfinite(value) else float(value)
                self._new.append((prompt, answer, recorded, epoch))

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if not self._watching:
            raise ValueError("reward_funcs must hold the function that watch(reward) of this HistoryRecorder returned")
        begun_epochs = math.ceil(state.epoch or 0)  # 0 but for a resumed run
        self._first_epoch = max(self._stored_epochs - begun_epochs, 0)
        self._model = kwargs["model"]
        tokenizer = kwargs["processing_class"]
        self._tokenize = functools.partial(_tokenize, tokenizer=tokenizer, options=args.chat_template_kwargs)

    on_init_end = on_train_begin  # an evaluation may come before training

    def on_step_end(self, args: Any, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._write()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._write()

    def _write(self) -> None:
        rows = gather_object(self._new)
        self._new = []
        self._stored_epochs = max([self._stored_epochs, *(epoch + 1 for *_, epoch in rows)])
        if PartialState().is_main_process:
            for prompt, answer, reward, epoch in rows:
                self.history.add(prompt, answer, reward=reward, epoch=epoch)
            try:
                self.history.save(self.path)
            except OSError as error:  # the next write has these answers, too
                logger.warning("the history %s was not written: %s", self.path, error)


GATE_STATE = "gate of GatedExtrapolation"  # in the trainer's state, which a checkpoint holds


def _callback_states(state: TrainerState) -> dict[str, Any]:
    return cast(dict[str, Any], state.stateful_callbacks)  # typed as a list


class GatedExtrapolation(TrainerCallback):
    """Extrapolate weights along their direction of training, if a paired test on held-out prompts accepts the result.

    After AlphaRL (arXiv 2510.00553). Every ``track_steps`` steps the update is added to a
    :class:`rlkernels.RankOneTrajectory`. Unless :func:`rlkernels.refusal` objects,
    :meth:`rlkernels.extrapolation.Attempt.judge` tries predicted weights on the held-out prompts.

    For weights that each process holds and trains whole: no LoRA, no shards. Several processes share the held-out
    prompts. Set ``logging_steps=1``: accuracy comes from the logs, at least one for ``track_steps`` steps.

    Args:
        evaluate: model, range of numbers -> 0 or 1 for each of these held-out prompts. It is called in evaluation mode,
            without gradients and with the same state of torch's random numbers every time; each process gets a part
            of the range.
        prompts: number of held-out prompts, in random order; at least some hundred. Some of them decide most attempts.
        track_steps: steps between two records of the update's factors.
        first_step, every: first attempt, and steps from one decision to the next attempt.
        level: largest chance per run of accepting weights that are no better.
        metric: the logged mean reward, used as accuracy; averaged over its last ``smoothing`` values.
        rules: fields of :class:`rlkernels.extrapolation.Attempt`, such as ``predictor``, ``horizon`` and ``limits``.

    Attributes:
        events: a dictionary for every attempt, refused ones included.
    """

    def __init__(self, evaluate: Callable[[Any, range], Sequence[float]], prompts: int, *, track_steps: int = 2,
                 first_step: int = 20, every: int = 20, level: float = 0.05, metric: str = "reward", smoothing: int = 5,
                 **rules: Any):  # fmt: skip
        _check.integer("every", every, 1)
        self.prompts = _check.integer("prompts", prompts, 1)
        self.extrapolator = Extrapolator(
            Attempt(prompts=None, **rules), Gate(level), track_steps=track_steps, first_step=first_step,
            every=every, smoothing=smoothing,
        )  # fmt: skip
        self.events = self.extrapolator.events
        self.evaluate = evaluate
        self.metric = metric
        self.first_step = first_step
        self._weights = Projections.of({})

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        strategy = IntervalStrategy(args.logging_strategy).value
        track_steps = self.extrapolator.track_steps
        if strategy != "steps" or track_steps % state.logging_steps:
            raise ValueError(
                f"logging_steps must divide track_steps {track_steps} of GatedExtrapolation, which reads "
                f"rewards from the logs, got {state.logging_steps} with logging_strategy {strategy!r}"
            )
        schedule = SchedulerType(args.lr_scheduler_type).value  # "linear" unless a run says otherwise
        if not schedule.startswith("constant"):
            logger.warning(
                "GatedExtrapolation: lr_scheduler_type %r changes the learning rate, and leaves no line to go on "
                "along; set 'constant'", schedule,
            )  # fmt: skip
        trained = {name: p for name, p in kwargs["model"].named_parameters() if p.requires_grad}
        self._weights = Projections.of(trained)
        logger.info("GatedExtrapolation: %s", self._weights.describe_left_out())
        unusable = [n for n, weight in self._weights.items() if "lora_" in n or hasattr(weight, "full_tensor")]
        if not self._weights or unusable:
            raise ValueError(
                f"model must have projections that GatedExtrapolation can follow, trained themselves, not by LoRA, "
                f"and whole in each process; got {type(kwargs['model']).__name__} with "
                f"{unusable[0] if unusable else 'none that is trained'}"
            )
        self.extrapolator.restart(self._places(), state.global_step)
        self.extrapolator.next_attempt = self.first_step  # an earlier run may have moved it
        if progress := _callback_states(state).get(GATE_STATE):  # of a resumed run
            self.extrapolator.load_progress(progress)

    def _places(self) -> dict[str, list[torch.Tensor]]:
        """Return for each projection the tensors that hold it: the parameter."""
        return {name: [weight] for name, weight in self._weights.items()}

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:  # fmt: skip
        """Track a training step, and attempt an extrapolation when one is due."""
        if logs is None or not self._weights:  # before training
            return
        step = state.global_step
        if self.metric in logs:
            self.extrapolator.add_scores(step, [float(logs[self.metric])])
        elif "loss" not in logs:  # logs of an evaluation or the whole run
            return
        elif not any(self.metric in log for log in state.log_history):  # a step that reuses answers logs no reward
            raise ValueError(f"metric must be one of {sorted(logs)}, which TRL logs, got {self.metric!r}")
        if self.extrapolator.tracks(step):
            self.extrapolator.track(self._places(), step)
            if self.extrapolator.is_due(step):
                self.extrapolator.attempt(
                    self._places(),
                    step,
                    functools.partial(self._evaluate, kwargs["model"]),
                    available=self.prompts,
                    forget=functools.partial(forget_momentum, kwargs["optimizer"], self._weights.weights),
                    on_rank0=_call_on_rank0,
                )
                _callback_states(state)[GATE_STATE] = self.extrapolator.progress()

    def _evaluate(self, model: torch.nn.Module, prompts: range) -> Sequence[float]:
        """Evaluate held-out prompts, divided among the processes; return 0 or 1 for each of them."""
        training = model.training
        rank, processes = PartialState().process_index, PartialState().num_processes
        shard = prompts[len(prompts) * rank // processes : len(prompts) * (rank + 1) // processes]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model.eval()
            try:
                return gather_object(list(self.evaluate(model, shard)) if shard else [])
            finally:
                model.train(training)
