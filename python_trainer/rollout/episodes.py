"""Answers of several turns: an engine generates the policy's, an environment writes the observations in between."""

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
from python_trainer.model.turns import after_turn
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts

IDLE_SECONDS = 0.05  # to wait for environments while no tokens are generated
TAIL = 64  # tokens before a text that decide how it is divided into tokens
ANCHORS = (".", "0", "a", "\n")  # one of them does not merge with the text's first character


def initial_prompt(make: type[Environment], example: Example) -> str | Messages:
    """Returns the prompt of an episode."""
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
    """An answer in the making."""

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
        self.rollout.finish_reason, self.environment = reason, None
        return self.rollout


class EpisodeEngine(WrappedEngine):
    """Gives answers in turns with an environment, over an engine that generates the turns of the policy.

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
        self.make, self.policy, self.max_turns, self.timeout = make, policy, max_turns, make.timeout
        self._sampling = SamplingParams()
        self._turns: dict[Rollout, _Answer] = {}  # being generated, by the inner engine's rollout
        self._stepping: dict[Future[Any], _Answer] = {}  # whose environment is at work, by the step's result

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """Queues requests, each a :class:`Group`, with whose example the environment begins."""
        turns = self.inner.submit(requests, sampling)
        self._sampling = sampling
        answers = [answer for request in requests for answer in self._begin(request)]
        self._turns |= zip(turns, answers, strict=True)
        return [answer.rollout for answer in answers]

    def _begin(self, request: Request) -> Iterator[_Answer]:
        assert isinstance(request, Group), request
        for number, rollout in enumerate(new_rollouts(request)):
            episode, mask = Episode(), [True] * rollout.prefix_len
            rollout.episode, rollout.response_mask = episode, mask
            yield _Answer(rollout, episode, mask, request.example, request.sample_id + number, request.max_new_tokens)

    def _work(self, count: int) -> list[Rollout]:
        done: list[Rollout] = []
        while (self._turns or self._stepping) and len(done) < count:
            if self._turns:
                done += self._start_steps(self.inner.poll())
            done += self._request_turns()
        return done

    def _start_steps(self, turns: Sequence[Rollout]) -> Iterator[Rollout]:
        """Lets the environments answer turns that are generated -> answers whose turn was cut off, which ends them."""
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
                answer.deadline, step = time.monotonic() + self.timeout, Future[Any]()
                self._stepping[step] = answer
                threading.Thread(target=self._step, args=(answer, text, step), daemon=True).start()

    def _step(self, answer: _Answer, text: str, step: Future[Any]) -> None:
        """Runs in a thread: the environment reacts to a turn, or raises an error, which is the step's result too."""
        try:
            if answer.environment is None:
                environment = self.make()
                prompt = environment.reset(answer.example)
                answer.environment, answer.opening = environment, None if isinstance(prompt, str) else prompt
            found: Any = answer.environment.step(text)
        except BaseException as error:
            found = error
        step.set_result(found)

    def _request_turns(self) -> list[Rollout]:
        """Takes the results of steps, and requests the next turns -> answers that are at their end."""
        done, requests, answers = [], list[Request](), list[_Answer]()
        for answer, found in self._finished_steps():
            if isinstance(found, BaseException):
                answer.episode.failure = _describe(found)
                done.append(answer.end("length"))
            elif (request := self._next_turn(answer, *_check_step(found))) is None:
                done.append(answer.rollout)
            else:
                requests.append(request)
                answers.append(answer)
        if requests:
            self._turns |= zip(self.inner.submit(requests, self._sampling), answers, strict=True)
        return done

    def _finished_steps(self) -> Iterator[tuple[_Answer, Any]]:
        """Yields results of steps, and errors of late ones; waits a little if nothing is generated meanwhile."""
        wait(self._stepping, timeout=0 if self._turns else IDLE_SECONDS)
        for step, answer in list(self._stepping.items()):
            if step.done() or answer.deadline < time.monotonic():
                del self._stepping[step]
                late = TimeoutError(f"no answer within {self.timeout:g} s, the timeout of its class")
                yield answer, step.result() if step.done() else late

    def _next_turn(self, answer: _Answer, observation: str | Messages, reward: float, over: bool) -> Request | None:
        """Makes the request for the next turn; None: the answer is at its end."""
        rollout, episode = answer.rollout, answer.episode
        episode.reward += reward
        if over or episode.turns >= self.max_turns:
            answer.end("stop" if over else "length")
            return None
        messages = None if answer.opening is None else continued(answer.opening, episode.messages)
        before = [*rollout.prompt_ids, *rollout.response_ids]
        ids = encode_observation(self.policy, before, messages, observation)
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
        return Request(rollout.prompt_ids, list(rollout.response_ids), 1, room, answer.sample_id)


