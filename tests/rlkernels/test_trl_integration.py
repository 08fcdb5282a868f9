"""Suffix rollouts and gated extrapolation inside TRL's own GRPOTrainer, on a tiny random model."""

import re
import runpy
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import transformers
from support import ROOT, assert_equal
from tiny import LENIENT, copy_weights, digits, grpo_trainer, save_letters, save_tiny_policy

from rlkernels import RolloutHistory

MAX_TOKENS = 8
NUM_GENERATIONS = 4
EOS = 63


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=64)


@pytest.fixture
def make_trainer(trl_integration, policy, tmp_path):
    def make(reward=digits, steps=3, settings=(), **parts):
        settings = {"per_device_train_batch_size": 2 * NUM_GENERATIONS, "max_completion_length": MAX_TOKENS,
                    "max_steps": steps, "gradient_checkpointing": False, **dict(settings)}  # fmt: skip
        return grpo_trainer(tmp_path, policy, ["ABC", "DE"], reward, settings, **parts)

    return make


def test_answers_are_finished_and_only_their_end_is_trained(trl_integration, make_trainer, monkeypatch):
    suffixes = trl_integration.SuffixRollouts(right=-1.0)  # every answer that ends
    suffixes.answers = {"ABC": [1, 2, 3, 4, 5, EOS]}
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes)
    generations = []
    batches = []
    generate = suffixes._generate
    loss = trainer._compute_loss

    def spy(trainer, rows, *limits):
        suffixes_ids, logprobs = generate(trainer, rows, *limits)
        generations.append((rows, suffixes_ids))
        return suffixes_ids, logprobs

    monkeypatch.setattr(suffixes, "_generate", spy)
    monkeypatch.setattr(trainer, "_compute_loss", lambda model, inputs: batches.append(inputs) or loss(model, inputs))
    start_weights = copy_weights(trainer)
    trainer.train()
    assert any(not torch.equal(p, start_weights[name]) for name, p in trainer.model.named_parameters())
    assert len(generations) == len(batches) == 3

    prompt_ids, suffixes_ids = generations[0]
    beginnings = {len(ids) - 3: ids for ids in prompt_ids if ids[:3] == [17, 18, 19]}  # "ABC"
    (length,) = beginnings  # the group shares its cut
    assert beginnings[length] == [17, 18, 19, *[1, 2, 3, 4, 5, EOS][:length]]
    assert suffixes.beginning("ABC", 0, 3) == []  # longer than answers may be now
    batch = batches[0]
    trained = batch["completion_mask"] * batch["tool_mask"]
    rows = {tuple(ids) for ids in batch["completion_ids"].tolist()}
    for beginning, ids in zip(prompt_ids, suffixes_ids):
        beginning = beginning[3:] if beginning[:3] == [17, 18, 19] else []
        answer = (beginning + ids)[:MAX_TOKENS]
        row = next(i for i, r in enumerate(batch["completion_ids"].tolist()) if r[: len(answer)] == answer)
        assert trained[row].sum() == len(answer) - len(beginning) and trained[row, : len(beginning)].sum() == 0
    assert len(rows) > 1 and suffixes._step == 2


def test_only_right_whole_answers_are_remembered(trl_integration):
    suffixes = trl_integration.SuffixRollouts()
    suffixes._step = 0
    suffixes._ends = frozenset({EOS})
    ids = [[1, EOS], [2, EOS], [3, 3], [4, EOS], []]
    watched = suffixes.watch(lambda prompts, completion_ids, gold: gold)
    chat = [{"role": "user", "content": "hi"}]
    prompts = ["a", "a", "a", chat, "b"]
    assert watched(prompts=prompts, completion_ids=ids, gold=[0.0, 1.0, 1.0, 1.0, None]) == [0.0, 1.0, 1.0, 1.0, None]
    assert list(suffixes.answers.values()) == [[2, EOS], [4, EOS]]
    assert suffixes.beginning(chat, 5, 8) == [4] or suffixes.beginning(chat, 5, 8) == []
    cuts = {len(suffixes.beginning("a", step, 8)) for step in range(20)}
    assert cuts == {0, 1}
    suffixes._step = None  # evaluation
    watched(prompts=["c"], completion_ids=[[1, EOS]], gold=[1.0])
    assert "c" not in suffixes.answers


