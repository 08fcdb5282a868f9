"""Top-k and top-p: sampler and trainer speak of one distribution, so equal weights give probability ratios of 1."""

import io
import math

import pytest
import torch
from conftest import merged, train
from fake_vllm import FakeLLM, install, serving
from paged import engine_for, make, mixed_requests
from rich.console import Console
from sampling_cases import compute_logprobs

from python_trainer.accelerators.rhyme.database import StoredAnswer
from python_trainer.accelerators.rhyme.sampling import Candidate, score_candidates
from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.distributed import RankGroup
from python_trainer.errors import UserError
from python_trainer.loop.parts import make_engine
from python_trainer.model.policy import load_policy
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.rollout.vllm.servers import Server
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels import RolloutHistory

TRUNCATED = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.5},
    "both, colder": {"top_k": 5, "top_p": 0.9, "temperature": 0.7},
}


@pytest.mark.parametrize(("truncated", "mode"), [
    ("top_k", "token_truncate"), ("top_p", "token_mask"), ("top_k", "sequence_truncate"),
    ("both, colder", "sequence_mask"),
])  # fmt: skip
def test_equal_weights_give_ratios_of_1(make_config, tmp_path, truncated, mode):
    rows = {}
    output = io.StringIO()
    for correction in (mode, "none"):
        config = make_config(
            max_steps=1, rollout=TRUNCATED[truncated], algorithm={"importance_sampling": correction},
            accelerators={"enabled": ["drafts"]},
        )  # fmt: skip
        Trainer(config, tmp_path / correction, console=Console(file=output, width=300)).run()
        rows[correction] = read_metrics(tmp_path / correction)[1]
    row = rows[mode]
    assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert row["sampling/logp_difference/max"] < 1e-4
    assert row["grad_norm"] == pytest.approx(rows["none"]["grad_norm"], rel=1e-4) and row["grad_norm"] > 0
    assert "samples from another model" not in output.getvalue()


@pytest.mark.parametrize("truncated", TRUNCATED)
def test_drafts_have_the_same_log_probabilities(truncated):
    model = make()
    requests = mixed_requests()
    sampling = SamplingParams(seed=4, **TRUNCATED[truncated])
    plain = engine_for(model).generate(requests, sampling)
    engine = engine_for(model)
    engine.drafter = Drafter(RolloutHistory(), pass_overhead=1e9)
    for answer in plain:
        engine.drafter.history.add(answer.prompt_ids, answer.response_ids)
    drafted = engine.generate(requests, sampling)
    assert engine.stats["accepted_tokens"] > 0 and [a.ids for a in drafted] == [a.ids for a in plain]
    for answer in drafted:
        context = [*answer.prompt_ids, *answer.response_ids[: answer.prefix_len]]
        assert answer.logprobs == pytest.approx(compute_logprobs(model, context, answer.ids, sampling), abs=1e-4)


@pytest.mark.parametrize("truncated", TRUNCATED)
def test_stored_answers_weigh_1_under_the_policy_that_wrote_them(make_config, tmp_path, truncated):
    trainer = Trainer(make_config(rollout=TRUNCATED[truncated]), tmp_path / "run", console=Console(quiet=True))
    candidates = []
    for answer in trainer.generate(trainer.prompts.groups([0, 1, 2]), seed=1):
        facts = (0, 1, "key", "", True, 1.0, "")
        stored = StoredAnswer(*facts, torch.tensor(answer.response_ids), torch.tensor(answer.logprobs))
        candidates.append(Candidate(stored, 0, answer.prompt_ids, 1.0))
    score_candidates(trainer.run_context, candidates)
    for candidate in candidates:
        torch.testing.assert_close(candidate.logprobs, candidate.answer.logprobs, rtol=0, atol=1e-4)
        assert candidate.weight == pytest.approx(1, abs=1e-4)  # truncated at 1


