"""Answers of several turns: an engine generates the policy's turns, an environment writes observations between them."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from python_trainer.data import Episode, Example, Group, Messages, Request, Rollout
from python_trainer.environment import Environment
from python_trainer.errors import UserError
from python_trainer.model.policy import Policy
from python_trainer.model.turns import after_turn, join_messages
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts

IDLE_SECONDS = 0.05  # to wait for environments while no tokens are generated
TAIL = 64  # tokens before a text that decide how it is divided into tokens
ANCHORS = (".", "0", "a", "\n")  # one of them does not merge with the text's first character


def initial_prompt(make: type[Environment], example: Example) -> str | Messages:
    """Return the prompt of an episode."""
    place = example.place or repr(example.prompt)[:60]
    try:
        prompt = make().reset(example)
    except Exception as error:
        raise UserError(f"task.environment: reset failed for prompt {place}: {_describe(error)}") from error
    if isinstance(prompt, str) != isinstance(example.prompt, str) or not isinstance(prompt, str | list):
        raise UserError(
            f"task.environment: reset returned {prompt!r:.80} for prompt {place}; allowed: text for a prompt that is "
            "text, messages for messages"
        )
    return prompt


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


@dataclass(eq=False)
class _Answer:
    """An answer that is not finished."""

    rollout: Rollout
    episode: Episode  # of the rollout
    mask: list[bool]  # its response_mask
    example: Example
    sample_id: int
    limit: int  # most tokens after the given prefix
    environment: Environment | None = None  # from its first step on
    opening: Messages | None = None  # the prompt of a chat
    deadline: float = math.inf  # for a step

    def end(self, reason: str) -> Rollout:
        self.rollout.finish_reason = reason
        self.environment = None
        return self.rollout


class EpisodeEngine(WrappedEngine):
    """Give answers in turns with an environment, over an engine that generates the turns of the policy.

    A turn ends as an answer of the inner engine does: by an end token or a stop string. Its tokens stay as they are,
    and so do their log-probabilities; the environment's observation follows, masked from the loss. The next turn
    continues all of them. Environments step in threads while other turns are generated.

    An episode ends when the environment ends it (``finish_reason`` "stop"), or cut off ("length"): when a turn or an
    observation does not fit into the request's tokens, after ``max_turns``, and if the environment raises or takes
    longer than its ``timeout``, which fails this answer alone. A thread that hangs is left behind.

    Args:
        inner: generates; keeps what it computes of a turn for the next one, if it can.
        make: the environment; one object for each answer.
        policy: decodes its turns, and encodes observations as :func:`encode_observation` does.
        max_turns: of the policy in one answer.
    """

    def __init__(self, inner: Engine, make: type[Environment], policy: Policy, *, max_turns: int):
        super().__init__(inner)
        inner.keep_answers = True
        self.make = make
        self.policy = policy
        self.max_turns = max_turns
        self.timeout = make.timeout
        self._sampling = SamplingParams()
        self._turns: dict[Rollout, _Answer] = {}  # in generation, by the rollout of the inner engine
        self._stepping: dict[Future[Any], _Answer] = {}  # in a step of their environment, by its result

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """Queue requests, each a :class:`Group`, with whose example the environment begins."""
        turns = self.inner.submit(requests, sampling)
        self._sampling = sampling
        answers = [answer for request in requests for answer in self._begin(request)]
        self._turns |= zip(turns, answers, strict=True)
        return [answer.rollout for answer in answers]

    def _begin(self, request: Request) -> Iterator[_Answer]:
        assert isinstance(request, Group), request
        for number, rollout in enumerate(new_rollouts(request)):
            episode = Episode()
            mask = [True] * rollout.prefix_len
            rollout.episode = episode
            rollout.response_mask = mask
            yield _Answer(rollout, episode, mask, request.example, request.sample_id + number, request.max_new_tokens)

    def _work(self, count: int) -> list[Rollout]:
        done: list[Rollout] = []
        while (self._turns or self._stepping) and len(done) < count:
            if self._turns:
                done += self._start_steps(self.inner.poll())
            done += self._request_turns()
        return done

    def _start_steps(self, turns: Sequence[Rollout]) -> Iterator[Rollout]:
        """Let the environments answer generated turns; return answers that ended because their turn was cut off."""
        for turn in turns:
            answer = self._turns.pop(turn)
            rollout, episode = answer.rollout, answer.episode
            rollout.response_ids += turn.ids
            rollout.logprobs += turn.logprobs
            answer.mask += [True] * len(turn.ids)
            episode.turns += 1
            text = self.policy.decode(turn.ids)
            if not isinstance(answer.example.prompt, str):
                episode.messages.append({"role": "assistant", "content": text})
            if turn.finish_reason == "length":
                yield answer.end("length")
            else:
                answer.deadline = time.monotonic() + self.timeout
                step = Future[Any]()
                self._stepping[step] = answer
                threading.Thread(target=self._step, args=(answer, text, step), daemon=True).start()

    def _step(self, answer: _Answer, text: str, step: Future[Any]) -> None:
        """Run in a thread: the environment reacts to a turn, or raises an error, which is the step's result too."""
        try:
            if answer.environment is None:
                environment = self.make()
                prompt = environment.reset(answer.example)
                answer.environment = environment
                answer.opening = None if isinstance(prompt, str) else prompt
            result: Any = answer.environment.step(text)
        except BaseException as error:
            result = error
        step.set_result(result)

    def _request_turns(self) -> list[Rollout]:
        """Take the results of steps, and request the next turns; return answers that have ended."""
        done: list[Rollout] = []
        requests: list[Request] = []
        answers: list[_Answer] = []  # of the requests
        for answer, result in self._finished_steps():
            if isinstance(result, BaseException):
                answer.episode.failure = _describe(result)
                done.append(answer.end("length"))
                continue
            request = self._next_turn(answer, *_check_step(result))
            if request is None:
                done.append(answer.rollout)
            else:
                requests.append(request)
                answers.append(answer)
        if requests:
            self._turns |= zip(self.inner.submit(requests, self._sampling), answers, strict=True)
        return done

    def _finished_steps(self) -> Iterator[tuple[_Answer, Any]]:
        """Yield results of steps, and errors of late ones; wait a little if nothing is generated meanwhile."""
        wait(self._stepping, timeout=0 if self._turns else IDLE_SECONDS)
        for step, answer in list(self._stepping.items()):
            if step.done() or answer.deadline < time.monotonic():
                del self._stepping[step]
                late = TimeoutError(f"no answer within {self.timeout:g} s, the timeout of its class")
                yield answer, step.result() if step.done() else late

    def _next_turn(self, answer: _Answer, observation: str | Messages, reward: float, over: bool) -> Request | None:
        """Return the request for the next turn; None: the answer has ended."""
        rollout, episode = answer.rollout, answer.episode
        episode.reward += reward
        if over or episode.turns >= self.max_turns:
            answer.end("stop" if over else "length")
            return None
        messages = None if answer.opening is None else join_messages(answer.opening, episode.messages)
        conversation_ids = [*rollout.prompt_ids, *rollout.response_ids]
        ids = encode_observation(self.policy, conversation_ids, messages, observation)
        length = len(rollout.response_ids) + len(ids)
        room = min(answer.limit + rollout.prefix_len, self.max_positions - len(rollout.prompt_ids)) - length
        if room < 1:
            answer.end("length")
            return None
        rollout.response_ids += ids
        rollout.logprobs += [0.0] * len(ids)
        answer.mask += [False] * len(ids)
        if messages is not None:
            episode.messages += as_messages(observation)
        # a stop string does not begin in what the environment said
        return Request(rollout.prompt_ids, list(rollout.response_ids), 1, room, answer.sample_id, length)


