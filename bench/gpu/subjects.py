"""What ``python -m bench.gpu.train`` trains: settings, and how the policy that they begin with is made."""

import argparse
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.journal import ROOT
from python_trainer.errors import UserError
from tools.policies import sums as pretrain

FOLDER = ROOT / "bench/gpu"
BLOCK = 1 << 20


@dataclass(frozen=True)
class Scale:
    """What differs between a training and its dry run.

    Attributes:
        policy_s, run_s: least time to begin to make the policy, and a run.
        grace_s: for the step that is under way when the time is up, and its checkpoint.
    """

    policy_s: float
    run_s: float
    grace_s: float
    settings: tuple[str, ...] = ()


# what both subjects have in their dry runs
FEW = ("max_steps=3", "rollout.prompts_per_step=4", "rollout.num_generations=2", "rollout.max_completion_length=16",
       "save.save_steps=1", "accelerators.alpha.first_step=2", "accelerators.alpha.track_steps=1",
       "accelerators.alpha.gate_prompts=8", "accelerators.rpo.fill=1")  # fmt: skip


class Sums:
    """A policy of 23 million parameters, made here, on sums whose answers have about 500 tokens."""

    settings, facts, watched = FOLDER / "train.yaml", pretrain.FACTS, None
    ending = "-train.json"  # of the record's name
    # an answer takes more than 500 passes: a step may take half a minute, where attention has no kernel
    cuda = Scale(policy_s=420, run_s=90, grace_s=60)
    cpu = Scale(policy_s=0, run_s=15, grace_s=20, settings=(
        *FEW, "task.variant=short", "task.train_size=8", "task.gate_size=8", "task.test_size=8",
    ))  # fmt: skip

    def __init__(self, args: argparse.Namespace):
        self.size, self.device = "large" if args.device == "cuda" else "tiny", args.device

    def given(self) -> list[str]:
        """Settings that come from the command line."""
        return []

    def maker(self, folder: Path, settings: list[str]) -> list[str]:
        """Arguments of Python that make the policy."""
        return ["-m", "tools.policies.sums", "--size", self.size, "--device", self.device, "--output",
                str(folder)]  # fmt: skip

    def policy(self, folder: Path) -> Path:
        """Where in the folder that was made the model lies."""
        return folder


class Gsm8k:
    """A language model from outside on GSM8K, after supervised steps on the half that is not trained on.

    Raises:
        UserError: files are missing or are not what they were.
    """

    settings, facts, watched = FOLDER / "gsm8k.yaml", "summary.json", "metrics.jsonl"
    ending = "-gsm8k.json"
    cuda = Scale(policy_s=150, run_s=90, grace_s=60)
    cpu = Scale(policy_s=0, run_s=15, grace_s=20, settings=(
        *FEW, "task.train_size=8", "task.gate_size=8", "task.test_size=8",
        "sft.epochs=1",
    ))  # fmt: skip

    def __init__(self, args: argparse.Namespace):
        self.weights, self.data, self.device = args.weights, args.data, args.device
        for name in ("weights", "data"):
            if getattr(args, name) is None or not getattr(args, name).is_dir():
                raise UserError(f"--{name} must be a folder for --subject gsm8k, got {getattr(args, name)}")
        for name in ("train", "test"):
            if not (self.data / f"{name}.jsonl").is_file():
                raise UserError(f"--data: there is no file {name}.jsonl in {self.data}")

    def given(self) -> list[str]:
        train, test = (self.data.resolve() / f"{name}.jsonl" for name in ("train", "test"))
        return [f"task.train_path={train}:train[50%:]", f"task.test_path={test}"]

    def maker(self, folder: Path, settings: list[str]) -> list[str]:
        model = whole_model(self.weights, folder.with_name("weights"))
        half = f"task.train_path={self.data.resolve() / 'train.jsonl'}:train[:50%]"
        changed = [*settings, half, f"model.path={model}", f"model.device={self.device}", "save.save_steps=0"]
        if self.device == "cuda":
            changed += ["task.train_size=null", "task.gate_size=null"]  # all of that half, and nothing set aside
        arguments = ["--config", str(self.settings), "--output-dir", str(folder), "--set", *changed]
        return ["-m", "python_trainer", "sft", *arguments]

    def policy(self, folder: Path) -> Path:
        return folder / "model"


Subject = Sums | Gsm8k
SUBJECTS = ("sums", "gsm8k")


def choose(args: argparse.Namespace) -> Subject:
    """That of the command line."""
    return Sums(args) if args.subject == "sums" else Gsm8k(args)


def whole_model(folder: Path, into: Path) -> Path:
    """The model in a folder, as it is, or put together of the pieces of a GGUF file -> what ``model.path`` takes.

    Pieces are named ``NAME.gguf.*`` in their order, wherever below the folder; beside them lies ``NAME.gguf.sha256``,
    as ``sha256sum`` writes it.

    Raises:
        UserError: there is no model, or pieces are missing or damaged.
    """
    sums = sorted(folder.rglob("*.gguf.sha256"))
    if not sums:
        if (folder / "config.json").is_file() or list(folder.glob("*.gguf")):
            return folder.resolve()
        raise UserError(f"--weights: no model, no GGUF file and no pieces with their NAME.gguf.sha256 in {folder}")
    name, wanted = sums[0].name.removesuffix(".sha256"), (sums[0].read_text().split() or [""])[0]
    target = into / name
    if target.is_file():  # under this name there is only what was right
        return target.resolve()
    pieces = sorted((path for path in folder.rglob(f"{name}.*") if path not in sums), key=lambda path: path.name)
    into.mkdir(parents=True, exist_ok=True)
    aside, digest = into / f".{name}.tmp", hashlib.sha256()
    with aside.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as source:
                while block := source.read(BLOCK):
                    digest.update(block)
                    file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != wanted:
        size = aside.stat().st_size
        shutil.rmtree(into)
        found = ", ".join(piece.name for piece in pieces) or "none"
        raise UserError(f"--weights: the pieces of {name} ({found}; {size:,} bytes) do not give {sums[0]}: {wanted}")
    aside.replace(target)
    return target.resolve()