# vLLM has log-probabilities after top-k and top-p, or raw ones, at temperature 1: v1/sample/sampler.py of vLLM 0.32
MODES = [
    ({}, "processed_logprobs"),
    ({"temperature": 0.7}, "processed_logprobs"),
    ({"top_k": 2}, "raw_logprobs"),
    ({"top_p": 0.5}, "raw_logprobs"),
]


@pytest.mark.parametrize(("rollout", "mode"), MODES)
def test_vllm_is_made_to_tell_those_of_the_whole_distribution(make_config, tmp_path, monkeypatch, rollout, mode):
    """Check vLLM in the trainer's process and on a server; other settings, as of an evaluation, may lack them."""
    install(monkeypatch, sleeps=False)
    config = make_config(rollout={"engine": "vllm", **rollout})
    assert config.algorithm.with_sampler("vllm").importance_sampling == "token_truncate"
    policy = load_policy(config.model)
    engine = make_engine(config, policy, tmp_path, RankGroup())
    assert FakeLLM.last.options["logprobs_mode"] == mode
    sampling = SamplingParams(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
    request = Request([1, 2], num_generations=2)
    assert all(x < 0 for answer in engine.generate([request], sampling) for x in answer.logprobs)
    other_sampling = SamplingParams(0.3, top_k=3)
    assert all(math.isnan(x) for answer in engine.generate([request], other_sampling) for x in answer.logprobs)
    with serving() as fake:
        for server_mode in ("processed_logprobs", "raw_logprobs"):
            fake.settings["logprobs_mode"] = server_mode
            if server_mode == mode:
                Server(policy.model, fake.url, config.rollout)
            else:
                with pytest.raises(UserError, match=f"gives {server_mode}, .*start it with: .*--logprobs-mode {mode}"):
                    Server(policy.model, fake.url, config.rollout)


NEITHER = {"top_k": 2, "temperature": 0.7}
REASON = "vLLM has log-probabilities of the tokens that .*set rollout.temperature=1, or top_p=1 and top_k=0, or .*paged"


@pytest.mark.parametrize("vllm", [{"engine": "vllm"}, {"vllm_server": "http://localhost:1"}])
def test_what_vllm_cannot_tell_is_refused_with_what_to_set(tmp_path, vllm):
    settings = {"rollout": NEITHER | vllm}
    for correction in ("auto", "token_truncate", "sequence_mask"):
        with pytest.raises(UserError, match=f"importance_sampling must be none, got {correction}: {REASON}"):
            load_config(merged(settings, {"algorithm": {"importance_sampling": correction}}))
    settings["algorithm"] = {"importance_sampling": "none"}
    assert load_config(settings).rollout.hidden_logprobs
    for accelerators in ({"enabled": ["rhyme"]}, {"rhyme": {"database": str(tmp_path / "history.db")}}):
        with pytest.raises(UserError, match=f"rhyme, and its database, store log-probabilities: {REASON}"):
            load_config(settings | {"accelerators": accelerators})


def test_a_run_without_log_probabilities_has_no_metrics_of_them(make_config, tmp_path, monkeypatch):
    install(monkeypatch, sleeps=False)
    config = make_config(max_steps=1, rollout={"engine": "vllm", **NEITHER}, algorithm={"importance_sampling": "none"})
    train(config, tmp_path / "run")
    row = read_metrics(tmp_path / "run")[1]
    assert row["grad_norm"] > 0 and not any(name.startswith("sampling/") or name == "entropy" for name in row)


@pytest.mark.parametrize("section", ["rollout", "evaluation"])
def test_a_temperature_that_vllm_would_raise_is_refused(section):
    """Its sampler would draw at 0.01, and the update would use the lower one: VLLM's _MAX_TEMP."""
    settings = {section: {"temperature": 0.005}}
    assert load_config(settings)
    with pytest.raises(UserError, match=f"{section}.temperature must be at least 0.01 with vLLM.*, got 0.005"):
        load_config(merged(settings, {"rollout": {"engine": "vllm"}}))
    assert RolloutConfig(engine="vllm", temperature=0.01) and load_config(
        {"rollout": {"engine": "vllm"}, "evaluation": {"temperature": 0}}
    )