def _check_step(result: Any) -> tuple[str | Messages, float, bool]:
    """Return observation, reward and whether the episode is over."""
    match result:
        case (str() | list() as observation, int() | float() as reward, bool() as over) if math.isfinite(reward):
            return observation, float(reward), over
    raise UserError(
        f"task.environment: step returned {result!r:.120}; allowed: (text or messages, finite reward, True or False)"
    )


def encode_observation(
    policy: Policy, ids: Sequence[int], messages: Messages | None, observation: str | Messages
) -> list[int]:
    """Return the token ids of an observation after a turn of the policy, up to where its next turn begins.

    In a chat these are the template's text after the turn, without the end of the turn if the policy wrote one.

    Args:
        ids: of the conversation up to the end of the turn, which stay as they are.
        messages: the same in a chat, the policy's turn last; None: the prompt is text.

    Raises:
        UserError: messages outside of a chat, or a template that refuses them or does not show the assistant's.
    """
    if messages is not None:
        return encode_after(policy, ids, _text_after_turn(policy, messages, as_messages(observation), ids[-1]))
    if not isinstance(observation, str):
        raise UserError(f"an environment said messages to a prompt that is text: {observation!r:.80}; allowed: text")
    return encode_after(policy, ids, observation)


def as_messages(observation: str | Messages) -> Messages:
    """Return text as a message of the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def encode_after(policy: Policy, ids: Sequence[int], text: str) -> list[int]:
    """Return the token ids of a text that continues these tokens.

    By itself it would get other ones: SentencePiece puts a space in front, and some tokens strip what follows them.
    """

    def encode(text: str) -> list[int]:
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    tail = policy.tokenizer.decode(list(ids[-TAIL:]), clean_up_tokenization_spaces=False)
    for anchor in (tail, *ANCHORS):
        anchor_ids = encode(anchor)
        joined_ids = encode(anchor + text)
        if joined_ids[: len(anchor_ids)] == anchor_ids:
            return joined_ids[len(anchor_ids) :]
    return encode(text)


def _text_after_turn(policy: Policy, messages: Messages, observation: Messages, last: int) -> str:
    """Return the template's text after the policy's turn, which ended in the token ``last``."""
    closing, text = after_turn(policy, messages, observation)
    if last not in policy.eos_token_ids:
        return text
    # the policy's end token replaces what closes the turn: up to an end token, or to some other special token
    ends = [policy.tokenizer.decode([token]) for token in policy.eos_token_ids]
    special = [token.content for token in policy.tokenizer.added_tokens_decoder.values() if token.special]
    for tokens in (ends, special):
        if positions := [closing.index(token) + len(token) for token in tokens if token in closing]:
            return text[min(positions) :]
    # some templates close a turn only where another follows, or by the token that opens the next
    stripped = text.lstrip()
    last_text = policy.tokenizer.decode([last])
    return stripped.removeprefix(last_text) if stripped.startswith(last_text) else text
