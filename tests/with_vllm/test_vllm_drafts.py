"""The accelerator drafts with vLLM in the trainer's process."""

import pytest
import torch
from rich.console import Console
from rollouts import EOS, GREEDY, MEMORY, PROMPTS, SAMPLINGS, count_since, load, run_settings, train
from sampling_cases import compute_logprobs

from python_trainer.config import load_config
from python_trainer.data import Request
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.vllm.engine import InProcess, VLLMEngine
from python_trainer.run.directory import read_metrics
from python_trainer.trainer import Trainer
from rlkernels import RolloutHistory


@pytest.fixture(scope="module")
def plain(folder):
    """Return vLLM's backend without drafts; made first, since vLLM counts for the newest engine of a process."""
    return InProcess(load(folder), folder, memory_bytes=MEMORY)


@pytest.fixture(scope="module")
def drafting(folder, plain):
    """Return vLLM's backend as the accelerator drafts needs it."""
    return InProcess(load(folder), folder, memory_bytes=MEMORY, longest_draft=8)


def test_drafts_change_no_greedy_token(drafting, model):
    engine = VLLMEngine(model, drafting, eos_token_ids=[EOS])
    requests = [Request(prompt, max_new_tokens=30) for prompt in PROMPTS]
    plain = engine.generate(requests, GREEDY)
    assert engine.stats["draft_tokens"] == 0 and engine.stats["sample_steps"] == engine.stats["generated_tokens"]
    engine.drafter = Drafter(RolloutHistory(), max_tokens=8, pass_overhead=None)
    for interval in (31, 7):  # every so many tokens
        for request, answer in zip(requests, plain, strict=True):
            ids = [(token + (i % interval == interval - 1)) % EOS for i, token in enumerate(answer.ids)]
            engine.drafter.history.add(request.prompt_ids, ids)
        old_stats = engine.stats
        assert list(map(vars, engine.generate(requests, GREEDY))) == list(map(vars, plain))
        counts = count_since(engine, old_stats)
        assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
        assert 0 < counts["draft_steps"] <= counts["sample_steps"]
        assert interval == 7 or counts["sample_steps"] < 0.5 * counts["generated_tokens"]
        engine.drafter = Drafter(RolloutHistory(), max_tokens=8, pass_overhead=None)


@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SamplingParams(temperature=0.3, seed=4)])
def test_logprobs_of_verified_tokens_are_those_of_the_model(plain, drafting, model, sampling):
    """Accepted or drawn in place of a draft; and what is not drafted is drawn as by an engine that cannot draft."""
    engine = VLLMEngine(model, drafting, eos_token_ids=[EOS])
    prefix = list(range(8))
    requests = [Request(prompt, prefix, 3, 20, sample_id=10 * i) for i, prompt in enumerate(PROMPTS)]
    drafting_answers = engine.generate(requests, sampling)
    plain_answers = VLLMEngine(model, plain, eos_token_ids=[EOS]).generate(requests, sampling)
    assert [c.ids for c in drafting_answers] == [c.ids for c in plain_answers]
    engine.drafter = Drafter(RolloutHistory(), max_tokens=8, pass_overhead=None)
    for i, answer in enumerate(drafting_answers):
        engine.drafter.history.add(PROMPTS[i // 3], answer.response_ids)
    old_stats = engine.stats
    for i, completion in enumerate(engine.generate(requests, sampling)):
        expected = compute_logprobs(model, [*PROMPTS[i // 3], *prefix], completion.ids, sampling)
        assert completion.logprobs == pytest.approx(expected, abs=2e-4)
    counts = count_since(engine, old_stats)
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]


def test_drafts_keep_the_distribution(drafting, model):
    """Chi-square of the second token of 2,000 samples whose drafts are often wrong, against the model's own."""
    engine = VLLMEngine(model, drafting, eos_token_ids=[])
    prompt = PROMPTS[1]
    sampling = SamplingParams(temperature=0.5, seed=7)
    with torch.no_grad():
        first_probs = (model(torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
        pairs = torch.cat([torch.tensor([prompt]).repeat(64, 1), torch.arange(64)[:, None]], 1)
        second_probs = (model(pairs).logits[:, -1] / 0.5).softmax(-1)
    engine.drafter = Drafter(RolloutHistory(), max_tokens=8, pass_overhead=None)
    for token, next_tokens in enumerate(second_probs.argsort(-1, descending=True)[:, :2].tolist()):
        engine.drafter.history.add(prompt, [token, next_tokens[token % 2], 0])
    old_stats = engine.stats
    answers = engine.generate([Request(prompt, (), 2000, 3)], sampling)
    counts = count_since(engine, old_stats)
    assert 100 < counts["accepted_tokens"] < 0.9 * counts["draft_tokens"]
    expected = first_probs @ second_probs * len(answers)
    counted = torch.tensor([answer.ids[1] for answer in answers]).bincount(minlength=64)
    frequent = expected > 8
    expected = torch.cat([expected[frequent], expected[~frequent].sum()[None]]).double()
    counted = torch.cat([counted[frequent], counted[~frequent].sum()[None]]).double()
    chi2 = ((counted - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(counted) - 1.0, dtype=torch.float64)
    assert freedom > 4 and torch.special.gammaincc(freedom / 2, chi2 / 2) > 1e-3  # the p-value


def draft_settings(folder, path, **accelerator):
    settings = run_settings(folder, path, temperature=0.5)
    settings["accelerators"] = {"enabled": ["drafts"], "drafts": accelerator}
    return settings


def test_training_with_drafts(folder, tmp_path):
    """Every step is an epoch: from the second one on there are drafts. A resumed run repeats, drafts included."""
    settings = draft_settings(folder, tmp_path)
    rows = train(settings, tmp_path / "run")[1:]
    plain = train(settings | {"accelerators": {"enabled": []}}, tmp_path / "plain")[1:]
    assert rows[0]["drafts/offered_tokens"] == 0 and rows[0]["drafts/tokens_per_step"] == 1
    for name in ("reward", "tokens/generated"):
        assert rows[0][name] == plain[0][name], name  # nothing is drafted that would change what is drawn
    assert rows[0]["loss"] == pytest.approx(plain[0]["loss"], rel=1e-6)  # vLLM's log-probabilities may round otherwise
    for row in rows[1:]:
        assert 0 < row["drafts/accepted_tokens"] < row["drafts/offered_tokens"]
        assert 0 < row["drafts/off_share"] < 1 < row["drafts/tokens_per_step"]
    half_config = load_config(settings | {"max_steps": 2, "save": {"save_steps": 2}})
    Trainer(half_config, tmp_path / "half", console=Console(quiet=True)).run()
    full_config = load_config(settings)
    Trainer(full_config, tmp_path / "half", resume=True, console=Console(quiet=True)).run()
    resumed_rows = read_metrics(tmp_path / "half")[1:]
    for name in ("reward", "loss", "tokens/generated", *(key for key in rows[0] if key.startswith("drafts/"))):
        assert [row[name] for row in resumed_rows] == [row[name] for row in rows], name


def test_several_trainers_with_drafts(folder, gloo, tmp_path):
    """Each engine drafts from the answers of all."""
    gloo.run_on_ranks(tmp_path, gloo.train, draft_settings(folder, tmp_path), tmp_path / "two", "ddp")
    rows = read_metrics(tmp_path / "two")[1:]
    assert rows[0]["drafts/offered_tokens"] == 0 and min(row["drafts/accepted_tokens"] for row in rows[1:]) > 0
    assert max(row["sampling/logp_difference/max"] for row in rows) < 1e-3
