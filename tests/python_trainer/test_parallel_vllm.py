"""Several trainers and vLLM, on servers that they share or as an engine in each; tests/with_vllm has real ones."""

import copy
import json
import sys
from contextlib import ExitStack
from unittest.mock import Mock, patch

import pytest
import torch
from conftest import LORA, merged, run_settings
from fake_vllm import EOS, MAX_LENGTH, FakeLLM, draw, install, serving, urls
from gloo import KINDS, run_on_ranks, train
from paged import LONGROPE, make
from safetensors.torch import load_file
from support import assert_equal

from python_trainer.environment import Environment
from python_trainer.errors import UserError
from python_trainer.loop.learner import Learner
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.weights import checkpoint_weights
from python_trainer.rollout.vllm.engine import InProcess
from python_trainer.rollout.vllm.servers import Servers
from python_trainer.run.directory import read_metrics

pytestmark = pytest.mark.slow  # two processes train for a minute


class Twice(Environment):
    """Two turns."""

    turns = 0

    def step(self, text):
        self.turns += 1
        return "AB", len(text) / 8, self.turns == 2


SERVED = {
    "plain": {},
    "environment": {
        "task": {"environment": "test_parallel_vllm:Twice", "max_turns": 2, "reward": "environment"},
        "rollout": {"schedule": "fifo"},
    },
    "adapters, suffix rollouts": {
        "model": {"lora": {"r": 4, "alpha": 16}},
        "accelerators": {"enabled": ["rpo"], "rpo": {"preset": "paper"}},
    },
}


def train_and_tell(settings, folder, parallel=None, *, sleeps=None):
    """Train; each process writes its training batches and the state of its engine to a report.

    ``sleeps``: whether the device of an engine in each process lets it sleep; None where they have servers.
    """
    batches = []
    held_bytes = []
    update = Learner.update

    def recorded(self, rollouts, number):
        if sleeps is not None:
            FakeLLM.last.events.append("update")
        held_bytes.append(sum(p.untyped_storage().nbytes() for p in self.policy.inference_model.parameters()))
        batches.append([(r.prompt_ids, r.response_ids, r.logprobs, r.finish_reason) for r in rollouts])
        return update(self, rollouts, number)

    with patch.object(Learner, "update", recorded), pytest.MonkeyPatch.context() as patches:
        if sleeps is not None:
            install(patches, sleeps=sleeps)
        trainer = train(settings, folder, parallel)
    engine = trainer.engine
    report = {"given": batches, "held": held_bytes, "version": engine.policy_version, "positions": engine.max_positions}
    report["stats"] = {name: n for name, n in engine.stats.items() if sleeps is None or name != "weight_bytes"}
    report["lengths"] = engine.lengths and vars(engine.lengths)
    if sleeps is not None:
        llm = FakeLLM.last
        saved = dict(checkpoint_weights(trainer.policy.inference_model))
        loaded = llm.loaded or llm.lost  # it sleeps while a model is saved that has to be gathered
        assert_equal(loaded, saved)
        assert llm.options["enable_sleep_mode"] == sleeps
        report |= {"events": llm.events, "backend": llm.options.get("distributed_executor_backend")}
    (folder / f"rank-{trainer.ranks.rank}.json").write_text(json.dumps(report))


@pytest.fixture(scope="module")
def vllm_settings(tiny_policy, jsonl_files):
    settings = run_settings(tiny_policy, jsonl_files) | {"max_steps": 2}
    settings["optimizer"] = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}  # as in test_parallel.py
    return merged(settings, {"rollout": {"engine": "vllm", "schedule": "history"}})


def train_with_servers(settings, folder, broken):
    """Train every case on both kinds of ranks, then with servers that fail in the first process alone."""
    for parallel in KINDS:
        for name, changes in SERVED.items():
            train_and_tell(merged(settings, changes), folder / parallel / name, parallel)
        for name, addresses in broken.items():
            changed = merged(settings, {"rollout": {"vllm_server": addresses}})
            rank = torch.distributed.get_rank()
            try:
                train(changed, folder / parallel / name, parallel)
            except UserError as error:
                (folder / f"{parallel}, {name}, {rank}").write_text(str(error))


@pytest.fixture(scope="module")
def server_runs(tmp_path_factory, vllm_settings):
    """Run directories: KIND/CASE, of one process and of two, all with the same two servers."""
    folder = tmp_path_factory.mktemp("runs")
    with ExitStack() as running:
        first, second, refusing = (running.enter_context(serving()) for _ in range(3))
        first.answers["/v1/completions"] = second.answers["/v1/completions"] = draw
        refusing.answers["/v1/completions"] = 500
        settings = merged(vllm_settings, {"rollout": {"vllm_server": urls([first, second])}})
        broken = {"refuses": urls([first, refusing]), "is not there": [first.url, "http://127.0.0.1:1"]}
        run_on_ranks(folder, train_with_servers, settings, folder, broken)
        for name, changes in SERVED.items():
            train_and_tell(merged(settings, changes), folder / "none" / name)
    return folder