def continued(opening: Messages, said: Messages) -> Messages:
    """Return a conversation whose first answer continues the last message of ``opening`` if that is the assistant's."""
    if opening[-1]["role"] != "assistant":
        return [*opening, *said]
    return [*opening[:-1], opening[-1] | {"content": opening[-1]["content"] + said[0]["content"]}, *said[1:]]


def _check_step(found: Any) -> tuple[str | Messages, float, bool]:
    """Returns the result of a step."""
    match found:
        case (str() | list() as observation, int() | float() as reward, bool() as over) if math.isfinite(reward):
            return observation, float(reward), over
    raise UserError(
        f"task.environment: step returned {found!r:.120}; allowed: (text or messages, finite reward, True or False)"
    )


def encode_observation(
    policy: Policy, ids: Sequence[int], messages: Messages | None, said: str | Messages
) -> list[int]:
    """Returns token ids of what is said after a turn of the policy, up to where its next turn begins.

    Of a chat: what the template writes after the turn, without the end of the turn where the policy wrote one.

    Args:
        ids: of the conversation up to the end of the turn, which stay as they are.
        messages: the same in a chat, the policy's turn last; None: the prompt is text.

    Raises:
        UserError: messages outside of a chat, or a template that refuses them or does not show the assistant's.
    """
    if messages is not None:
        return encode_after(policy, ids, _text_after_turn(policy, messages, as_messages(said), ids[-1]))
    if not isinstance(said, str):
        raise UserError(f"an environment said messages to a prompt that is text: {said!r:.80}; allowed: text")
    return encode_after(policy, ids, said)


def as_messages(said: str | Messages) -> Messages:
    """Returns text as a message of the user."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


def encode_after(policy: Policy, ids: Sequence[int], text: str) -> list[int]:
    """Returns the token ids of a text that continues these tokens.

    By itself it would get other ones: SentencePiece puts a space in front, and some tokens strip what follows them.
    """

    def encode(text: str) -> list[int]:
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    before = policy.tokenizer.decode(list(ids[-TAIL:]), clean_up_tokenization_spaces=False)
    for anchor in (before, *ANCHORS):
        head, whole = encode(anchor), encode(anchor + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return encode(text)


def _text_after_turn(policy: Policy, messages: Messages, said: Messages, last: int) -> str:
    """Returns what the template writes after the policy's turn, which ended in the token ``last``."""
    closing, text = after_turn(policy, messages, said)
    if last not in policy.eos_token_ids:
        return text
    # the policy's end token replaces what closes the turn: up to an end token, or to some other special token
    ends = [policy.tokenizer.decode([token]) for token in policy.eos_token_ids]
    special = [token.content for token in policy.tokenizer.added_tokens_decoder.values() if token.special]
    for tokens in (ends, special):
        if found_ends := [closing.index(token) + len(token) for token in tokens if token in closing]:
            return text[min(found_ends) :]
    # some templates close a turn only where another follows, or by the token that opens the next
    rest = text.lstrip()
    own = policy.tokenizer.decode([last])
    return rest.removeprefix(own) if rest.startswith(own) else text
