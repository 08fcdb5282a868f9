"""Settings: defaults, overrides, and errors that name the key, the value and what is allowed."""

import re
from contextlib import nullcontext

import pytest
import yaml
from support import ROOT

from python_trainer.config import Config, changed_settings, describe_settings, dump_config, flatten, load_config
from python_trainer.errors import UserError


def test_every_setting_is_described_as_it_is_written():
    rows = {key: (kind, default, text) for key, kind, default, text in describe_settings()}
    assert len(rows) > 50
    assert rows["accelerators.enabled"][0] == "list of rpo | rhyme | drafts | alpha | module:Class"
    assert rows["seed"][0] == "int, >= 0" and rows["algorithm.epsilon"][0] == "float, > 0, < 1"
    assert rows["algorithm.epsilon_high"][:2] == ("float | null, > 0", "null")
    assert rows["rollout.memory_bytes"][0] == "bytes | null, >= 1"
    assert rows["accelerators.rpo.cut_share"][1] == "1.0" and rows["task.name"][1] == "sums"
    assert rows["model.lora"][:2] == ("null | section", "null")  # it is off, whatever its settings are
    for key, (kind, default, text) in rows.items():
        assert kind and default and len(text) > 10, key
        assert "Annotated" not in kind and kind not in ("list", "tuple", "dict"), key
        yaml.safe_load(default)


def test_overrides_reach_into_sections_that_the_file_leaves_out(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("max_steps: 3\nrollout:\noptimizer: {learning_rate: 1.0e-4}\n")
    overrides = ["rollout.num_generations=2", "optimizer.adam_beta2=0.95", "optimizer.adam_epsilon=1e-9"]
    config = load_config(path, overrides)
    assert (config.rollout.num_generations, config.max_steps) == (2, 3)
    assert (config.optimizer.learning_rate, config.optimizer.adam_beta2) == (1e-4, 0.95)
    assert config.optimizer.adam_epsilon == 1e-9, "an exponent without a dot, which YAML 1.1 reads as text"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_step=3", r"max_step: unknown setting; did you mean max_steps"),
        ("learning_rate=3", r"learning_rate: unknown setting; did you mean optimizer.learning_rate or .*\?"),
        ("task={name: lattice_paths, variant: short}", "task.variant: unknown setting; known here: name, train_size"),
        ("rollout.n=3", "rollout.n: unknown setting; known here: engine"),
        ("save.save_best=true", r"save.save_best: unknown setting; did you mean save_steps\?$"),
        ("accelerators.curriculum.window=4", "accelerators.curriculum: unknown setting; known here: enabled, rpo"),
        ("accelerators.rpo.cut=3", "accelerators.rpo.cut: unknown setting; known here: cut_share"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate: .*greater than 0, got -1"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate: .*, got nan"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: .*valid number.*, got 'fast'"),
        ("rollout.top_p=1.5", "rollout.top_p: .*less than or equal to 1, got 1.5"),
        ("rollout.schedule=lifo", "rollout.schedule: .*'fifo' or 'history', got 'lifo'"),
        ("rollout.temperature=0", "rollout.temperature: .*greater than 0, got 0"),
        ("rollout.num_generations=1", "rollout.num_generations must be >= 2"),
        ("rollout.prompts_per_step=2.5", "rollout.prompts_per_step: .*integer.*, got 2.5"),
        ("algorithm.loss_type=gropo", r"loss_type: must be one of grpo, dapo.*, got 'gropo'; did you mean grpo"),
        ("algorithm.delta=1.1", r"algorithm: delta must be above 1.2, which is 1 \+ epsilon_high, or .*, got 1.1"),
        ("algorithm.num_minibatches=99", "algorithm.num_minibatches must be <= rollout.prompts_per_step .32., got 99"),
        ("accelerators.enabled=[warp]", "accelerators.enabled: must be one of .*rpo.*, got 'warp'$"),
        ("accelerators.rpo.cut_share=2", "accelerators.rpo.cut_share: .*less than or equal to 1, got 2"),
        ("task.name=chess", "task: must be one of .*, jsonl, .*, module:Class, got 'chess'"),
        ("task.variant=medium", "task.variant: .*, got 'medium'"),
        ("task.train_size=0", "task.train_size: .*greater than or equal to 1, got 0"),
        ("task.gate_size=-1", "task.gate_size: .*greater than or equal to 0, got -1"),
        ("model=small", "model: .*, got 'small'"),
        ("model.lora.rank=4", "model.lora.rank: unknown setting; known here: r, alpha, target_modules"),
        ("max_steps", "--set takes key=value, .*got 'max_steps'"),
        ("=3", "--set takes key=value"),
        ("seed.x=1", "seed"),
        ("max_steps=[1", r"--set max_steps: '\[1' is not valid YAML"),
        ("task={name:", r"'\{name:' is not valid YAML; a shell .* in quotes: 'task=\{A: B\}'"),
        ("accelerators.enabled=[drafts,", r"'\[drafts,' is not .* in quotes: 'accelerators.enabled=\[A, B\]'"),
        ("rollout.stop=a: b:", r"'a: b:' is not valid YAML; mapping values .* \(line 1, column 5\)$"),
        ("task={name: sums, name: jsonl}", r"is not valid YAML; duplicate key name \(line 1, column 14\)$"),
        ("model.path=2026-02-30", "--set model.path: '2026-02-30' is not valid YAML; day is out of range for month$"),
        ("algorithm.clip_range=0.2", "algorithm.clip_range: unknown setting; did you mean algorithm.epsilon"),
        ("optimizer.lr=1e-5", "optimizer.lr: unknown setting; did you mean optimizer.learning_rate"),
        ("save.weight_history=true", "weight_history: must be a number of bytes, such as 4294967296 or 4GiB, got True"),
        ("rollout.memory_bytes=4 GX", "rollout.memory_bytes: must be a number of bytes, such as .* got '4 GX'"),
        ("rollout.memory_bytes=0B", "rollout.memory_bytes: .*greater than or equal to 1, got '0B'"),
        ("callbacks=wandb", r"^callbacks: must be a list, .* in quotes: 'callbacks=\[A, B\]', got 'wandb'$"),
        ("rollout.stop=null", r"rollout.stop: must be a list, .*'rollout.stop=\[A, B\]', got None$"),
        ("algorithm.policy_loss=sapo", "policy_loss: must be one of clip, cispo, module:function, got 'sapo'"),
        ("algorithm.kl_estimator=k4", "kl_estimator: must be one of k1, k2, k3, module:function, got 'k4'$"),
        ("task.environment=gues", "task.environment: must be one of module:Class, got 'gues'"),
        ("callbacks=[mlflow]", "callbacks: must be one of wandb, trackio, module:Class, got 'mlflow'"),
        ("rollout.vllm_server=[]", r"vllm_server: must be a URL like http://HOST:8000, or a list of such; got \[\]"),
        ("rollout.vllm_server=5", "rollout.vllm_server: must be a URL .* got 5"),
        ("rollout.vllm_server='http://a:1,'", "rollout.vllm_server: must be a URL .* got 'http://a:1,'"),
        ("rollout.vllm_server=http://a:8o00", "rollout.vllm_server: must be a URL .* got 'http://a:8o00'"),
        ("rollout.vllm_server=http://me:secret@a", r"vllm_server: must be a URL .* got 'http://...@a'$"),
        ("rollout.vllm_server=http://:8000", "rollout.vllm_server: must be a URL .* got 'http://:8000'"),
        ("rollout.vllm_server=[http://a:1, b:1]", r"vllm_server: must be .* got \['http://a:1', 'b:1'\]"),
        ("evaluation.sets=[a.jsonl]", r"evaluation.sets: .*dictionary, got \['a.jsonl'\]"),
        ("evaluation.sets={a: a.jsonl}", "evaluation.sets needs a task with test_path, got sums"),
    ],
)
def test_wrong_values_are_named(override, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [override])


