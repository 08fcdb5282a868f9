"""Settings of a run: reads a YAML file and overrides from the command line, and checks them.

Option names are TRL's wherever TRL has the option. ``python -m python_trainer train --help-settings`` prints all.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from python_trainer.accelerators import AcceleratorsConfig
from python_trainer.accelerators.settings import AcceleratorSettings
from python_trainer.algorithms.settings import AlgorithmConfig
from python_trainer.errors import UserError, hide_passwords, problem_line
from python_trainer.model.settings import CriticConfig, ModelConfig, OptimizerConfig
from python_trainer.process.launch import DDP_TIMEOUT
from python_trainer.rollout.settings import LEAST_VLLM_TEMPERATURE, RolloutConfig
from python_trainer.run.callbacks import CALLBACKS
from python_trainer.settings import LOCAL, Bytes, Row, Section, copy_nested, describe_section, did_you_mean, section_in
from python_trainer.tasks.settings import TaskSettings

MOST_NODES = 100_000  # in a YAML file, aliases expanded; the longest shipped file has 200
OTHER_NAMES = {  # of settings in other trainers -> here
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio", "clip_eps"), "algorithm.epsilon"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), "algorithm.beta"),
    **dict.fromkeys(("group_size", "rollout_n", "num_samples"), "rollout.num_generations"),
    **dict.fromkeys(("max_new_tokens", "max_tokens", "response_length"), "rollout.max_completion_length"),
    **dict.fromkeys(("lr", "actor_lr"), "optimizer.learning_rate"),
}
CONFIGS = Path(__file__).parent / "configs"  # in the repository a link to the folder at its root


class SaveConfig(Section):
    """Checkpoints and the final model."""

    save_steps: int = Field(50, ge=0)
    """Write a checkpoint every this many steps; 0: only at the end."""
    save_total_limit: int = Field(2, ge=1)
    """Keep this many of the newest checkpoints and the one with the best evaluation. OUTPUT_DIR/best holds that one as
    a model if it is not the last."""
    weight_history: Bytes | None = Field(None, ge=1)
    """Record the weights after every step in OUTPUT_DIR/weights, as deltas to the first model there. Recording ends
    with a note once the deltas exceed this many bytes, such as 10GB; the first model is not counted. null: off.
    `python -m rlkernels weights` restores any step."""

    @field_validator("weight_history")
    @classmethod
    def _has_zstandard(cls, limit: int | None) -> int | None:
        if limit is not None and find_spec("zstandard") is None:
            raise ValueError("needs zstandard: pip install 'rlkernels[weights]', or leave it null")
        return limit


class EvaluationConfig(Section):
    """Accuracy on the test set. Every evaluation samples with the same noise."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 takes the likeliest token."""
    samples: int = Field(1, ge=1)
    """Answers to each prompt. The accuracy is their mean. Above 1, the run also logs pass@k: how often at least one of
    k = 1, 2, 4, ... answers is right."""
    eval_steps: int = Field(0, ge=0)
    """Evaluate every this many steps, and after the step that trains on right answers of an earlier run. 0: only before
    the first and after the last step."""
    eval_limit_during: int | None = Field(512, ge=1)
    """Test prompts per set in evaluations between the first and the last; null: all. Metrics `eval/` cover these
    prompts in every evaluation, metrics `eval_all/` all prompts in the first and the last."""
    target_accuracy: float | None = Field(None, gt=0, le=1)
    """summary.json tells when eval/accuracy first reaches this: seconds_to_target, tokens_to_target."""
    sets: Annotated[dict[str, str], LOCAL] = Field({})
    """More test sets by name, each a place as in task.test_path: {hard: hard.jsonl}. task.test_size cuts longer ones.
    Metrics: eval/NAME/accuracy."""


class SftConfig(Section):
    """Supervised steps on the column `answer`, by the command `sft`, with the settings of `optimizer`."""

    epochs: int = Field(1, ge=1)
    """Passes over the training examples."""
    batch_tokens: int = Field(8192, ge=1)
    """Tokens of prompts and answers per optimizer step, at most; a prompt that answers share counts once."""


