"""Rollout history in plain Python: the single source of truth for tests, and the fallback without the extension."""

import os
import struct
import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

START = -1  # stands before the first token of a response, as often as needed
LOCAL_GRAM = 3  # tokens that must match to find an occurrence under the same prompt
GLOBAL_GRAM = 4  # ... under any prompt
CANDIDATES = 32  # occurrences looked at, newest first
FIRST_WINDOW = 8
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
    """A sequence being generated: its prompt, its last tokens, and what drafting has been worth."""

    prompt: tuple[int, ...]
    context: deque[int]
    window: int = FIRST_WINDOW
    gain: float = 1.0  # decode steps saved per observed step, running mean
    cooldown: int = 0  # drafts still to be skipped
    next_cooldown: int = 8


@dataclass
class History:
    """Semantics of ``csrc/runtime/rollout_history.h``, on dictionaries; the same methods on the same arrays."""

    max_tokens: int | None = None
    token_cost: float = 0.02
    depth: int = 24
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # by serial, oldest first
    local: dict[tuple, list[tuple[int, int]]] = field(default_factory=dict)  # (prompt, gram) -> (serial, offset)
    shared: dict[tuple, list[tuple[int, int]]] = field(default_factory=dict)  # gram -> (serial, offset)
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
        while self.max_tokens is not None and self.tokens > self.max_tokens:
            victim = min(self.rollouts.values(), key=lambda r: (r.epoch, r.reward, r.serial))
            self.tokens -= len(victim.tokens)
            self.stale += len(victim.tokens)
            self.evicted += 1
            del self.rollouts[victim.serial]  # occurrences that name it are skipped from now on
        if self.stale > self.tokens:
            self.local.clear()
            self.shared.clear()
            self.stale = 0
            for rollout in self.rollouts.values():
                self._index(rollout)

    def _index(self, rollout: Rollout) -> None:
        padded = [START] * GLOBAL_GRAM + rollout.tokens
        for i in range(len(rollout.tokens)):
            at = i + GLOBAL_GRAM  # the occurrence is named by the token that follows the gram
            self.local.setdefault((rollout.prompt, *padded[at - LOCAL_GRAM : at]), []).append((rollout.serial, i))
            self.shared.setdefault(tuple(padded[at - GLOBAL_GRAM : at]), []).append((rollout.serial, i))

    def _occurrences(self, prompt: tuple[int, ...], context: list[int]) -> list[tuple[Rollout, int]]:
        """The newest places that the last tokens of the context lead up to; under the same prompt if there are any."""
        own = self.local.get((prompt, *context[-LOCAL_GRAM:]), [])
        for places in (own, self.shared.get(tuple(context[-GLOBAL_GRAM:]), [])):
            alive = ((self.rollouts[s], i) for s, i in reversed(places) if s in self.rollouts)
            found = list(islice(alive, CANDIDATES))
            if found:
                return found
        return []

    def _weight(self, rollout: Rollout, offset: int, context: list[int], rewards: tuple[float, float]) -> float:
        """Doubles with every matching token, with every epoch nearer to now, and from the worst to the best reward."""
        match = 0
        while match < self.depth and context[-1 - match] == (
            rollout.tokens[offset - 1 - match] if offset > match else START
        ):
            match += 1
        low, high = rewards
        merit = (rollout.reward - low) / (high - low) if high > low else 0.0
        age = min((self.newest_epoch or 0) - rollout.epoch, 64)
        return 2.0 ** (match - self.depth) * 2.0**-age * (1.0 + merit)

    def _continue(self, prompt: tuple[int, ...], context: list[int], limit: int) -> list[int]:
        """Follows the heaviest continuation while the next token is likely enough to pay for its verification."""
        places = self._occurrences(prompt, context)
        if not places or limit <= 0:
            return []
        values = [r.reward for r, _ in places]
        rewards = (min(values), max(values))
        active = [(r, i, self._weight(r, i, context, rewards)) for r, i in places]
        draft: list[int] = []
        trust = 1.0
        while active and len(draft) < limit:
            votes: dict[int, float] = {}
            for rollout, i, weight in active:
                token = rollout.tokens[i]
                votes[token] = votes.get(token, 0.0) + weight
            total = 0.0
            for vote in votes.values():
                total += vote
            best = max(votes, key=lambda token: votes[token])  # the first of equals: seen in the newest rollout
            trust *= 0.95 * votes[best] / total
            if trust < self.token_cost:
                break
            draft.append(best)
            active = [(r, i + 1, w) for r, i, w in active if r.tokens[i] == best and i + 1 < len(r.tokens)]
        return draft

    def draft(self, prompt: np.ndarray, generated: np.ndarray, limit: int) -> list[int]:
        context = ([START] * self.depth + generated.tolist())[-self.depth :]
        return self._continue(tuple(prompt.tolist()), context, limit)

    def track(self, prompt: np.ndarray) -> int:
        handle = next(self.handle_ids)
        self.handles[handle] = Handle(tuple(prompt.tolist()), deque([START] * self.depth, maxlen=self.depth))
        return handle

    def _handle(self, handle: int) -> Handle:
        if handle not in self.handles:
            raise ValueError(f"handle {handle} is not tracked; it was released, or never returned by track()")
        return self.handles[handle]

    def extend(self, handle: int, ids: np.ndarray) -> None:
        self._handle(handle).context.extend(ids.tolist())

    def draft_tracked(self, handles: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = np.full((len(handles), limit), -1), np.zeros(len(handles), np.int64)
        for b, state in enumerate([self._handle(h) for h in handles.tolist()]):
            if state.cooldown > 0:
                state.cooldown -= 1
            else:
                draft = self._continue(state.prompt, list(state.context), min(limit, state.window))
                ids[b, : len(draft)] = draft
                lengths[b] = len(draft)
        return ids, lengths

    def observe(self, handles: np.ndarray, offered: np.ndarray, accepted: np.ndarray) -> None:
        states = [self._handle(h) for h in handles.tolist()]
        for state, given, taken in zip(states, offered.tolist(), accepted.tolist()):
            if given == 0:
                continue
            if taken == given:  # the draft that was offered, however short, not the window
                state.window = min(2 * state.window, 1 << 16)
            else:
                state.window = max(2, min(state.window - 1, 2 * taken))
            state.gain = 0.75 * state.gain + 0.25 * (taken - self.token_cost * given)
            if state.gain > 0:
                state.next_cooldown = 8
            elif state.gain < 0:
                state.cooldown = state.next_cooldown
                state.next_cooldown = min(2 * state.next_cooldown, MAX_COOLDOWN)

    def release(self, handle: int) -> None:
        self._handle(handle)
        del self.handles[handle]

    def save(self, path: str) -> None:
        prompts: dict[tuple[int, ...], int] = {}
        for rollout in self.rollouts.values():
            prompts.setdefault(rollout.prompt, len(prompts))
        limit = -1 if self.max_tokens is None else self.max_tokens
        newest = self.newest_epoch or 0
        sizes = (len(prompts), len(self.rollouts))
        parts = [struct.pack("<qdqqQQ", limit, self.token_cost, self.depth, newest, *sizes)]
        parts += [struct.pack(f"<I{len(p)}i", len(p), *p) for p in prompts]
        parts += [
            struct.pack(f"<IIdq{len(r.tokens)}i", prompts[r.prompt], len(r.tokens), r.reward, r.epoch, *r.tokens)
            for r in self.rollouts.values()
        ]
        payload = b"".join(parts)
        temporary = f"{path}.tmp{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                file.write(MAGIC + struct.pack("<IIQ", VERSION, zlib.crc32(payload), len(payload)) + payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @classmethod
    def load(cls, path: str) -> "History":
        with open(path, "rb") as file:
            data = file.read()
        payload = data[24:]
        if len(data) < 24 or data[:8] != MAGIC:
            raise ValueError(f"{path} is not a rollout history (bad magic)")
        version, checksum, size = struct.unpack("<IIQ", data[8:24])
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, this program reads version {VERSION}")
        if size != len(payload) or zlib.crc32(payload) != checksum:
            raise ValueError(f"{path} is damaged: {len(payload)} bytes of {size}, or a wrong checksum")
        offset = 0

        def take(fmt: str) -> tuple:
            nonlocal offset
            values = struct.unpack_from("<" + fmt, payload, offset)
            offset += struct.calcsize("<" + fmt)
            return values

        limit, token_cost, depth, newest, num_prompts, num_rollouts = take("qdqqQQ")
        history = cls(None, token_cost, depth)
        prompts = [take(f"{take('I')[0]}i") for _ in range(num_prompts)]
        for _ in range(num_rollouts):
            prompt, length, reward, epoch = take("IIdq")
            history.add(np.array(prompts[prompt], np.int32), np.array(take(f"{length}i"), np.int32), reward, epoch)
        history.newest_epoch = newest if num_rollouts else None
        history.max_tokens = None if limit < 0 else limit
        return history

    def stats(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "rollouts": len(self.rollouts),
            "prompts": len({r.prompt for r in self.rollouts.values()}),
            "handles": len(self.handles),
            "evicted": self.evicted,
            "bytes": 0,  # not known
        }
