"""Rollout history in plain Python: the single source of truth for tests, and the fallback without the extension."""

import struct
import zlib
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

RESPONSE_START = -1  # padding before the first token of a response
LOCAL_GRAM = 2  # last tokens by which occurrences under the same prompt are looked up
SHARED_GRAMS = (5, 3)  # last tokens, under any prompt; the shorter gram if the longer one has no occurrence
MAX_OCCURRENCES = 24  # compared for a draft, newest first
MAX_OWN_OCCURRENCES = 16  # compared within the sequence's prompt and answer
LONG_MATCH = 5  # tokens; with so long a match under the same prompt, other prompts are not searched
PROMPT_BONUS = 3  # the same prompt weighs as much as this many tokens of context
NO_MATCH_WEIGHT = 1.0  # of the vote that no occurrence continues the sequence
FIRST_WINDOW = 16
MIN_WINDOW = 6
MAX_COOLDOWN = 1024
MAGIC = b"RLKHIST\0"
VERSION = 1


@dataclass
class Rollout:
    """One stored response."""

    prompt: tuple[int, ...]
    tokens: list[int]
    reward: float
    epoch: int
    serial: int


@dataclass
class Handle:
    """A sequence being generated: its prompt, its generated tokens, and the success of its drafts."""

    prompt: tuple[int, ...]
    token_cost: float  # of its last draft
    generated: list[int] = field(default_factory=list)
    window: int = FIRST_WINDOW
    accepted: float = 1.0  # draft tokens per observed step, running means
    offered: float = 0.0
    cooldown: int = 0  # drafts that are still skipped
    next_cooldown: int = 8


# An occurrence that may continue a sequence: tokens, offset of the next one, weight of its vote.
Place = tuple[list[int], int, float]