ONE = "rollout.num_generations=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=paged", "rollout.vllm_server=http://a"], "vllm_server needs rollout.engine vllm, got paged"),
        (["rollout.vllm_server=[http://a:1, http://a:2]", "accelerators.enabled=[drafts]"],
         "drafts needs rollout.vllm_server null, got http://a:1, http://a:2; .*integrations.md"),
        ([ONE, "algorithm.advantage=gae"], None),
        ([ONE, "algorithm.advantage=reinforce++"], None),
        ([ONE, "algorithm.advantage=rloo"], "num_generations must be >= 2 with algorithm.advantage rloo: .* got 1"),
        ([ONE, "algorithm.advantage=gae", "rollout.dynamic_sampling=true"],
         "dynamic_sampling needs rollout.num_generations >= 2: .*, got 1"),
        (["rollout.max_completion_length=12", "algorithm.overlong_cache=13"],
         "overlong_cache must be <= rollout.max_completion_length .12., got 13"),
        (["accelerators.rhyme.database=history.db", "task.environment=test_environments:Echo"],
         "accelerators.rhyme.database needs task.environment null, got test_environments:"),
        (["task.chat_template_kwargs={a: {b: &b {<<: {k: 1}, k: 2}}, c: {<<: *b}}"], None),  # k stands in b once
        (["optimizer.offload=true"], "offload needs parallel=fsdp2, in one process too, got none"),
        (["optimizer.offload=true", "parallel=ddp"], "offload needs parallel=fsdp2, in one process too, got ddp"),
        (["parallel=ddp", "rollout.engine=vllm"], None),
        (["parallel=ddp", "accelerators.enabled=[rpo, alpha]"], None),
        (["parallel=fsdp2", "accelerators.enabled=[alpha]"], "alpha needs all weights on every rank.* got fsdp2"),
    ],
)  # fmt: skip
def test_settings_that_go_together_or_do_not(overrides, message):
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        load_config(None, overrides)


