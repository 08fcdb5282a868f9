"""What a run writes into the retrospective database: facts about it, its steps, and a few right answers of each."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from python_trainer.accelerators.base import Accelerator, RunContext, StepContext
from python_trainer.accelerators.rhyme.database import (
    RetrospectiveDatabase,
    StepRecord,
    StoredAnswer,
    StoredRun,
    prompt_key,
)
from python_trainer.accelerators.rhyme.matching import WINDOW, sketch_of
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Rollout, by_group, fresh_ones, good_ones
from python_trainer.errors import tell
from python_trainer.keyed import keyed_seed
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.run_directory import write_text

Pair = tuple[int, StoredAnswer]  # a training prompt and an answer to it
NOTE = "rhyme_run.json"
STORED_OF_GROUP = 2  # most right answers of a group that are stored at each visit
OWN = 0  # no run in a database has this id


def read_note(folder: Path) -> dict[str, Any]:
    """Reads which run of a database began in a folder: ``folder``, ``run`` and ``created``; empty without one."""
    try:
        note = json.loads((folder / NOTE).read_text())
        return {"folder": str(note["folder"]), "run": int(note["run"]), "created": float(note["created"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def begin_run(database: RetrospectiveDatabase, run: StoredRun, folder: Path) -> int:
    """Adds a run that begins in a folder to the database -> its id.

    An earlier attempt in the same folder, which a file there names, leaves the database with all that it stored. The
    database reuses ids, so the moment at which it began must agree; a copy of the folder has no claim on the run.
    """
    before, here = read_note(folder), str(folder.resolve())
    if before.get("folder") == here:
        database.remove_run(before["run"], created=before["created"])
    run_id = database.add_run(run)
    write_text(folder / NOTE, json.dumps({"folder": here, "run": run_id, "created": run.created}) + "\n")
    return run_id


def step_record(run: RunContext, step: int, groups: Sequence[list[Rollout]], before: list[StepRecord]) -> StepRecord:
    """Sums up the fresh answers of a step, of all rounds of dynamic sampling.

    Answers that continue from a given beginning say little about the policy: rewards and sketch are of the others. If
    there are none they are those of the step before, and in the first step those of all answers.
    """
    fresh, whole = [rollout for group in groups for rollout in group], [*filter(None, map(fresh_ones, groups))]
    seen = [rollout for group in whole for rollout in group] or fresh
    shown = fmean(r.reward for r in seen), fmean(r.accuracy for r in seen), sketch_of(whole or groups)
    if before and not whole:
        shown = before[-1].reward, before[-1].accuracy, before[-1].sketch
    outcomes = {}
    if whole and all(rollout.merit is None for rollout in seen):
        keys = b"".join(bytes.fromhex(prompt_key(run.task.train[group[0].prompt_key].prompt)) for group in whole)
        right = [sum(rollout.accuracy > 0.5 for rollout in group) for group in whole]
        outcomes = {
            "prompts": torch.frombuffer(bytearray(keys), dtype=torch.uint8).reshape(len(whole), -1),
            "answers": torch.tensor([len(group) for group in whole], dtype=torch.int32),
            "right": torch.tensor(right, dtype=torch.int32),
        }
    return StepRecord(step, *shown, sum(len(r.logprobs) for r in fresh), outcomes)


def right_answers(context: StepContext, groups: Sequence[list[Rollout]], tokenizer: str) -> list[Pair]:
    """Takes a few different good answers of each group, best first, then at random -> (prompt, answer) pairs."""
    kept = []
    for number, fresh in enumerate(groups):
        right = {r.text: r for r in good_ones(fresh) if r.response_ids}
        draw = {text: keyed_seed(context.seed, "rhyme store", number, text) for text in right}
        for text in sorted(right, key=lambda text: (-right[text].reward, draw[text]))[:STORED_OF_GROUP]:
            r = right[text]
            key, ended = prompt_key(context.run.task.train[r.prompt_key].prompt), r.finish_reason == "stop"
            facts = (OWN, context.step, key, text, ended, r.reward, tokenizer)
            logprobs = torch.tensor([float("nan")] * r.prefix_len + list(r.logprobs))
            kept.append((r.prompt_key, StoredAnswer(*facts, torch.tensor(r.response_ids, dtype=torch.int32), logprobs)))
    return kept


class RunRecorder(Accelerator):
    """Gathers the fresh answers of a step, and writes them into the database, if there is one, on rank 0."""

    enabled, name = False, "recorder"
    settings: RhymeSettings

    def __init__(self, settings: RhymeSettings):
        super().__init__(settings)
        self.fingerprint = ""  # of the tokenizer
        self.run_id, self.created, self.lost = OWN, 0.0, False  # in the database
        self.groups: list[list[Rollout]] = []  # of the present step
        self.kept: list[Pair] = []  # the right answers that are stored of the newest step
        self.steps: list[StepRecord] = []  # the last ones of this run, if it has a database

    @cached_property
    def database(self) -> RetrospectiveDatabase:
        assert self.settings.database is not None
        return RetrospectiveDatabase(self.settings.database)

    def begin(self, run: RunContext) -> None:
        """Adds a new run to the database. Settings of accelerators stay out: they may hold its password."""
        self.fingerprint, self.created = tokenizer_fingerprint(run.policy.tokenizer), time.time()
        if self.settings.database is not None:
            settings = run.config.model_dump(mode="json") | {"accelerators": run.config.accelerators.enabled}
            settings["output_dir"] = str(run.folder.resolve())
            described = StoredRun(self.fingerprint, run.task.name, settings, self.created)
            self.run_id = run.once(lambda: begin_run(self.database, described, run.folder))

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Adds the fresh answers of a round of the step, with the rewards that they have before others shape them."""
        self.groups += by_group(replace(rollout) for rollout in rollouts if rollout.importance_cap is None).values()
        return rollouts

    def after_update(self, context: StepContext) -> None:
        """Writes the step."""
        groups, self.groups = self.groups, []
        self.fingerprint = self.fingerprint or tokenizer_fingerprint(context.run.policy.tokenizer)
        self.kept = right_answers(context, groups, self.fingerprint)
        if groups and self.settings.database is not None:
            self.steps = [*self.steps, step_record(context.run, context.step, groups, self.steps)][-WINDOW:]
            stored = [answer for _, answer in self.kept]
            self.lost = self.lost or not context.run.once(lambda: self._store(stored, context.run))

    def _store(self, answers: list[StoredAnswer], run: RunContext) -> bool:
        """Writes the newest step -> whether this run is in the database. A copy of a folder that is there is not."""
        note, record = read_note(run.folder), replace(self.steps[-1], seconds=run.seconds())
        copied = note and note["folder"] != str(run.folder.resolve()) and read_note(Path(note["folder"])) == note
        there = not copied and self.database.add_step(self.run_id, record, answers, created=self.created)
        if not there:
            why = "it began without it, was removed from it, or its folder is a copy"
            tell(f"note: this run is not recorded in {self.database.name}: {why}")
        return there

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("run_id", "created", "fingerprint")}
        return state | {"steps": [vars(step) for step in self.steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"steps": [StepRecord(**step) for step in state["steps"]]})