def scored(suffixes, step, prompts, rewards, size=NUM_GENERATIONS):
    """Let suffix rollouts see a step of finished answers with these rewards, ``size`` for each prompt."""
    suffixes._step, suffixes._ends = step, frozenset({EOS})
    ids = [[10 + i, 20, EOS] for i in range(len(rewards))]
    rows = [prompt for prompt in prompts for _ in range(size)]
    suffixes.watch(lambda prompts, completion_ids: rewards)(prompts=rows, completion_ids=ids)


def test_a_quarter_of_the_groups_is_whole(trl_integration):
    suffixes = trl_integration.SuffixRollouts()
    suffixes.answers = {str(i): [1] * 10 for i in range(2000)}
    whole = sum(not suffixes.beginning(str(i), 3, MAX_TOKENS + 2) for i in range(2000)) / 2000
    assert whole == pytest.approx(0.25 + 0.75 / 9, abs=0.04)  # the whole answer is one of the 9 cuts (2 to 10 tokens)
    shortest = {len(suffixes.beginning(str(i), 3, MAX_TOKENS + 2)) for i in range(2000)}
    assert shortest == set(range(9)), "at least a fifth of an answer is generated anew"


def test_the_best_answer_is_remembered_half_of_the_time(trl_integration):
    chosen = []
    for seed in range(400):
        suffixes = trl_integration.SuffixRollouts(right=0.1, seed=seed)
        scored(suffixes, 1, ["a"], [0.2, 0.9, 0.0, float("nan")])
        chosen.append(suffixes.answers["a"][0])
    assert set(chosen) == {10, 11} and 0.4 < chosen.count(11) / 400 < 0.6  # four deviations


def test_cuts_end_where_whole_answers_fall(make_trainer, trl_integration, caplog):
    suffixes = trl_integration.SuffixRollouts()
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes, steps=1)
    suffixes.answers = {"ABC": [1, 2, 3, 4, 5, EOS]}
    trainer.model.train()
    for step in range(33):
        trainer.state.global_step = step
        suffixes(["ABC"] * NUM_GENERATIONS, trainer)
        good = 0.8 if step < 16 else 0.2
        generator = torch.Generator().manual_seed(step)
        scored(suffixes, step, list(map(str, range(16))), (torch.rand(64, generator=generator) < good).tolist())
        if step == 16:
            assert not caplog.records and any(suffixes.beginning("ABC", i, MAX_TOKENS) for i in range(9))
    assert not any(suffixes.beginning("ABC", i, MAX_TOKENS) for i in range(99))
    (message,) = [record.getMessage() for record in caplog.records if "whole answers" in record.getMessage()]
    assert message.startswith("SuffixRollouts: whole answers fell from 0.") and "whole from now on" in message


@pytest.mark.parametrize("messages", [False, True])
def test_a_new_prompt_is_answered_as_by_trl_alone(trl_integration, make_trainer, messages):
    suffixes = trl_integration.SuffixRollouts()
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes)
    trainer.processing_class.chat_template = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
    prompts = [p for p in ("ABC", "DE") for _ in range(NUM_GENERATIONS)]
    if messages:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    trainer.eos_token_ids = list(range(32))  # so that answers are cut
    ids, _, _ = trainer._tokenize_prompts(prompts)
    torch.manual_seed(2)
    expected, _ = trainer._generate_single_turn(ids, None, {}, NUM_GENERATIONS)
    torch.manual_seed(2)
    result = suffixes(prompts, trainer)
    assert result["prompt_ids"] == ids and result["completion_ids"] == expected and result["logprobs"] is None
    assert min(map(len, expected)) < MAX_TOKENS