def told(runs, kind, rank=0):
    return json.loads((runs / kind / f"rank-{rank}.json").read_text())


def assert_told_alike(runs, single_name, several_name):
    """Check that both processes report and train as one process does; return its report."""
    expected, first, second = told(runs, single_name), told(runs, several_name), told(runs, several_name, 1)
    for name in ("given", "stats", "lengths", "version", "positions"):
        assert expected[name] == first[name] == second[name], name
    assert len(expected["given"]) == 2
    single, several = (load_file(runs / name / "weights.safetensors") for name in (single_name, several_name))
    torch.testing.assert_close(several, single, rtol=1e-5, atol=1e-6)
    return expected


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("name", SERVED)
def test_several_trainers_are_given_the_same_and_end_as_one_does(server_runs, name, parallel):
    expected_report = assert_told_alike(server_runs, f"none/{name}", f"{parallel}/{name}")
    if name == "environment":
        assert any(EOS in ids[:-1] for step in expected_report["given"] for _, ids, *_ in step)  # a second turn
    first, second = (read_metrics(server_runs / kind / name) for kind in ("none", parallel))
    for row, other_row in zip(first, second, strict=True):
        keys = {k for k in row if "time" not in k and "per_second" not in k}
        for key in keys - {"tokens/trained"}:  # of prompts that both compute
            assert other_row[key] == pytest.approx(row[key], rel=1e-5, abs=2e-6), key
    assert not (server_runs / parallel / name / ".vllm").exists()


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize(("name", "message"), [
    ("refuses", "of the vLLM server http://.* answers 500"),
    ("is not there", "no vLLM server answers at http://.*:1: "),
])  # fmt: skip
def test_an_error_of_the_first_process_ends_all(server_runs, parallel, name, message):
    first, second = ((server_runs / f"{parallel}, {name}, {rank}").read_text() for rank in (0, 1))
    assert second == f"process 0 of 2: {first}"
    with pytest.raises(UserError, match=message):
        raise UserError(first)


def train_with_engines(settings, folder):
    for parallel in KINDS:
        train_and_tell(settings, folder / parallel, parallel, sleeps=True)
        adapted = merged(settings, {"model": {"lora": LORA}})
        train_and_tell(adapted, folder / f"{parallel}, adapters", parallel, sleeps=True)
    # the second process has nothing to answer, and takes part in gathering
    one_prompt = {"max_steps": 1, "rollout": {"prompts_per_step": 1}, "task": {"test_size": 1}}
    train_and_tell(merged(settings, one_prompt), folder / "one prompt", "fsdp2", sleeps=True)


@pytest.fixture(scope="module")
def engine_runs(tmp_path_factory, vllm_settings):
    """Run directories: of one process that cannot sleep, and of two, under both kinds, that can."""
    folder = tmp_path_factory.mktemp("runs")
    run_on_ranks(folder, train_with_engines, vllm_settings, folder)
    train_and_tell(vllm_settings, folder / "none", sleeps=False)
    train_and_tell(merged(vllm_settings, {"model": {"lora": LORA}}), folder / "none, adapters", sleeps=False)
    return folder


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("kind", ["", ", adapters"])
def test_each_process_has_an_engine_and_all_end_as_one_does(engine_runs, parallel, kind):
    none = f"none{kind}"
    parallel = f"{parallel}{kind}"
    assert assert_told_alike(engine_runs, none, parallel)["backend"] is None
    assert {told(engine_runs, parallel, rank)["backend"] for rank in (0, 1)} == {"external_launcher"}


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_engine_sleeps_through_the_update(engine_runs, parallel, rank):
    """It wakes in parts: there is no cache yet while weights are gathered."""
    woken = ["wake weights", "load without a cache", "wake kv_cache", "generate"]
    step = ["sleep 2", "update", *woken]
    saving = ["sleep 2"] if parallel == "fsdp2" else []  # the model has to be gathered
    assert told(engine_runs, parallel, rank)["events"] == ["load", "generate", *step, *step, *saving]
    assert told(engine_runs, "none")["events"] == ["load", "generate", *["update", "load", "generate"] * 2]


def test_the_weights_that_went_to_vllm_are_counted(engine_runs):
    weights = sum(w.nbytes for w in load_file(engine_runs / "none" / "weights.safetensors").values())
    for kind, engines in (("none", 1), ("ddp", 2), ("fsdp2", 2)):
        rows = read_metrics(engine_runs / kind)
        assert [row["total/weight_bytes"] for row in rows] == [engines * n * weights for n in (1, 1, 3)], kind