def test_every_conflict_is_reported():
    overrides = ["optimizer.offload=true", "rollout.num_generations=1"]
    with pytest.raises(UserError, match=r"^rollout.num_generations must be >= 2 .*; optimizer.offload needs parallel"):
        load_config(None, overrides)


@pytest.mark.parametrize(("text", "size"), [("4GiB", 4 << 30), ("10GB", 10**10), ("512", 512), ("1.5 KiB", 1536)])
def test_bytes_with_units(text, size):
    config = load_config({"rollout": {"memory_bytes": text}}, [f"save.weight_history={text}"])
    assert config.rollout.memory_bytes == config.save.weight_history == size
    assert f"memory_bytes: {size}" in dump_config(config)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([], None),
        (["accelerators.alpha.preset=paper", "accelerators.enabled=[alpha]"], None),
        (["accelerators.rhyme.database=history.db"], None),
        (["accelerators.alpha.preset=paper"], "^accelerators.alpha.preset has no effect: .* lacks alpha"),
        (
            [
                "accelerators.rhyme.database=history.db",
                "accelerators.rhyme.fraction=0.5",
                "accelerators.rhyme.threshold=0",
            ],
            "^accelerators.rhyme.fraction, accelerators.rhyme.threshold have no effect: .* lacks rhyme",
        ),
        (
            [
                "accelerators.rhyme.database=history.db",
                "accelerators.rhyme.fraction=0.5",
                "accelerators.enabled=[rhyme]",
            ],
            None,
        ),
        (["rollout.memory_bytes=1GB", "rollout.vllm_server=http://a"], "memory_bytes has no effect with .*vllm_server"),
    ],
)
def test_settings_without_effect(overrides, sentence):
    sentences = list(load_config(None, overrides).without_effect())
    assert len(sentences) == (sentence is not None)
    assert not sentences or re.search(sentence, sentences[0])


def test_all_problems_are_reported_at_once(tmp_path):
    (tmp_path / "a.yaml").write_text("{max_steps: 0}")
    with pytest.raises(UserError, match="^max_steps: .*got 0; rollout.top_p: .*; optimizer.lr: unknown"):
        load_config(tmp_path / "a.yaml", ["rollout.top_p=2", "optimizer.lr=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "is not valid YAML"), ("- 1\n- 2", "must hold a mapping of settings, got list"),
     ("save: {save_steps: 1}\nsave: {}", r"duplicate key save \(line 2, column 1\)"),
     ("seed: 2026-02-30", "YAML: day is out of range"),
     (None, "cannot read the config file .*a.yaml: No such file")],
)  # fmt: skip
def test_wrong_files_are_named(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    assert isinstance(load_config(path), Config)
    keys = {key for key, *_ in describe_settings()}
    flat = flatten(yaml.safe_load(path.read_text()))
    assert {"task.columns" if key.startswith("task.columns.") else key for key in flat} <= keys


def test_a_shipped_file_goes_by_its_name(tmp_path, monkeypatch):
    """An installed package finds it without a clone; a file in the current folder comes first."""
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    expected = {name: load_config(ROOT / "configs" / f"{name}.yaml") for name in ("smoke", "sums")}
    monkeypatch.chdir(tmp_path)
    assert {name: load_config(name) for name in expected} == expected
    shipped = f"those that are shipped go by name: {', '.join(names)}"
    with pytest.raises(UserError, match=f"nowhere: No such file.*; {shipped}"):
        load_config("nowhere")
    with pytest.raises(UserError, match="cannot read the config file configs/smoke"):
        load_config("configs/smoke")
    (tmp_path / "smoke").write_text("max_steps: 77")
    assert load_config("smoke").max_steps == 77


def test_settings_of_free_form_and_sections_that_are_off_count_as_changed(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(load_config(None)))
    config = load_config({"model": {"lora": {"r": 4}}, "task": {"chat_template_kwargs": {"thinking": False}}})
    changes = changed_settings(tmp_path, config)
    assert "model.lora: null -> -" in changes and "model.lora.r: - -> 4" in changes
    assert "task.chat_template_kwargs.thinking: - -> false" in changes and len(changes) == 6