def test_beginnings_are_continued_by_the_vllm_of_trl(trl_integration, make_trainer, caplog):
    """A stand-in replaces ``vllm_generation``, with TRL's arguments and results."""
    suffixes = trl_integration.SuffixRollouts(seed=1, whole_share=0)
    suffixes.answers = {"ABC": [1, 2, 3, 4, EOS]}
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes)
    trainer.use_vllm = True
    trainer.vllm_generation = Mock(spec=["generate"])
    generate = trainer.vllm_generation.generate
    generate.return_value = [], [[7, EOS]] * NUM_GENERATIONS, [[[-0.5], [-0.25]]] * NUM_GENERATIONS, None
    trainer.model.train()
    trainer.state.global_step = 3
    result = suffixes(["ABC"] * NUM_GENERATIONS, trainer)
    beginning = suffixes.beginning("ABC", 3, MAX_TOKENS)
    generate.assert_called_once_with(
        prompts=[[17, 18, 19, *beginning]] * NUM_GENERATIONS, images=None, num_generations=NUM_GENERATIONS
    )
    assert beginning
    assert result["completion_ids"] == [[*beginning, 7, EOS]] * NUM_GENERATIONS
    assert result["logprobs"] == [[*[0.0] * len(beginning), -0.5, -0.25]] * NUM_GENERATIONS
    assert not caplog.records
    generate.return_value = [], [[7] * MAX_TOKENS] * NUM_GENERATIONS, [[[-0.5]] * MAX_TOKENS] * NUM_GENERATIONS, None
    results = [suffixes(["ABC"] * NUM_GENERATIONS, trainer) for _ in range(2)]
    for result in results:
        assert {*map(len, result["completion_ids"])} == {*map(len, result["logprobs"])} == {MAX_TOKENS}
    (message,) = [record.getMessage() for record in caplog.records]
    surplus = NUM_GENERATIONS * len(beginning)
    assert message.startswith(f"SuffixRollouts: {surplus} tokens behind prefixes passed max_completion_length 8 and")