class Config(Section):
    """All settings of a run."""

    seed: int = Field(0, ge=0)
    """Seed of the prompt order and of all sampling noise."""
    max_steps: int = Field(100, ge=1)
    """Training steps."""
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    """How the processes of torchrun share a run. `ddp`: each process holds all weights and trains on a part of the
    answers. `fsdp2`: each process also holds one shard of the weights, gradients and moments."""
    ddp_timeout: float = Field(DDP_TIMEOUT, ge=1, le=1e7)
    """Seconds that a process waits for one that is stopped or late before it ends the run. A line a minute names it."""
    max_seconds: float | None = Field(None, gt=0)
    """Stop after the step in which the wall time, without evaluations, passes this many seconds."""
    task: SerializeAsAny[TaskSettings] = TaskSettings.model_validate({})
    """Prompts and rewards."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    critic: CriticConfig = CriticConfig()
    """The value function of PPO."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Accuracy on the test set."""
    save: SaveConfig = SaveConfig()
    """Checkpoints."""
    callbacks: Annotated[list[str], CALLBACKS] = Field([])
    """Experiment trackers beside TensorBoard, and your own Callback classes (docs/quickstart.md)."""
    sft: SftConfig = SftConfig()
    """Supervised steps, by the command `sft` alone."""
    accelerators: SerializeAsAny[AcceleratorsConfig] = AcceleratorsConfig.model_validate({})
    """Plug-ins that make training cheaper."""

    @model_validator(mode="after")
    def _sections_fit(self) -> "Config":
        if conflicts := list(self.conflicts()):
            raise ValueError("; ".join(conflicts))
        return self

    def with_changes(self, section: str, **values: Any) -> "Config":
        """Return these settings with others in a section; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting that changes nothing beside the others."""
        if self.rollout.memory_bytes is not None and self.rollout.vllm_server:
            yield "rollout.memory_bytes has no effect with rollout.vllm_server: the server sets its KV cache"
        enabled = [settings.name for settings in self.accelerators.chosen()]
        for name in type(self.accelerators).model_fields:
            settings = getattr(self.accelerators, name)
            if name in enabled or not isinstance(settings, AcceleratorSettings):
                continue
            if unused := [f"accelerators.{name}.{setting}" for setting in settings.unused_unless_enabled()]:
                verb = "has" if len(unused) == 1 else "have"
                yield f"{', '.join(unused)} {verb} no effect: accelerators.enabled lacks {name}"

    def conflicts(self) -> Iterator[str]:
        """Yield a sentence for each pair of settings that exclude each other."""
        rollout, algorithm = self.rollout, self.algorithm
        if algorithm.advantage_fn.needs_group and rollout.num_generations < 2:
            yield (
                f"rollout.num_generations must be >= 2 with algorithm.advantage {algorithm.advantage}: it compares the "
                f"answers of a group, got {rollout.num_generations}"
            )
        if rollout.dynamic_sampling and rollout.num_generations < 2:
            yield (
                "rollout.dynamic_sampling needs rollout.num_generations >= 2: one answer has no spread, got "
                f"{rollout.num_generations}"
            )
        if rollout.hidden_logprobs and algorithm.importance_sampling != "none":
            yield (
                f"algorithm.importance_sampling must be none, got {algorithm.importance_sampling}: "
                f"{rollout.hidden_logprobs}"
            )
        for name, temperature in (("rollout", rollout.temperature), ("evaluation", self.evaluation.temperature)):
            if rollout.takes_vllm and 0 < temperature < LEAST_VLLM_TEMPERATURE:
                yield (
                    f"{name}.temperature must be at least {LEAST_VLLM_TEMPERATURE} with vLLM, which raises lower ones "
                    f"to that, got {temperature}"
                )
        if rollout.vllm_server and rollout.engine == "paged":
            yield f"rollout.vllm_server needs rollout.engine vllm, got {rollout.engine}"
        if self.optimizer.offload and self.parallel != "fsdp2":
            yield f"optimizer.offload needs parallel=fsdp2, in one process too, got {self.parallel}"
        cache, limit = algorithm.overlong_cache, rollout.max_completion_length
        if cache is not None and cache > limit:
            yield f"algorithm.overlong_cache must be <= rollout.max_completion_length ({limit}), got {cache}"
        if algorithm.num_minibatches > rollout.prompts_per_step:
            yield (
                f"algorithm.num_minibatches must be <= rollout.prompts_per_step ({rollout.prompts_per_step}), "
                f"got {algorithm.num_minibatches}"
            )
        if self.evaluation.sets and "test_path" not in type(self.task).model_fields:
            yield f"evaluation.sets needs a task with test_path, got {self.task.name}"
        for accelerator in self.accelerators.chosen():
            if self.task.environment is not None and not accelerator.multi_turn:
                need = f"task.environment=null, got {self.task.environment}"
                yield f"accelerators.enabled: {accelerator.name} needs {need}"
            if self.parallel != "none" and not accelerator.divisible:
                yield f"accelerators.enabled: {accelerator.name} needs parallel=none, got {self.parallel}"
        for accelerator in [*self.accelerators.chosen(), *self.accelerators.recording()]:
            if (conflict := accelerator.conflicts(self)) is not None:
                yield conflict


