"""Extrapolated weights on the arithmetic task: what rank 1 keeps, what 40 % of the steps and a prediction reach.

    python -m bench.studies alpha --output-dir runs/studies/alpha

Every seed trains once, tracking its weights, with a checkpoint at 40 % of the steps. From there each predictor makes
one gated attempt; what it would have written without refusals and gate is tested too, and what plain training makes of
the processor time that an attempt took. Another run trains on after accepted jumps. The last weights are cut down to
rank 1 and more. All on the same 8,192 test prompts, one answer each with the same noise per seed, so everything is
paired. One run per algorithm gives the shape of its update. What is finished is not done again.

The learning rate is 3e-5, not the 2e-4 of configs/arithmetic.yaml: at 2e-4 the task is as good as solved after 40 %
of the steps and there would be nothing left to predict.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
import torch
from rich.console import Console
from safetensors.numpy import load_file, save_file

from bench._runner import commit
from bench.studies import alpha_report
from python_trainer.accelerators.alpha import Alpha
from python_trainer.accelerators.base import StepContext
from python_trainer.checkpoint import load_checkpoint
from python_trainer.config import Config, load_config
from python_trainer.evaluation import Evaluated, first_rows
from python_trainer.run_directory import load_evaluations, read_metrics, write_text
from python_trainer.tasks.rewards import Scores
from python_trainer.trainer import Trainer
from rlkernels.extrapolation import PREDICTORS, Limits
from rlkernels.extrapolation.predictors import linearity
from rlkernels.rank1.ops import leading_deltas

CONFIG = Path("configs/arithmetic.yaml")
SHARE = 0.4
SCAN = (0.0, 0.25, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0)  # of a = |D|_F / sigma1
SETTINGS = [
    "optimizer.learning_rate=3e-5", "max_seconds=null", "evaluation.eval_steps=0", "evaluation.eval_limit=null",
    "evaluation.target_accuracy=null", "save.save_steps=0", "save.save_total_limit=9",
    "accelerators.enabled=[alpha]", "accelerators.alpha.first_step=1000000", "accelerators.alpha.track_steps=2",
    "accelerators.alpha.gate_prompts=2048",
    f"accelerators.alpha.horizon={1 / SHARE}",
]  # fmt: skip
ALGORITHMS = {
    "dapo": ["algorithm.epsilon_high=0.28"],
    "grpo": ["algorithm.loss_type=grpo"],
    "dr_grpo": ["algorithm.loss_type=dr_grpo", "algorithm.scale_rewards=none"],
    "rloo": ["algorithm.advantage=rloo", "algorithm.loss_type=seq-mean-token-sum"],
    "reinforce++": ["algorithm.advantage=reinforce++", "algorithm.loss_type=token-mean"],
    "gspo": ["algorithm.importance_sampling_level=sequence", "algorithm.loss_type=grpo",
             "algorithm.epsilon=3e-4", "algorithm.epsilon_high=4e-4", "algorithm.num_minibatches=2"],
    "ppo": ["algorithm.advantage=gae", "algorithm.loss_type=token-mean", "algorithm.lam=1.0",
            "critic.learning_rate=1e-3"],
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output-dir", type=Path, default=Path("runs/studies/alpha"), metavar="DIR")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results", metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--steps", type=int, default=60, help="of a full run (default: %(default)s)")
    parser.add_argument(
        "--scan-prompts", type=int, default=2048, help="test prompts of scans and of other algorithms (default: 2048)"
    )
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="KEY=VALUE", help="more settings")
    parser.add_argument("--report-only", action="store_true", help="tables and pictures of what there is")


class Timed(Trainer):
    """Seconds of processor time that evaluations took, so that they can be left out; the machine may be shared."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.evaluating = 0.0
        self.gating = 0.0  # of it, at the gate
        answer_split = self.evaluator.answer_split

        def timed(split: str, rows: range | None = None) -> Scores:
            start = time.process_time()
            try:
                return answer_split(split, rows)
            finally:
                spent = time.process_time() - start
                self.evaluating += spent
                self.gating += spent if split == "gate" else 0.0

        vars(self.evaluator)["answer_split"] = timed