def test_continued_answers_stay_within_the_context(trl_integration, tmp_path):
    """GPT-2 fails beyond it; TRL's answers to the longest prompt just fit."""
    config = {"n_positions": 3 + MAX_TOKENS, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": EOS}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, bos_token_id=None, **config))
    model.save_pretrained(tmp_path / "policy")
    save_letters(tmp_path / "policy")
    suffixes = trl_integration.SuffixRollouts(whole_share=0)
    suffixes.answers = {"ABC": [*range(MAX_TOKENS - 1), EOS], "DE": [*range(3), EOS]}
    settings = {"per_device_train_batch_size": 2 * NUM_GENERATIONS, "max_completion_length": MAX_TOKENS}
    reward = suffixes.watch(digits)
    trainer = grpo_trainer(tmp_path, tmp_path / "policy", ["ABC", "DE"], reward, settings, rollout_func=suffixes)
    trainer.model.train()
    prompts = ["ABC"] * NUM_GENERATIONS + ["DE"] * NUM_GENERATIONS
    for step in range(4):
        trainer.state.global_step = step
        for prompt, ids in zip(prompts, suffixes(prompts, trainer)["completion_ids"]):
            beginning = suffixes.beginning(prompt, step, MAX_TOKENS)
            assert ids[: len(beginning)] == beginning and (len(ids) == MAX_TOKENS or ids[-1] == EOS)


@pytest.mark.parametrize(("context", "calls"), [(64, 1), (MAX_TOKENS + 3, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_each_length_of_beginnings_is_a_call_in_a_short_context(
    trl_integration, make_trainer, monkeypatch, context, sharded, calls
):
    suffixes = trl_integration.SuffixRollouts(whole_share=0)
    suffixes.answers = {"ABC": [1, 2, 3, 4, 5, 6, EOS]}
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes)
    trainer.is_fsdp_enabled = sharded
    trainer.model.config.max_position_embeddings = context
    trainer.model.train()
    generate = trainer.model.generate
    limits = []

    def note_limit(generation_config, **inputs):
        limits.append(generation_config.max_new_tokens)
        return generate(generation_config=generation_config, **inputs)

    monkeypatch.setattr(trainer.model, "generate", note_limit)
    output = suffixes(["ABC"] * NUM_GENERATIONS + ["DE"] * NUM_GENERATIONS, trainer)
    length = len(suffixes.beginning("ABC", 0, MAX_TOKENS))
    assert length and max(map(len, output["completion_ids"])) == MAX_TOKENS
    assert limits == [MAX_TOKENS, MAX_TOKENS - length][:calls]


def test_a_history_of_all_answers_is_written(trl_integration, make_trainer, tmp_path):
    """The proposer for vLLM finds prompts and answers as token ids, passes over the data as epochs."""
    path = tmp_path / "new" / "history.bin"
    rewarded = []  # a run must not end where it first writes

    def reward(prompts, completion_ids, **columns):
        rewarded.extend(zip(prompts, completion_ids))
        return digits(prompts, [], completion_ids)

    for steps in (2, 4):  # the second run goes on with the file of the first
        recorder = trl_integration.HistoryRecorder(path, every=3)
        make_trainer(recorder.watch(reward), steps=2, callbacks=[recorder]).train()
        history = RolloutHistory.load(path)
        assert history.stats["rollouts"] == steps * 2 * NUM_GENERATIONS == len(rewarded)
        assert history.stats["tokens"] == sum(len(ids) for _, ids in rewarded)
        assert history.stats["newest_epoch"] == steps - 1  # a step passes over both prompts; new answers weigh more
    prompts = {"ABC": [17, 18, 19], "DE": [20, 21]}
    assert all(history.longest_prompt([*ids, 1]) == len(ids) for ids in prompts.values())
    for prompt, answer in rewarded[-2 * NUM_GENERATIONS :]:
        handle = history.track(prompts[prompt])
        history.extend(handle, answer[:-1])
        if len(answer) == MAX_TOKENS:  # known from its start: what comes next is what came then
            assert history.draft_tracked([handle], max_tokens=1)[0].tolist() == [answer[-1:]]
    with pytest.raises(ValueError, match=r"callbacks must hold the HistoryRecorder whose watch\(reward\)"):
        make_trainer(trl_integration.HistoryRecorder(path).watch(reward)).train()

    async def later(**columns):
        return []

    with pytest.raises(TypeError, match="reward must be a plain function"):
        recorder.watch(later)


class Judge:
    async def __call__(self, **columns):
        return []


@pytest.mark.parametrize("reward", [Judge(), partial(Judge(), gold=1)], ids=["object", "partial"])
def test_async_objects_are_refused(trl_integration, tmp_path, reward):
    for part in (trl_integration.HistoryRecorder(tmp_path / "history.bin"), trl_integration.SuffixRollouts()):
        with pytest.raises(TypeError, match="reward must be a plain function, got .*, which is async"):
            part.watch(reward)


def test_rewards_that_can_be_read_once_and_columns_of_any_name(trl_integration, tmp_path):
    suffixes, recorder = trl_integration.SuffixRollouts(), trl_integration.HistoryRecorder(tmp_path / "history.bin")
    suffixes._step, suffixes._ends = 0, frozenset({EOS})
    recorder._tokenize, recorder._model = lambda prompts: [[17]] * len(prompts), SimpleNamespace(training=True)

    def reward(prompts, completion_ids, values, **columns):
        return map(float, values)

    watched = recorder.watch(suffixes.watch(reward))
    columns = {"trainer_state": SimpleNamespace(epoch=0.0), "values": ["1", "0"], "self": [1, 2]}
    assert watched(prompts=["A", "B"], completion_ids=[[1, EOS], [2, EOS]], **columns) == [1.0, 0.0]
    assert suffixes.answers == {"A": [1, EOS]}
    assert recorder._new == [([17], [1, EOS], 1.0, 0), ([17], [2, EOS], 0.0, 0)]


def test_a_history_that_cannot_be_written_waits(trl_integration, make_trainer, tmp_path, caplog):
    path = tmp_path / "history.bin"
    recorder = trl_integration.HistoryRecorder(path, every=1)
    path.mkdir()
    make_trainer(recorder.watch(digits), steps=2, callbacks=[recorder]).train()
    assert f"the history {path} was not written" in caplog.text
    path.rmdir()
    recorder._write()
    assert RolloutHistory.load(path).stats["rollouts"] == 2 * 2 * NUM_GENERATIONS


@pytest.mark.parametrize("same", [True, False], ids=["same recorder", "new recorder"])
@pytest.mark.parametrize("second", [(3, True, 9), (2, None, 10)], ids=["resumed", "new run"])
def test_a_run_goes_on_in_its_epochs(trl_integration, make_trainer, tmp_path, same, second):
    path = tmp_path / "history.bin"
    stored = RolloutHistory()
    stored.add([1], [2], epoch=6)
    stored.save(path)
    recorder = trl_integration.HistoryRecorder(path)
    for steps, resume, newest in ((2, None, 8), second):
        trainer = make_trainer(recorder.watch(digits), steps, callbacks=[recorder])
        trainer.args.set_save(steps=2)
        trainer.train(resume_from_checkpoint=resume)
        assert RolloutHistory.load(path).stats["newest_epoch"] == newest
        recorder = recorder if same else trl_integration.HistoryRecorder(path)


def test_any_rewards_of_trl_are_recorded(trl_integration, make_trainer, tmp_path):
    """Rewards of an evaluation, which may come before training, are not."""
    rewards = [True, False, None, float("nan"), torch.tensor(0.5), 1, 0.25, torch.tensor(True)]
    recorder = trl_integration.HistoryRecorder(tmp_path / "history.bin")
    recorder.history = Mock()
    trainer = make_trainer(recorder.watch(lambda **columns: rewards), steps=1, callbacks=[recorder])
    trainer.evaluate(trainer.train_dataset)
    trainer.train()
    added = [call.kwargs["reward"] for call in recorder.history.add.call_args_list]
    assert added == [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.25, 1.0] and set(map(type, added)) == {float}


def test_evaluation_answers_from_the_start(trl_integration, make_trainer):
    suffixes = trl_integration.SuffixRollouts()
    suffixes.answers = {"ABC": [1, 2, 3, EOS], "DE": [1, 2, 3, 4, 5, EOS]}
    trainer = make_trainer(suffixes.watch(digits), rollout_func=suffixes, settings={"num_generations_eval": 2})
    trainer.model.eval()
    out = suffixes(["ABC"] * 2 + ["DE"] * 2, trainer)
    assert suffixes.continued == 0 and all(all(mask) for mask in out["env_mask"])
    assert len(suffixes(["ABC"], trainer)["completion_ids"]) == 1  # a group over two processes
    trainer.model.train()
    suffixes(["ABC"] * NUM_GENERATIONS, trainer)
    assert suffixes.continued in (0, NUM_GENERATIONS)
    with pytest.raises(ValueError, match="whole groups of 4 answers"):
        suffixes(["ABC"] * 2 + ["DE"] * 2, trainer)


def test_an_accepted_jump_stays(trl_integration, make_trainer, monkeypatch):
    evaluated = []

    def evaluate(model, rows):
        assert not model.training and not torch.is_grad_enabled() and rows == range(10)  # decided by the first eighth
        evaluated.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return [float(len(evaluated) > 2)] * 10  # the first candidate is no better, the second is

    settings = {"track_steps": 1, "first_step": 4, "every": 100, "predictor": "full", "limits": LENIENT}
    callback = trl_integration.GatedExtrapolation(evaluate, 80, **settings)
    trainer = make_trainer(callbacks=[callback], steps=4)
    base = copy_weights(trainer)
    trainer.train()
    (event,) = callback.events
    assert event["step"] == 4 and event["accepted"] and [t["factor"] for t in event["tries"]] == [1.0, 0.5]
    present, first, second = evaluated
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(first[name], base[name] + 2 * (present[name] - base[name]))  # twice the steps
    torch.testing.assert_close(second[name], base[name] + 1.5 * (present[name] - base[name]))
    assert_equal(copy_weights(trainer), second)
    assert torch.equal(present["model.embed_tokens.weight"], second["model.embed_tokens.weight"])
    optimizer_state = trainer.optimizer.state[trainer.model.get_parameter(name)]
    assert optimizer_state["exp_avg"].abs().sum() == 0 and optimizer_state["exp_avg_sq"].sum() > 0
    assert len(callback.extrapolator.trajectory) == 0


def test_experts_of_a_mixture_are_followed(trl_integration):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    config = transformers.Qwen3MoeConfig(vocab_size=16, **sizes, num_experts=4, moe_intermediate_size=6)
    model = transformers.Qwen3MoeForCausalLM(config)
    callback = trl_integration.GatedExtrapolation(print, 80)
    arguments = SimpleNamespace(logging_strategy="steps", lr_scheduler_type="constant")
    state = transformers.TrainerState(logging_steps=1)
    callback.on_train_begin(arguments, state, None, model=model)
    shapes = {name: weight.shape for name, weight in callback.extrapolator.trajectory.base.items()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj[3]"] == (12, 8)
    assert len(shapes) == 4 + 1 + 2 * 4, "attention, router, two projections of each expert"


def test_a_refused_jump_leaves_no_trace(trl_integration, make_trainer):
    """Weights and random numbers of later steps do not change."""
    plain = make_trainer(steps=5)
    plain.train()
    random_numbers = []

    def evaluate(model, rows):
        random_numbers.append(torch.rand(3))
        return [1.0, 0.0] * (len(rows) // 2)

    callback = trl_integration.GatedExtrapolation(
        evaluate, 80, track_steps=1, first_step=3, every=2, max_tries=2, limits=LENIENT
    )
    watched = make_trainer(steps=5, callbacks=[callback])
    watched.train()
    assert [(e["step"], e["accepted"], len(e["tries"])) for e in callback.events] == [(3, False, 2), (5, False, 2)]
    assert_equal(random_numbers, [random_numbers[0]] * 6)
    assert_equal(copy_weights(watched), copy_weights(plain))


def test_a_resumed_run_counts_the_attempts_before_its_checkpoint(trl_integration, make_trainer):
    def attempts(steps, resume=None):
        callback = trl_integration.GatedExtrapolation(
            lambda model, rows: [0.0] * len(rows), 80, track_steps=1, first_step=3, every=2, max_tries=1, limits=LENIENT
        )
        trainer = make_trainer(steps=steps, callbacks=[callback])
        trainer.args.set_save(steps=4)
        trainer.train(resume_from_checkpoint=resume)
        return [event["tries"][0]["needed"] for event in callback.events if "tries" in event]

    begun = attempts(4)
    resumed = attempts(10, resume=True)
    assert begun + resumed == attempts(7) and len(begun) == 1


def test_another_run_begins_its_attempts_anew(trl_integration, make_trainer):
    """Its gate goes on."""
    callback = trl_integration.GatedExtrapolation(
        lambda model, rows: [0.0] * len(rows), 80, track_steps=1, first_step=3, every=50, max_tries=1, limits=LENIENT
    )
    for runs in (1, 2):
        make_trainer(steps=3, callbacks=[callback]).train()
        assert [event["step"] for event in callback.events] == [
            3
        ] * runs and callback.extrapolator.gate.comparisons == runs


def test_refusals_are_noted(trl_integration, make_trainer):
    never = Mock()
    callback = trl_integration.GatedExtrapolation(never, 80, track_steps=1, first_step=1)
    make_trainer(steps=2, callbacks=[callback]).train()
    never.assert_not_called()
    assert [e["refused"].split(" (")[0] for e in callback.events] == ["few points"] * 2


@pytest.mark.parametrize(("schedule", "warns"), [("linear", True), ("constant_with_warmup", False)])
def test_a_rate_that_changes_is_noted(trl_integration, make_trainer, caplog, schedule, warns):
    callback = trl_integration.GatedExtrapolation(print, 80)
    make_trainer(steps=1, callbacks=[callback], settings={"lr_scheduler_type": schedule}).train()
    assert ("lr_scheduler_type 'linear' changes the learning rate" in caplog.text) == warns


def test_steps_that_reuse_answers_are_tracked(trl_integration, make_trainer):
    """TRL logs rewards only where it generates."""
    callback = trl_integration.GatedExtrapolation(
        lambda model, rows: [0.0] * len(rows), 80, track_steps=1, first_step=6, max_tries=1, limits=LENIENT
    )
    trainer = make_trainer(steps=6, callbacks=[callback], settings={"num_iterations": 2})
    trainer.train()
    assert sum("reward" in log for log in trainer.state.log_history) == 3
    assert len(callback.extrapolator.trajectory) == 6 and "tries" in callback.events[0]


@pytest.mark.slow
def test_the_example_runs(trl_integration, tmp_path, monkeypatch, capsys):
    """Set limits by which its extrapolation is tried."""
    monkeypatch.chdir(tmp_path)
    lenient = partial(trl_integration.GatedExtrapolation, limits=LENIENT)
    monkeypatch.setattr(trl_integration, "GatedExtrapolation", lenient)
    names = runpy.run_path(str(ROOT / "examples/trl_sums.py"), run_name="__main__")
    printed = capsys.readouterr().out
    accuracy_before, accuracy_after = re.search(r"prompts: (0\.\d\d) before, (\d\.\d\d) after", printed).groups()
    assert 0.4 < float(accuracy_before) < 0.7 and float(accuracy_after) > float(accuracy_before) + 0.1
    assert names["suffixes"].continued > 0 and len(names["suffixes"].answers) > 16
    assert names["extrapolation"].events[0]["tries"] and "'accepted'" in printed
    stored = RolloutHistory.load(tmp_path / "history.bin").stats
    assert stored["rollouts"] == 24 * 64 and stored["prompts"] == len({row["prompt"] for row in names["train"]})


def test_what_the_parts_are_given_is_checked(trl_integration, make_trainer, tmp_path):
    for settings, message in (
        ({"logging_steps": 3}, "logging_steps must divide track_steps 2 .* got 3 with logging_strategy 'steps'"),
        ({"logging_strategy": "epoch"}, "got 1 with logging_strategy 'epoch'"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(callbacks=[trl_integration.GatedExtrapolation(print, 80)], settings=settings).train()
    with pytest.raises(ValueError, match="metric must be one of .*'rewards/digits/mean'.* got 'accuracy'"):
        make_trainer(callbacks=[trl_integration.GatedExtrapolation(print, 80, metric="accuracy")]).train()
    with pytest.raises(ValueError, match=r"reward_funcs must hold the function that watch\(reward\)"):
        make_trainer(digits, rollout_func=trl_integration.SuffixRollouts()).train()
    with pytest.raises(ValueError, match=r"reward_funcs must hold .* of this HistoryRecorder returned"):
        make_trainer(callbacks=[trl_integration.HistoryRecorder(tmp_path / "history.bin")])


@pytest.mark.parametrize("settings", [{"level": 0}, {"every": 0}, {"prompts": 0}, {"shrink": 1.0}], ids=str)
def test_bad_settings_are_named(trl_integration, settings):
    (name,) = settings
    for bad, error, message in ((settings, ValueError, name), ({name: "1"}, TypeError, f"{name} must be a")):
        with pytest.raises(error, match=message):
            trl_integration.GatedExtrapolation(len, **{"prompts": 80} | bad)