def load_config(source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a YAML file or a nested mapping and check them; missing ones have their defaults.

    Args:
        source: file, name of a shipped file (``smoke``), or mapping. In a mapping a task, reward, loss or advantage may
            be the object itself instead of its name, an accelerator or callback its class.
        overrides: ``a.b=value``, whose values are YAML.

    Raises:
        UserError: names the file, or every key with a problem, its bad value and what is allowed.
    """
    if not isinstance(source, str | Path | Mapping | None):
        raise UserError(f"source must be a file, a name of one that is shipped, a mapping or None, got {source!r:.80}")
    if not isinstance(overrides, list | tuple):
        raise UserError(f'overrides must be a list of texts like "max_steps=20", got {overrides!r:.80}')
    values = read_yaml(source) if isinstance(source, str | Path) else copy_nested(source or {})
    for override in overrides:
        apply_override(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("; ".join(describe_problem(problem, values) for problem in error.errors())) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a file of settings; a bare name that is no file in the current folder names a shipped one."""
    shipped = CONFIGS / f"{path}.yaml"
    file = shipped if Path(path).name == str(path) and not Path(path).exists() and shipped.exists() else Path(path)
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise UserError(
            f"cannot read the config file {path}: {error.strerror}; those that are shipped go by name: {names}"
        ) from error
    except ValueError as error:  # not UTF-8 either
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise UserError(f"{path} must hold a mapping of settings, got {type(values).__name__}")
    return values or {}


def parse_yaml(text: str) -> Any:
    """Parse settings.

    Raises:
        ValueError: the reason on one line, also for a date such as 2026-02-30 and brackets nested too deeply.
    """
    try:
        return StrictLoader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        context = f"{error.context}, " if error.context else ""
        raise ValueError(f"{context}{error.problem}{place}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


class StrictLoader(yaml.SafeLoader):
    """Refuse a duplicate key, of which PyYAML keeps the last.

    It also refuses aliases that make a short file a huge one, or a section that holds itself.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and expanded_size(node, {}) > MOST_NODES:
            raise yaml.YAMLError(f"its aliases make more than {MOST_NODES} entries")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # as written: anchors are merged later
        for number, (key, _) in enumerate(node.value):
            if key.value in [earlier.value for earlier, _ in node.value[:number]]:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value}", problem_mark=key.start_mark)
        return node


def expanded_size(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return the number of nodes below this one with every alias written out; infinite where one holds itself."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # in progress: an alias to it is a cycle
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        sizes[id(node)] = 1 + sum(expanded_size(child, sizes) for child in children)
    return sizes[id(node)]


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one nested key in place."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set takes key=value, for example optimizer.learning_rate=1e-5, got {override!r}")
    try:
        value = parse_yaml(text)
    except ValueError as error:
        form = {"[": "[A, B]", "{": "{A: B}"}.get(text.lstrip()[:1])
        if form and not text.rstrip().endswith(form[-1]):
            reason = f"a shell cuts it at spaces, so write it in quotes: '{key}={form}'"
        else:
            reason = str(error)
        raise UserError(f"--set {key}: {text!r} is not valid YAML; {reason}") from error
    *parents, last = key.strip().split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        if not isinstance(values[parent], dict):
            raise UserError(f"--set {key}: {parent} is not a section but {values[parent]!r}")
        values = values[parent]
    values[last] = value


def describe_problem(problem: Any, values: Mapping[str, Any]) -> str:
    """Write a pydantic error about these values as: key, what is wrong, value."""
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        section = section_of(problem["loc"][:-1], values)
        return f"{key}: unknown setting{suggest(key, section) if section else ''}"
    if problem["type"] == "value_error":
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}: {message}" if key else message
    if problem["type"] == "list_type":
        problem = problem | {"msg": f"must be a list, on a command line in quotes: '{key}=[A, B]'"}
    return problem_line(problem)


def suggest(key: str, section: type[Section]) -> str:
    """Return settings that an unknown key may mean.

    Other trainers' names come first, then near names, the same name in another section, and all of this section.
    """
    last = key.rpartition(".")[2]
    if last in OTHER_NAMES:
        return f"; did you mean {OTHER_NAMES[last]}?"
    if near := did_you_mean(last, section.model_fields):
        return near
    elsewhere = [row[0] for row in describe_settings() if row[0].rpartition(".")[2] == last and row[0] != key]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere)}?"
    return f"; known here: {', '.join(section.model_fields)}"


def section_of(path: Sequence[Any], values: Any) -> type[Section] | None:
    """Return the class that holds the settings at a path into these values; None within a list or dictionary."""
    section: type[Section] = Config
    for key in path:
        field = section.model_fields.get(key)
        values = values.get(key)
        inner = None if field is None else section_in(field.annotation)
        if inner is None or not isinstance(values, Mapping):
            return None
        section = inner.class_for(values)
    return section


def describe_settings() -> list[Row]:
    """Describe every setting: key, type, default and documentation."""
    return list(describe_section(Config))


def dump_config(config: Config) -> str:
    """Write settings and defaults as YAML that :func:`load_config` reads back, without passwords in URLs."""
    values = config.model_dump(mode="json")
    return hide_passwords(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1 << 16))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Map dotted names to values as ``--set`` takes them, without passwords in URLs."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = hide_passwords(json.dumps(value, default=str))  # YAML has dates
    return flat


def settings_used(folder: Path) -> dict[str, str]:
    """Read the settings of the run in a folder as :func:`flatten` writes them; empty without a run."""
    path = folder / "config.yaml"
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is damaged: it is no regular file")
    return flatten(read_yaml(path)) if path.exists() else {}


def changed_settings(folder: Path, config: Config) -> list[str]:
    """List how these settings differ from the run in a folder: ``name: value of the run -> new value``."""
    used = settings_used(folder)
    if not used:
        return []
    settings = flatten(config.model_dump(mode="json"))
    names = dict.fromkeys([*settings, *used])
    return [
        f"{name}: {used.get(name, '-')} -> {settings.get(name, '-')}"
        for name in names
        if used.get(name) != settings.get(name)
    ]