@dataclass
class History:
    """Semantics of ``csrc/runtime/rollout_history.h``, on dictionaries; the same methods on the same arrays."""

    max_tokens: int | None = None
    token_cost: float = 0.02
    depth: int = 24
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # by serial, oldest first
    # (prompt or None, *gram) -> [(serial, offset)]
    occurrences: dict[tuple, list[tuple[int, int]]] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)
    tokens: int = 0
    stale: int = 0  # occurrences of rollouts that were evicted
    newest_epoch: int | None = None
    evicted: int = 0
    serials: count = field(default_factory=count)
    handle_ids: count = field(default_factory=count)

    def add(self, prompt: np.ndarray, response_ids: np.ndarray, reward: float, epoch: int) -> None:
        response = response_ids[: self.max_tokens].tolist()
        if not response:
            return
        new = Rollout(tuple(prompt.tolist()), response, reward, epoch, next(self.serials))
        self.newest_epoch = epoch if self.newest_epoch is None else max(self.newest_epoch, epoch)
        self.rollouts[new.serial] = new
        self.tokens += len(response)
        self._index(new)
        self._evict()

    def resize(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self._evict()

    def _evict(self) -> None:
        while self.max_tokens is not None and self.tokens > self.max_tokens:
            victim = min(self.rollouts.values(), key=lambda r: (r.epoch, r.reward, r.serial))
            self.tokens -= len(victim.tokens)
            self.stale += len(victim.tokens)
            self.evicted += 1
            del self.rollouts[victim.serial]  # its occurrences are skipped from now on
        if not self.rollouts:
            self.newest_epoch = None  # as in a saved file
        if self.stale > self.tokens:
            self.occurrences.clear()
            self.stale = 0
            for rollout in self.rollouts.values():
                self._index(rollout)

    def _index(self, rollout: Rollout) -> None:
        pad = max(LOCAL_GRAM, *SHARED_GRAMS)
        padded = [RESPONSE_START] * pad + rollout.tokens
        grams = [(rollout.prompt, LOCAL_GRAM), *((None, size) for size in SHARED_GRAMS)]
        for end in range(pad, len(padded)):  # of the gram; an occurrence is the offset of the token after it
            for prompt, size in grams:
                key = (prompt, *padded[end - size : end])
                self.occurrences.setdefault(key, []).append((rollout.serial, end - pad))

    def _places(self, prompt: tuple[int, ...] | None, size: int, context: list[int]) -> tuple[list[Place], int]:
        """Return the newest places after the last ``size`` tokens, under one prompt or any, and the longest match.

        A weight doubles with every matching token, with every later epoch, and from the lowest to the highest reward.
        """
        occurrences = reversed(self.occurrences.get((prompt, *context[-size:]), []))
        alive = ((self.rollouts[serial], offset) for serial, offset in occurrences if serial in self.rollouts)
        candidates = list(islice(alive, MAX_OCCURRENCES))
        rewards = [rollout.reward for rollout, _ in candidates]
        lowest = min(rewards, default=0.0)
        spread = max(rewards, default=0.0) - lowest
        places: list[Place] = []
        longest = 0
        for rollout, offset in candidates:
            match = 0
            while match < self.depth and match < offset and context[-1 - match] == rollout.tokens[offset - 1 - match]:
                match += 1
            if match < self.depth and match == offset and context[-1 - match] == RESPONSE_START:
                # the whole answer so far matches, which is weak evidence under another prompt
                match = match + 1 if prompt is None else self.depth
            longest = max(longest, match)
            age = min((self.newest_epoch or 0) - rollout.epoch, 64)
            relative_reward = (rollout.reward - lowest) / spread if spread > 0 else 0.0
            penalty = PROMPT_BONUS if prompt is None else 0
            weight = 2.0 ** (match - age - penalty) * (1.0 + relative_reward)
            places.append((rollout.tokens, offset, weight))
        return places, longest

    def _own_places(self, prompt: tuple[int, ...], generated: list[int]) -> list[Place]:
        """Return the newest places in the prompt and the answer so far that follow their last token."""
        text = [*prompt, RESPONSE_START, *generated]
        places: list[Place] = []
        for offset in range(len(text) - 1, 0, -1):
            if len(places) == MAX_OWN_OCCURRENCES:
                break
            if text[offset - 1] != text[-1] or RESPONSE_START in (text[offset], text[offset - 1]):
                continue
            match = 1
            while match < min(self.depth, offset) and text[offset - 1 - match] == text[-1 - match] != RESPONSE_START:
                match += 1
            places.append((text, offset, 2.0 ** (match - PROMPT_BONUS)))
        return places

    def _gather(self, prompt: tuple[int, ...], generated: list[int]) -> list[Place]:
        """Return the places that vote: under the same prompt, else under others, and in the sequence itself."""
        context = ([RESPONSE_START] * self.depth + generated)[-self.depth :]
        places, longest = self._places(prompt, LOCAL_GRAM, context)
        if longest < LONG_MATCH:
            shared = (self._places(None, size, context)[0] for size in SHARED_GRAMS)
            places += next(filter(None, shared), [])
        return places + self._own_places(prompt, generated)

    def _continue(self, prompt: tuple[int, ...], generated: list[int], token_cost: float, limit: int) -> list[int]:
        """Return the heaviest continuation, as long as the next token is likely enough to pay for its verification."""
        active = self._gather(prompt, generated) if limit > 0 else []
        draft: list[int] = []
        trust = 1.0
        while active and len(draft) < limit:
            votes: dict[int, float] = {}
            for tokens, offset, weight in active:
                votes[tokens[offset]] = votes.get(tokens[offset], 0.0) + weight
            total = NO_MATCH_WEIGHT
            for vote in votes.values():
                total += vote
            best = max(votes, key=lambda token: votes[token])  # the first of equals
            trust *= 0.95 * votes[best] / total
            if trust < token_cost:
                break
            draft.append(best)
            advanced = [(tokens, offset + 1, weight) for tokens, offset, weight in active if tokens[offset] == best]
            active = [place for place in advanced if place[0][place[1] : place[1] + 1] not in ([], [RESPONSE_START])]
        return draft

    def draft(self, prompt: np.ndarray, generated: np.ndarray, limit: int) -> list[int]:
        return self._continue(tuple(prompt.tolist()), generated.tolist(), self.token_cost, limit)

    def track(self, prompt: np.ndarray) -> int:
        handle = next(self.handle_ids)
        self.handles[handle] = Handle(tuple(prompt.tolist()), self.token_cost)
        return handle

    def _handle(self, handle: int) -> Handle:
        if handle not in self.handles:
            raise ValueError(f"handle {handle} is not tracked; it was released, or never returned by track()")
        return self.handles[handle]

    def extend(self, handle: int, ids: np.ndarray) -> None:
        self._handle(handle).generated.extend(ids.tolist())

    def extend_tracked(self, handles: np.ndarray, ids: np.ndarray, lengths: np.ndarray) -> None:
        states = [self._handle(h) for h in handles.tolist()]
        for state, new in zip(states, np.split(ids, lengths.cumsum()[:-1])):
            state.generated.extend(new.tolist())

    def draft_tracked(
        self, handles: np.ndarray, limit: int, token_cost: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        cost = self.token_cost if token_cost is None else token_cost
        ids = np.full((len(handles), limit), -1)
        lengths = np.zeros(len(handles), np.int64)
        for b, state in enumerate([self._handle(h) for h in handles.tolist()]):
            state.token_cost = cost
            if state.cooldown > 0 and state.accepted <= cost * state.offered:
                state.cooldown -= 1
            else:
                draft = self._continue(state.prompt, state.generated, cost, min(limit, state.window))
                ids[b, : len(draft)] = draft
                lengths[b] = len(draft)
        return ids, lengths

    def observe(self, handles: np.ndarray, offered: np.ndarray, accepted: np.ndarray) -> None:
        states = [self._handle(h) for h in handles.tolist()]
        for state, num_offered, num_accepted in zip(states, offered.tolist(), accepted.tolist()):
            if num_offered == 0:
                continue
            if num_accepted == num_offered:  # even if the draft was shorter than the window
                state.window = min(2 * state.window, 1 << 16)
            else:
                state.window = max(MIN_WINDOW, min(state.window - 1, 2 * num_accepted))
            state.accepted = 0.75 * state.accepted + 0.25 * num_accepted
            state.offered = 0.75 * state.offered + 0.25 * num_offered
            gain = state.accepted - state.token_cost * state.offered
            if gain > 0:
                state.cooldown = 0
                state.next_cooldown = 8
            elif gain < 0:
                state.cooldown = state.next_cooldown
                state.next_cooldown = min(2 * state.next_cooldown, MAX_COOLDOWN)

    def release(self, handle: int) -> None:
        self._handle(handle)
        del self.handles[handle]

    def longest_prompt(self, ids: np.ndarray) -> int:
        tokens = tuple(ids.tolist())
        prompts = {rollout.prompt for rollout in self.rollouts.values()}
        return max((len(prompt) for prompt in prompts if tokens[: len(prompt)] == prompt), default=0)

    def to_bytes(self) -> np.ndarray:
        prompts: dict[tuple[int, ...], int] = {}
        for rollout in self.rollouts.values():
            prompts.setdefault(rollout.prompt, len(prompts))
        limit = -1 if self.max_tokens is None else self.max_tokens
        newest = self.newest_epoch or 0
        records = [struct.pack("<qdqqQQ", limit, self.token_cost, self.depth, newest, len(prompts), len(self.rollouts))]
        records += [struct.pack(f"<I{len(p)}i", len(p), *p) for p in prompts]
        records += [
            struct.pack(f"<IIdq{len(r.tokens)}i", prompts[r.prompt], len(r.tokens), r.reward, r.epoch, *r.tokens)
            for r in self.rollouts.values()
        ]
        payload = b"".join(records)
        header = MAGIC + struct.pack("<IIQ", VERSION, zlib.crc32(payload), len(payload))
        return np.frombuffer(bytearray(header + payload), np.uint8)

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> "History":
        payload = data[24:]
        if len(data) < 24 or data[:8] != MAGIC:
            raise ValueError(f"{name} is not a rollout history (bad magic)")
        version, checksum, size = struct.unpack("<IIQ", data[8:24])
        if version != VERSION:
            raise ValueError(f"{name} has version {version}, this program reads version {VERSION}")
        if size != len(payload) or zlib.crc32(payload) != checksum:
            raise ValueError(f"{name} is damaged: {len(payload)} bytes of {size}, or a wrong checksum")
        offset = 0

        def take(fmt: str) -> tuple:
            nonlocal offset
            values = struct.unpack_from("<" + fmt, payload, offset)
            offset += struct.calcsize("<" + fmt)
            return values

        def take_ids(count: int) -> np.ndarray:
            return np.array(take(f"{count}i"), np.int32)

        limit, token_cost, depth, newest, num_prompts, num_rollouts = take("qdqqQQ")
        history = cls(None, token_cost, depth)
        prompts = [take_ids(*take("I")) for _ in range(num_prompts)]
        for _ in range(num_rollouts):
            prompt, length, reward, epoch = take("IIdq")
            history.add(prompts[prompt], take_ids(length), reward, epoch)
        history.newest_epoch = newest if num_rollouts else None
        history.max_tokens = None if limit < 0 else limit
        return history

    def stats(self) -> dict[str, int | None]:
        return {
            "tokens": self.tokens,
            "rollouts": len(self.rollouts),
            "prompts": len({r.prompt for r in self.rollouts.values()}),
            "handles": len(self.handles),
            "evicted": self.evicted,
            "newest_epoch": self.newest_epoch,
            "bytes": 0,  # unknown here
        }
