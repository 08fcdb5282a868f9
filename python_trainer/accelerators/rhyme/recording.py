"""The records of a run in the retrospective database: its settings, its steps, and a few right answers of each."""

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
    prompt_hash,
)
from python_trainer.accelerators.rhyme.matching import WINDOW, sketch_of
from python_trainer.accelerators.settings import RhymeSettings
from python_trainer.data import Rollout, by_group, select_fresh, select_good
from python_trainer.errors import tell
from python_trainer.model.loading import tokenizer_fingerprint
from python_trainer.run.directory import write_text
from rlkernels.sampling.keys import keyed_seed

Pair = tuple[int, StoredAnswer]  # index of a training prompt, and an answer to it
NOTE = "rhyme_run.json"
STORED_PER_GROUP = 2  # right answers of a group, at each visit
OWN = 0  # no run in a database has this id


def read_note(folder: Path) -> dict[str, Any]:
    """Read which run of a database began in a folder: ``folder``, ``run`` and ``created``; empty without one."""
    try:
        note = json.loads((folder / NOTE).read_text())
        return {"folder": str(note["folder"]), "run": int(note["run"]), "created": float(note["created"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def begin_run(database: RetrospectiveDatabase, run: StoredRun, folder: Path) -> int:
    """Add a run that begins in a folder to the database; return its id.

    An earlier attempt in the same folder, which a file there names, is removed with all that it stored. The database
    reuses ids, so its creation time must agree; a copy of the folder has no claim on the run.
    """
    earlier = read_note(folder)
    path = str(folder.resolve())
    if earlier.get("folder") == path:
        database.remove_run(earlier["run"], created=earlier["created"])
    run_id = database.add_run(run)
    write_text(folder / NOTE, json.dumps({"folder": path, "run": run_id, "created": run.created}) + "\n")
    return run_id


def step_record(run: RunContext, step: int, groups: Sequence[list[Rollout]], earlier: list[StepRecord]) -> StepRecord:
    """Return the record of a step from its fresh answers, of all rounds of dynamic sampling.

    Continuations of a given prefix say little about the policy, so rewards and sketch are of whole answers. Without
    whole answers they are those of the step before, and in the first step those of all answers.
    """
    rollouts = [rollout for group in groups for rollout in group]
    whole_groups = [*filter(None, map(select_fresh, groups))]
    whole = [rollout for group in whole_groups for rollout in group]
    if whole or not earlier:
        described = whole or rollouts
        reward = fmean(rollout.reward for rollout in described)
        accuracy = fmean(rollout.accuracy for rollout in described)
        sketch = sketch_of(whole_groups or groups)
    else:
        reward, accuracy, sketch = earlier[-1].reward, earlier[-1].accuracy, earlier[-1].sketch
    outcomes = {}
    if whole and all(rollout.filter_score is None for rollout in whole):
        hashes = [prompt_hash(run.task.train[group[0].prompt_index].prompt) for group in whole_groups]
        prompts = bytearray(b"".join(map(bytes.fromhex, hashes)))
        right = [sum(rollout.right for rollout in group) for group in whole_groups]
        outcomes = {
            "prompts": torch.frombuffer(prompts, dtype=torch.uint8).reshape(len(whole_groups), -1),
            "answers": torch.tensor([len(group) for group in whole_groups], dtype=torch.int32),
            "right": torch.tensor(right, dtype=torch.int32),
        }
    generated_tokens = sum(len(rollout.logprobs) for rollout in rollouts)
    return StepRecord(step, reward, accuracy, sketch, generated_tokens, outcomes)


def choose_right_answers(context: StepContext, groups: Sequence[list[Rollout]], tokenizer: str) -> list[Pair]:
    """Return a few different good answers of each group, best first, then at random."""
    pairs = []
    for number, fresh in enumerate(groups):
        by_text = {rollout.text: rollout for rollout in select_good(fresh) if rollout.response_ids}
        order = {text: keyed_seed(context.seed, "rhyme store", number, text) for text in by_text}
        texts = sorted(by_text, key=lambda text: (-by_text[text].reward, order[text]))
        for text in texts[:STORED_PER_GROUP]:
            rollout = by_text[text]
            answer = StoredAnswer(
                run_id=OWN,
                step=context.step,
                prompt_key=prompt_hash(context.run.task.train[rollout.prompt_index].prompt),
                text=text,
                finished=rollout.finish_reason == "stop",
                reward=rollout.reward,
                tokenizer=tokenizer,
                response_ids=torch.tensor(rollout.response_ids, dtype=torch.int32),
                logprobs=torch.tensor([float("nan")] * rollout.prefix_len + list(rollout.logprobs)),
            )
            pairs.append((rollout.prompt_index, answer))
    return pairs


class RunRecorder(Accelerator):
    """Gather the fresh answers of each step; rank 0 writes them into the database, if there is one."""

    enabled, name = False, "recorder"
    settings: RhymeSettings

    def __init__(self, settings: RhymeSettings):
        super().__init__(settings)
        self.fingerprint = ""  # of the tokenizer
        self.run_id = OWN  # in the database
        self.created = 0.0
        self.lost = False  # the database does not have this run, or has it no more
        self.groups: list[list[Rollout]] = []  # of the present step
        self.right_answers: list[Pair] = []  # to store of the newest step
        self.steps: list[StepRecord] = []  # the last ones of this run, if it has a database

    @cached_property
    def database(self) -> RetrospectiveDatabase:
        assert self.settings.database is not None
        return RetrospectiveDatabase(self.settings.database)

    def begin(self, run: RunContext) -> None:
        """Add a new run to the database. Settings of accelerators stay out: they may hold its password."""
        self.fingerprint = tokenizer_fingerprint(run.policy.tokenizer)
        self.created = time.time()
        if self.settings.database is not None:
            settings = run.config.model_dump(mode="json") | {"accelerators": run.config.accelerators.enabled}
            settings["output_dir"] = str(run.folder.resolve())
            stored_run = StoredRun(self.fingerprint, run.task.name, settings, self.created)
            self.run_id = run.on_rank0(lambda: begin_run(self.database, stored_run, run.folder))

    def collect(self, context: StepContext, rollouts: list[Rollout]) -> list[Rollout]:
        """Add the fresh answers of a round of the step, with their rewards before other accelerators shape them."""
        fresh = [replace(rollout) for rollout in rollouts if rollout.importance_cap is None]
        self.groups += by_group(fresh).values()
        return rollouts

    def after_update(self, context: StepContext) -> None:
        """Write the step."""
        groups, self.groups = self.groups, []
        self.fingerprint = self.fingerprint or tokenizer_fingerprint(context.run.policy.tokenizer)
        self.right_answers = choose_right_answers(context, groups, self.fingerprint)
        if groups and self.settings.database is not None:
            self.steps = [*self.steps, step_record(context.run, context.step, groups, self.steps)][-WINDOW:]
            answers = [answer for _, answer in self.right_answers]
            self.lost = self.lost or not context.run.on_rank0(lambda: self._store(answers, context.run))

    def _store(self, answers: list[StoredAnswer], run: RunContext) -> bool:
        """Write the newest step; return whether the database has this run, which a copy of its folder is not."""
        record = replace(self.steps[-1], seconds=run.seconds())
        note = read_note(run.folder)
        is_copy = note and note["folder"] != str(run.folder.resolve()) and read_note(Path(note["folder"])) == note
        recorded = not is_copy and self.database.add_step(self.run_id, record, answers, created=self.created)
        if not recorded:
            why = "it began without it, was removed from it, or its folder is a copy"
            tell(f"note: this run is not recorded in {self.database.name}: {why}")
        return recorded

    def state_dict(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "created": self.created,
            "fingerprint": self.fingerprint,
            "steps": [vars(step) for step in self.steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]
        self.created = state["created"]
        self.fingerprint = state["fingerprint"]
        self.steps = [StepRecord(**step) for step in state["steps"]]
