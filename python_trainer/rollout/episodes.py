"""Answers of several turns: an engine generates the policy's, an environment writes what comes between them."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from python_trainer.data import Episode, Example, Group, Messages, Request, Rollout
from python_trainer.environment import Environment
from python_trainer.errors import UserError
from python_trainer.rollout.engine import Engine, SamplingParams, WrappedEngine, new_rollouts

IDLE_SECONDS = 0.05  # that steps are waited for while no tokens are generated, before those that are there go on


def opening(make: type[Environment], example: Example) -> str | Messages:
    """The prompt of an episode.

    Raises:
        UserError: the environment fails, or gives no prompt of the example's kind.
    """
    place = example.place or repr(example.prompt)[:60]
    try:
        prompt = make().reset(example)
    except Exception as error:
        raise UserError(f"task.environment: reset failed for prompt {place}: {_text(error)}") from error
    if isinstance(prompt, str) != isinstance(example.prompt, str) or not isinstance(prompt, str | list):
        raise UserError(
            f"task.environment: reset returned {prompt!r:.80} for prompt {place}; allowed: text for a prompt that is "
            "text, messages for messages"
        )
    return prompt


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


@dataclass(eq=False)
class _Playing:
    """An answer that is being given."""

    rollout: Rollout
    example: Example
    sample_id: int
    limit: int  # most tokens after the given prefix
    environment: Environment | None = None  # from its first step on
    deadline: float = math.inf  # of a step

    @property
    def episode(self) -> Episode:
        assert self.rollout.episode is not None
        return self.rollout.episode


class EpisodeEngine(WrappedEngine):
    """Gives answers in turns with an environment, over an engine that generates the turns of the policy.

    A turn ends as an answer of the inner engine does: by an end token or a stop string. Its tokens stay as they are,
    and so do their log-probabilities; those of the environment follow, masked from the loss. The next turn is asked for
    as the continuation of all of them. Steps run in threads while other turns are generated.

    An episode ends when the environment says so (``finish_reason`` "stop"), or cut off ("length"): when a turn or what
    the environment says does not fit into the request's tokens, after ``max_turns``, and where the environment raises
    or takes longer than ``timeout``, which fails this answer alone. A thread that hangs is left behind.

    Args:
        inner: generates; keeps what it computes of a turn for the next one, if it can.
        make: the environment; one object for each answer.
        encode: what the environment says, whether in a chat, last token of the policy -> token ids.
        decode: ids of a turn -> its text.
        max_turns: of the policy in one answer.
        timeout: seconds for one step, the first with its ``reset``.
        note: told of the first failure.
    """

    def __init__(
        self,
        inner: Engine,
        make: type[Environment],
        *,
        encode: Callable[[str | Messages, bool, int], list[int]],
        decode: Callable[[Sequence[int]], str],
        max_turns: int,
        timeout: float,
        note: Callable[[str], None],
    ):
        super().__init__(inner)
        inner.keep_answers = True
        self.make, self.encode, self.decode, self.note = make, encode, decode, note
        self.max_turns, self.timeout = max_turns, timeout
        self._sampling = SamplingParams()
        # of the policy, being generated, by identity of the inner engine's rollout
        self._turns: dict[int, tuple[Rollout, _Playing]] = {}
        self._steps: set[_Playing] = set()  # whose environment is at work
        self._results: queue.SimpleQueue[tuple[_Playing, Any]] = queue.SimpleQueue()
        self._failed = False  # an episode, which was noted

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Rollout]:
        """As of :class:`Engine`; every request is a :class:`Group`, whose example the environment begins with."""
        turns = self.inner.submit(requests, sampling)
        self._sampling = sampling
        episodes = [episode for request in requests for episode in self._begin(request)]
        self._follow(turns, episodes)
        return [episode.rollout for episode in episodes]

    def _follow(self, turns: Sequence[Rollout], episodes: Sequence[_Playing]) -> None:
        self._turns |= {id(turn): (turn, playing) for turn, playing in zip(turns, episodes, strict=True)}

    def _begin(self, request: Request) -> Iterator[_Playing]:
        if not isinstance(request, Group):
            raise TypeError(f"requests to an environment must be of type Group, got {type(request).__name__}")
        for number, rollout in enumerate(new_rollouts(request, self.policy_version)):
            rollout.episode, rollout.response_mask = Episode(), [True] * rollout.prefix_len
            yield _Playing(rollout, request.example, request.sample_id + number, request.max_new_tokens)

    def _work(self, count: int) -> list[Rollout]:
        done: list[Rollout] = []
        try:
            while (self._turns or self._steps) and len(done) < count:
                if self._turns:
                    done += self._hand_over(self.inner.poll())
                done += self._go_on()
        except BaseException:
            self._turns, self._steps = {}, set()
            raise
        return done

    def _hand_over(self, turns: Sequence[Rollout]) -> Iterator[Rollout]:
        """Lets the environments answer turns that are generated; those that were cut off end their answers."""
        for turn in turns:
            if (begun := self._turns.pop(id(turn), None)) is None:
                continue  # of a call that failed
            playing = begun[1]
            rollout, episode = playing.rollout, playing.episode
            assert rollout.response_mask is not None
            rollout.response_ids += turn.ids
            rollout.logprobs += turn.logprobs
            rollout.response_mask += [True] * len(turn.ids)
            episode.turns += 1
            text = self.decode(turn.ids)
            if not isinstance(playing.example.prompt, str):
                episode.messages.append({"role": "assistant", "content": text})
            if turn.finish_reason == "length":
                yield _ended(playing, "length")
            else:
                playing.deadline = time.monotonic() + self.timeout
                self._steps.add(playing)
                threading.Thread(target=self._step, args=(playing, text), daemon=True).start()

    def _step(self, playing: _Playing, text: str) -> None:
        """In a thread: what the environment says to a turn."""
        try:
            if playing.environment is None:
                environment = self.make()
                environment.reset(playing.example)
                playing.environment = environment
            found: Any = playing.environment.step(text)
        except BaseException as error:
            found = error
        self._results.put((playing, found))

    def _go_on(self) -> list[Rollout]:
        """Takes what environments have said, and asks for the next turns -> answers that are at their end."""
        done, requests, episodes = [], list[Request](), list[_Playing]()
        for playing, found in self._said():
            if isinstance(found, BaseException):
                done.append(self._fail(playing, found))
            elif (request := self._next(playing, *_checked(found))) is None:
                done.append(playing.rollout)
            else:
                requests.append(request)
                episodes.append(playing)
        if requests:
            self._follow(self.inner.submit(requests, self._sampling), episodes)
        return done

    def _said(self) -> Iterator[tuple[_Playing, Any]]:
        """What environments have said, or that they are late; waits a little where nothing is generated meanwhile."""
        until = time.monotonic() + (0.0 if self._turns else IDLE_SECONDS)
        while self._steps:
            try:
                playing, found = self._results.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                break
            if playing in self._steps:  # and not given up
                self._steps.discard(playing)
                yield playing, found
        now = time.monotonic()
        for playing in [playing for playing in self._steps if playing.deadline < now]:
            self._steps.discard(playing)
            yield playing, TimeoutError(f"no answer within {self.timeout:g} s, the timeout of its class")

    def _fail(self, playing: _Playing, error: BaseException) -> Rollout:
        playing.episode.failure = _text(error)
        if not self._failed:
            self._failed = True
            self.note(
                f"the environment {self.make.__name__} failed in turn {playing.episode.turns} of an answer, which ends "
                f"there: {_text(error)}; environment/failures counts such answers"
            )
        return _ended(playing, "length")

    def _next(self, playing: _Playing, said: str | Messages, reward: float, over: bool) -> Request | None:
        """What the next turn goes on from; None where the answer is at its end."""
        rollout, episode = playing.rollout, playing.episode
        assert rollout.response_mask is not None
        episode.reward += reward
        if over or episode.turns >= self.max_turns:
            _ended(playing, "stop" if over else "length")
            return None
        chat = not isinstance(playing.example.prompt, str)
        ids = self.encode(said, chat, rollout.response_ids[-1])
        length = len(rollout.response_ids) + len(ids)
        room = min(playing.limit + rollout.prefix_len, self.max_positions - len(rollout.prompt_ids)) - length
        if room < 1:
            _ended(playing, "length")
            return None
        rollout.response_ids += ids
        rollout.logprobs += [0.0] * len(ids)
        rollout.response_mask += [False] * len(ids)
        if chat:
            episode.messages += [{"role": "user", "content": said}] if isinstance(said, str) else said
        return Request(rollout.prompt_ids, list(rollout.response_ids), 1, room, playing.sample_id)


def _ended(playing: _Playing, reason: str) -> Rollout:
    playing.rollout.finish_reason = reason
    playing.environment = None
    return playing.rollout


def _checked(found: Any) -> tuple[str | Messages, float, bool]:
    """What a step returned.

    Raises:
        UserError: it is not what a step returns.
    """
    match found:
        case (str() | list() as said, int() | float() as reward, bool() as over) if math.isfinite(reward):
            return said, float(reward), over
    raise UserError(
        f"task.environment: step returned {found!r:.120}; allowed: (text or messages, finite reward, True or False)"
    )