class Part:
    """Results of one run in its folder: numbers in results.json, right or wrong per prompt in answers.safetensors."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.numbers: dict[str, Any] = self._json()
        path = folder / "answers.safetensors"
        self.answers: dict[str, numpy.ndarray] = dict(load_file(path)) if path.exists() else {}

    def _json(self) -> dict[str, Any]:
        path = self.folder / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def note(self, name: str, value: Any) -> None:
        self.numbers[name] = value
        write_text(self.folder / "results.json", json.dumps(self.numbers, indent=1) + "\n")

    def keep(self, name: str, correct: Any) -> None:
        self.answers[name] = numpy.asarray(correct, dtype=numpy.uint8)
        aside = self.folder / ".answers.tmp"
        save_file(self.answers, aside)
        aside.replace(self.folder / "answers.safetensors")


def known(correct: list[float]) -> Evaluated:
    """The first evaluation, whose reward is the accuracy."""
    return dict.fromkeys(("eval/accuracy", "eval/reward"), fmean(correct)), correct


def train(config: Config, part: Part, name: str, *, folder: str = "run", start: Evaluated | None = None) -> None:
    """Trains up to ``config.max_steps`` from where the run is; keeps the start, the end and what this stretch cost."""
    if name in part.answers:
        return
    run = part.folder / folder
    label = f"{part.folder.parent.name}, {part.folder.name}, {name}"
    trainer = Timed(config, run, resume=True, label=label, start=start)
    before, began = trainer.state.step, time.process_time()
    alpha = alpha_of(trainer)
    tracking = track_timed(alpha)
    trainer.run()
    if before < config.max_steps:
        spent = time.process_time() - began - trainer.evaluating + trainer.gating
        part.note(f"{name}_cost", {
            "steps": config.max_steps - before, "cpu_s": spent,
            "track_cpu_s": tracking["seconds"], "gate_cpu_s": trainer.gating, "counts": trainer.state.counts,
            "attempts": alpha.events,
        })  # fmt: skip
    found = load_evaluations(run)
    part.keep("base", found["start"])
    part.keep(name, found["final"])


def track_timed(alpha: Alpha) -> dict[str, float]:
    """Counts seconds of processor time spent on tracking from now on."""
    spent, track = {"seconds": 0.0}, alpha.track

    def timed(context: StepContext) -> None:
        start = time.process_time()
        track(context)
        spent["seconds"] += time.process_time() - start

    alpha.track = timed  # type: ignore[method-assign]
    return spent


def alpha_of(trainer: Trainer) -> Alpha:
    found = trainer.accelerators[0]
    assert isinstance(found, Alpha)
    return found


def at(part: Part, config: Config, step: int) -> Timed:
    """A trainer with the weights, moments and trajectory of a saved step."""
    trainer = Timed(config, part.folder / "none", console=Console(quiet=True))
    trainer.checkpointer.origin.saved = load_checkpoint(part.folder / "run" / "checkpoints" / f"step-{step:06d}")
    trainer.checkpointer.restore()
    return trainer


def context_of(trainer: Timed, step: int) -> StepContext:
    return trainer.context(step)


def with_alpha(config: Config, **changes: Any) -> Config:
    values = config.model_dump(mode="json")
    values["accelerators"]["alpha"] |= changes
    return Config.model_validate(values)


def attempts(config: Config, part: Part, cut: int) -> None:
    """One gated attempt per predictor, and what it would have written without refusals and gate."""
    variants: list[tuple[str, dict[str, Any]]] = [(name, {"predictor": name}) for name in PREDICTORS]
    variants.append(("pls as in the paper", {"predictor": "pls", "keep_rest": False, "scale": "alpha"}))
    for name, changes in variants:
        if f"attempt {name}" in part.numbers:
            continue
        trainer = at(part, with_alpha(config, **changes), cut)
        alpha, context = alpha_of(trainer), context_of(trainer, cut)
        predicted = predict_anyway(alpha, context)
        start, gate_before = time.process_time(), trainer.evaluating
        before = trainer.engine.stats["generated_tokens"]
        event = alpha.attempt(context)
        event["cpu_s"] = time.process_time() - start
        event["gate_cpu_s"] = trainer.evaluating - gate_before
        event["gate_tokens"] = trainer.engine.stats["generated_tokens"] - before
        cuts = part.answers["cut"]
        gated = trainer.evaluator.evaluate_each("test") if event["accepted"] else cuts
        part.keep(f"gated {name}", gated)
        if event["accepted"] and event["tries"][-1]["factor"] == 1.0:
            part.keep(f"ungated {name}", gated)
        else:
            part.keep(f"ungated {name}", answers_with(at(part, config, cut), predicted))
        part.note(f"attempt {name}", event)


def predict_anyway(alpha: Alpha, context: StepContext) -> dict[str, torch.Tensor]:
    assert alpha.trajectory is not None
    rules = replace(alpha.rules(), limits=Limits(min_gap=0.0, noise_factor=0.0, min_cosine=0.0))
    return rules.predict(alpha.trajectory, alpha.weights(context))


def answers_with(trainer: Timed, weights: Mapping[str, torch.Tensor], prompts: int | None = None) -> list[float]:
    """Right or wrong for the first test prompts with these weights, which stay in the model."""
    trainer.learner.optimizer.write(weights)
    trainer.engine.policy_updated()
    return trainer.evaluator.evaluate_each("test", first_rows(prompts))


def leading_parts(
    weights: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """The part of this rank of the update of every projection in ``base``, as a matrix of its shape."""
    pairs = {name: (weights[name], start) for name, start in base.items()}
    found = leading_deltas(pairs, rank=rank, min_passes=8)  # reads enough for the last of 16 directions
    return {name: left @ right.T for name, (_, left, right) in found.items()}


def same_cost(config: Config, part: Part, cut: int) -> None:
    """Plain training for as long as an attempt takes, from the same checkpoint."""
    if "same cost" in part.answers:
        return
    spent = [value["cpu_s"] for name, value in part.numbers.items() if name.startswith("attempt ") and "tries" in value]
    seconds = sum(spent) / len(spent) if spent else 0.0
    steps = max(round(seconds / (part.numbers["cut_cost"]["cpu_s"] / cut)), 1)
    home = part.folder / "same cost" / "checkpoints"
    home.mkdir(parents=True, exist_ok=True)
    if not (home / f"step-{cut:06d}").exists():
        shutil.copytree(part.folder / "run" / "checkpoints" / f"step-{cut:06d}", home / f"step-{cut:06d}")
    part.note("same cost steps", steps)
    trainer = Timed(config.model_copy(update={"max_steps": cut + steps}), home.parent, resume=True, label="same cost")
    trainer.run()
    part.keep("same cost", load_evaluations(home.parent)["final"])


def train_on(config: Config, part: Part, cut: int) -> None:
    """The same steps with attempts on the way: what a user of the accelerator gets."""
    settings = {"first_step": cut // 2, "every": cut // 2, "horizon": 2.0, "predictor": "full"}
    start = known(part.answers["base"].tolist())
    train(with_alpha(config, **settings), part, "with jumps", folder="jumps", start=start)


def cut_down(config: Config, part: Part, step: int, scan_prompts: int, *, more: bool) -> None:
    """The last update at rank 1 and above, and along a scan of its scale."""
    trainer = at(part, config, step)
    tracked = alpha_of(trainer).trajectory
    assert tracked is not None
    final = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    first = dict(Trainer(config, part.folder / "none", console=Console(quiet=True)).policy.model.named_parameters())
    deltas = {name: final[name] - base for name, base in tracked.base.items()}
    sizes = {name: float(delta.norm()) for name, delta in deltas.items()}
    low = {rank: leading_parts(final, tracked.base, rank) for rank in (1, 4, 16)}

    def test(modules: dict[str, torch.Tensor], rest: str, prompts: int | None = None) -> list[float]:
        return answers_with(trainer, dict(final if rest == "trained" else first) | modules, prompts)

    def update(rank: int, scale: Callable[[str], float]) -> dict[str, torch.Tensor]:
        return {n: base + scale(n) * low[rank][n] for n, base in tracked.base.items()}

    def alpha_scale(name: str) -> float:
        return sizes[name] / max(float(low[1][name].norm()), 1e-30)

    wanted: list[tuple[str, Callable[[], dict[str, torch.Tensor]], str]] = [
        ("rank 1, scale a, rest trained", lambda: update(1, alpha_scale), "trained"),
    ]
    if more:
        wanted += [
            ("rank 1, scale 1, rest trained", lambda: update(1, lambda name: 1.0), "trained"),
            ("rank 1, scale a, rest base", lambda: update(1, alpha_scale), "base"),
            ("modules whole, rest base", lambda: {n: final[n] for n in deltas}, "base"),
        ]
        wanted += [
            (f"rank {rank}, scale 1, rest trained", lambda rank=rank: update(rank, lambda name: 1.0), "trained")  # type: ignore[misc]
            for rank in (4, 16)
        ]
    for name, modules, rest in wanted:
        if name not in part.answers:
            part.keep(name, test(modules(), rest, None if more else scan_prompts))
    if "scan" not in part.numbers:
        accuracy = []
        for factor in SCAN:
            correct = test(update(1, lambda name, f=factor: f * alpha_scale(name)), "trained", scan_prompts)  # type: ignore[misc]
            accuracy.append(sum(correct) / len(correct))
        part.note("scan", {"factors": SCAN, "accuracy": accuracy, "prompts": scan_prompts})


def shape(config: Config, part: Part, step: int) -> None:
    """What the trajectory of every module looks like; needs no generation."""
    if "modules" in part.numbers:
        return
    tracked = alpha_of(at(part, config, step)).trajectory
    assert tracked is not None
    rows = {}
    for name in tracked.base:
        points, facts = tracked.points(name), tracked.facts(name)
        half = int((points.steps - points.steps[-1] / 2).abs().argmin())
        rows[name] = {
            "share": facts["sigma"] / facts["frobenius"], "gap": facts["gap"], "r2": linearity(points),
            "cosine_at_half": float(points.cosine[half]), "captured_first": float(points.captured[0]),
        }  # fmt: skip
    part.note("modules", rows)
    part.note("curve", [[row["step"], row["accuracy"]] for row in read_metrics(part.folder / "run") if "reward" in row])


def plan(args: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(what, algorithm, seed), most important first."""
    main, *others = args.algorithms
    yield from (("predictors", main, seed) for seed in args.seeds)
    yield from (("shape", name, args.seeds[0]) for name in others)
    yield from (("jumps", main, seed) for seed in args.seeds)