def test_sharded_weights_go_from_the_shards_to_vllm(engine_runs):
    """The copy for generation has no memory from the first answers on, until the model is saved."""
    weights = sum(w.nbytes for w in load_file(engine_runs / "none" / "weights.safetensors").values())
    for kind in "", ", adapters":
        assert told(engine_runs, f"fsdp2{kind}")["held"] == told(engine_runs, f"fsdp2{kind}", 1)["held"] == [0, 0]
        assert told(engine_runs, f"ddp{kind}")["held"] == [weights, weights]
    saved = load_file(engine_runs / "fsdp2, adapters" / "model" / "model.safetensors")
    trained = load_file(engine_runs / "fsdp2, adapters" / "weights.safetensors")
    assert saved and all(torch.equal(saved[name], trained[name]) for name in saved)
    without = ["load", "sleep 2", "update", "wake weights", "load without a cache", "wake kv_cache", "sleep 2"]
    assert told(engine_runs, "one prompt", 1)["events"] == without


def test_layers_are_gathered_one_by_one(tiny_policy):
    """Check also a model whose names differ in a checkpoint."""
    policy = load_policy(ModelConfig(path=str(tiny_policy), device="cpu"))
    expected = {name: weight.clone() for name, weight in checkpoint_weights(policy.inference_model)}
    policy.inference_model = copy.deepcopy(policy.inference_model)
    calls = []

    def revert(model, state):
        calls.append(list(state))
        return {f"there.{name}": weight for name, weight in state.items()}

    with patch("transformers.core_model_loading.revert_weight_conversion", revert):
        streamed = dict(policy.stream_checkpoint())
    assert_equal(streamed, {f"there.{name}": weight for name, weight in expected.items()})
    layers, other_calls = (
        [names for names in calls if ("layers" in names[0]) == in_layers] for in_layers in (True, False)
    )
    assert len(layers) == policy.model.config.num_hidden_layers and all(len(names) == 1 for names in other_calls)
    with pytest.raises(UserError, match="the policy's weights are in shards: .*restore_inference_model"):
        policy.save(tiny_policy / "never")
    policy.streams_weights = True
    policy.restore_inference_model()
    assert_equal(dict(checkpoint_weights(policy.inference_model)), expected)


def test_drafts_come_from_the_accelerators_history(make_config, tmp_path, monkeypatch):
    """Only training drafts: an evaluation has other prompts, which are not drafted."""
    histories = []
    integration = Mock()
    generate_answers = FakeLLM.generate

    def generate(self, *args, **kwargs):
        histories.append(integration.share_history.call_args.args[0])
        return generate_answers(self, *args, **kwargs)

    install(monkeypatch, sleeps=False)
    monkeypatch.setitem(sys.modules, "rlkernels.integrations.vllm", integration)
    monkeypatch.setattr(FakeLLM, "generate", generate)
    drafts = {"enabled": ["drafts"], "drafts": {"max_draft_tokens": 5}}
    config = make_config(max_steps=2, rollout={"engine": "vllm"}, accelerators=drafts)
    history = train(config.model_dump(), tmp_path / "drafts").accelerators[0].history
    proposer = {"method": "custom_class", "model": "rlkernels.integrations.vllm.HistoryProposer"}
    assert FakeLLM.last.options["speculative_config"] == proposer | {"num_speculative_tokens": 5}
    assert histories == [None, history, history, None] and history.stats["tokens"] > 0
    assert integration.share_history.call_args.args == (None,), "let go of at the end"
    row = read_metrics(tmp_path / "drafts")[-1]
    assert row["drafts/tokens_per_step"] == 1 and "drafts/pass_overhead" not in row
    train(make_config(max_steps=1, rollout={"engine": "vllm"}).model_dump(), tmp_path / "plain")
    assert "speculative_config" not in FakeLLM.last.options


@pytest.mark.parametrize("tied", [True, False])
def test_vllm_ties_the_head_as_the_policy_does(tmp_path, monkeypatch, tied):
    """An adapter may have trained the head alone: its base, whose folder vLLM reads, ties it."""
    install(monkeypatch, sleeps=False)
    InProcess(make("Qwen2", tie_word_embeddings=tied), tmp_path, memory_bytes=1)
    assert FakeLLM.last.options["hf_overrides"] == {"tie_word_embeddings": tied}


def test_vllm_takes_the_rotary_factors_that_training_takes(tmp_path, monkeypatch):
    """vLLM takes longrope's long factors for all sequences, unless none may exceed the original length."""
    rope = LONGROPE | {"original_max_position_embeddings": 20}
    model = make("Qwen2", vocab_size=64, rope_parameters=rope)
    install(monkeypatch, sleeps=False)
    InProcess(model, tmp_path, memory_bytes=1)
    assert FakeLLM.last.options["max_model_len"] == 20
    with serving() as fake:
        message = f"up to {MAX_LENGTH} tokens, and beyond 20 .* start it with --max-model-len 20"
        with pytest.raises(UserError, match=message):
            Servers(model, [fake.url], tmp_path / "weights")
        fake.settings["max_model_len"] = 20
        assert Servers(model, [fake.url], tmp_path / "weights").max_positions == 20