def run(args: argparse.Namespace) -> None:
    cut = round(SHARE * args.steps)
    for what, algorithm, seed in plan(args) if not args.report_only else ():
        part = Part(args.output_dir / algorithm / f"seed-{seed}")
        if commit() not in part.numbers.get("commit", ""):
            part.note("commit", f"{part.numbers.get('commit', '')} {commit()}".strip())
        overrides = [*SETTINGS, *ALGORITHMS[algorithm], *args.overrides, f"seed={seed}", f"max_steps={args.steps}"]
        if what == "shape":
            overrides.append(f"evaluation.eval_limit={args.scan_prompts}")
        config = load_config(CONFIG, overrides)
        if what == "predictors":
            train(config.model_copy(update={"max_steps": cut}), part, "cut")
            train(config, part, "full")
            attempts(config, part, cut)
            same_cost(config, part, cut)
        elif what == "shape":
            main = Part(args.output_dir / args.algorithms[0] / f"seed-{seed}")
            train(config, part, "full", start=known(main.answers["base"].tolist()[: args.scan_prompts]))
        else:
            train_on(config, part, cut)
        if what != "jumps":
            cut_down(config, part, args.steps, args.scan_prompts, more=what == "predictors")
            shape(config, part, args.steps)
        alpha_report.write(args.output_dir, args.results, cut, args.steps)
    if args.report_only:
        alpha_report.write(args.output_dir, args.results, cut, args.steps)
