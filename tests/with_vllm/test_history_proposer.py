"""The history proposer: called as vLLM calls it, and inside the real vLLM."""

import importlib
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import rlkernels

PROPOSER = "rlkernels.integrations.vllm.HistoryProposer"
MAX_LENGTH, VOCAB = 256, 97
PROMPTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5], [5, 6, 7, 9]]
ANSWER = list(range(20, 60))
vllm = pytest.importorskip("vllm", reason="this machine lacks vLLM (make test-vllm sets it up)")
integration = importlib.import_module("rlkernels.integrations.vllm")
share_history = integration.share_history


@pytest.fixture(autouse=True)
def nothing_shared():
    yield
    share_history(None)


def make_proposer(
    limit: int = 8, end: int | None = None, stops: list[int] | int | None = None, rank: int = 0, **additional
):
    """Return a proposer of a model whose config.json names ``end`` and whose generation_config.json ``stops``."""
    settings = SimpleNamespace(eos_token_id=end)
    generation = {} if stops is None else {"eos_token_id": stops}
    config = SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(num_speculative_tokens=limit),
        model_config=SimpleNamespace(
            max_model_len=MAX_LENGTH,
            get_vocab_size=lambda: VOCAB,
            hf_config=settings,
            try_get_generation_config=lambda: generation,
        ),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
    )
    return integration.HistoryProposer(config)


def propose(drafter, rows: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Call the drafter as vLLM does, with all tokens so far and the new ones among them of each row."""
    ids = np.full((len(rows) + 1, MAX_LENGTH), -1, np.int32)
    lengths = np.zeros(len(rows) + 1, np.int32)
    for i, (tokens, _) in enumerate(rows):
        ids[i, : len(tokens)], lengths[i] = tokens, len(tokens)
    return drafter.propose([new for _, new in rows], lengths, ids, slot_mappings=None)


def known_answer(prompt: list[int]) -> tuple[list[int], list[int]]:
    """Return a prompt for the history to know, with an answer that suggests nothing."""
    return prompt, [VOCAB - 1]


def remember_answers(*answers: tuple[list[int], list[int]], epoch: int = 0) -> rlkernels.RolloutHistory:
    history = rlkernels.RolloutHistory()
    for prompt, answer in answers:
        history.add(prompt, answer, reward=1.0, epoch=epoch)
    return history


def share_answers(*answers: tuple[list[int], list[int]]) -> rlkernels.RolloutHistory:
    history = remember_answers(*answers)
    share_history(history)
    return history


def test_follows_rows_that_move_leave_and_come_back():
    other_answer = list(range(90, 60, -1))
    history = share_answers((PROMPTS[0], ANSWER), (PROMPTS[1], other_answer))
    drafter = make_proposer()
    a, b = PROMPTS[0] + ANSWER[:1], PROMPTS[1] + other_answer[:1]
    assert propose(drafter, [(a, ANSWER[:1]), (b, other_answer[:1])]) == [ANSWER[1:9], other_answer[1:9]]
    a, b = a + ANSWER[1:10], b + other_answer[1:4]
    # swapped, with a prompt between them that is half computed
    rows = [(b, other_answer[1:4]), (PROMPTS[2], []), (a, ANSWER[1:10])]
    assert propose(drafter, rows) == [other_answer[4:12], [], ANSWER[10:18]]
    b = b + other_answer[4:5]
    assert propose(drafter, [(b, other_answer[4:5])]) == [other_answer[5:13]]
    a = a + ANSWER[10:11]  # preempted before, computed again
    assert propose(drafter, [(a, ANSWER[10:11])]) == [ANSWER[11:19]]
    assert history.stats["handles"] == 2


def test_prompts_without_answers_are_left_alone():
    """Drafts from answers to other prompts cost more than they save; rows with answers are drafted all the same."""
    history = share_answers((PROMPTS[0], ANSWER))
    drafter = make_proposer()
    rows = [(PROMPTS[2] + ANSWER[:9], ANSWER[:9]), ([1, 2] * 9, [1, 2])]
    assert propose(drafter, rows) == [[], []] and history.stats["handles"] == 0
    mixed_rows = [(rows[0][0] + [29], [29]), (PROMPTS[0] + ANSWER[:1], ANSWER[:1])]
    assert propose(drafter, mixed_rows) == [[], ANSWER[1:9]] and history.stats["handles"] == 1


def test_another_history_takes_over_and_none_drafts_nothing():
    """Change the history as a trainer does that evaluates, or has loaded a checkpoint."""
    first = share_answers((PROMPTS[0], ANSWER))
    other = remember_answers((PROMPTS[0], [*ANSWER[:9], 70, 71, 72]))
    drafter = make_proposer()
    tokens = PROMPTS[0] + ANSWER[:1]
    assert propose(drafter, [(tokens, ANSWER[:1])]) == [ANSWER[1:9]]
    share_history(None)
    assert propose(drafter, [(PROMPTS[0] + ANSWER[:1], ANSWER[:1])]) == [[]]
    share_history(first)
    tokens = tokens + ANSWER[1:9]
    assert propose(drafter, [(tokens, ANSWER[1:9])]) == [ANSWER[9:17]] and first.stats["handles"] == 1
    share_history(other)
    tokens = [*tokens, 70]
    assert propose(drafter, [(tokens, [70])]) == [[71, 72]]
    assert first.stats["handles"] == 0 and other.stats["handles"] == 1
    share_history(remember_answers(known_answer(PROMPTS[1])))
    assert propose(drafter, [([*tokens, 71, 72], [71, 72])]) == [[]] and other.stats["handles"] == 0


def test_same_prompt_several_times():
    history = share_answers()
    drafter = make_proposer()
    history.add(PROMPTS[0], ANSWER, reward=1.0)  # it grows
    row = (PROMPTS[0] + ANSWER[:2], ANSWER[:2])
    assert propose(drafter, [row, row, row]) == [ANSWER[2:10]] * 3
    left, right = PROMPTS[0] + ANSWER[:4], PROMPTS[0] + ANSWER[:2] + [3]
    drafts = propose(drafter, [(left, ANSWER[2:4]), (right, [3]), (left, ANSWER[2:4])])
    assert drafts[0] == drafts[2] == ANSWER[4:12]
    assert history.stats["handles"] == 3


def test_a_prefix_of_the_answer_in_the_prompt_is_recognised(tmp_path):
    """Check prompts as in suffix rollouts, a history that is read again, and a prompt that begins another."""
    path = tmp_path / "history.bin"
    question = PROMPTS[0][:2]
    remember_answers((PROMPTS[0], ANSWER), (question, [1, 2, 3])).save(path)
    drafter = make_proposer(rlkernels_history=str(path))
    tokens = PROMPTS[0] + ANSWER[:1]
    # one token of context is enough only where the answer is known from its start
    assert propose(drafter, [(tokens, ANSWER[:1])]) == [ANSWER[1:9]]
    tokens = PROMPTS[0] + ANSWER[:5]  # what vLLM gets as prompt, and one token more
    assert propose(drafter, [(tokens, ANSWER[4:5])]) == [ANSWER[5:13]]
    other_answer = [*ANSWER[:5], 70, 71, 72]
    remember_answers((PROMPTS[0], other_answer), (question, [1, 2, 3])).save(path)
    assert propose(drafter, [([*tokens, 70], [70])]) == [[71, 72]]


def test_drafts_stay_within_the_model():
    share_answers((PROMPTS[0], [20, 21, 22, VOCAB, 23]))
    assert propose(make_proposer(), [(PROMPTS[0] + [20], [20])]) == [[21, 22]]
    prompt = [1] * (MAX_LENGTH - 5)
    share_answers((prompt, ANSWER))
    for length, room in [(2, 2), (4, 0), (5, 0)]:
        tokens = prompt + ANSWER[:length]
        assert propose(make_proposer(), [(tokens, ANSWER[:length])]) == [ANSWER[length : length + room]]


def test_feedback(monkeypatch):
    """A draft of which vLLM verified only a part, for lack of room, is not taken for a wrong one."""
    history = share_answers((PROMPTS[0], ANSWER))
    observe = Mock(side_effect=history.observe)
    monkeypatch.setattr(history, "observe", observe)
    drafter = make_proposer()
    tokens = list(PROMPTS[0])
    for new_tokens in (ANSWER[:1], ANSWER[1:10], ANSWER[10:13], [*ANSWER[13:15], 1]):
        tokens += new_tokens
        propose(drafter, [(tokens, new_tokens)])
    counts = [(list(offered), list(accepted)) for (_, offered, accepted), _ in observe.call_args_list]
    assert counts == [([0], [0]), ([8], [8]), ([2], [2]), ([8], [2])]
    assert history.stats["handles"] == 1


def test_reads_a_file_again_when_it_is_replaced(tmp_path, caplog):
    path = tmp_path / "history.bin"
    remember_answers((PROMPTS[0], ANSWER)).save(path)
    drafter = make_proposer(rlkernels_history=str(path))
    tokens = PROMPTS[0] + ANSWER[:1]
    assert propose(drafter, [(tokens, ANSWER[:1])]) == [ANSWER[1:9]]
    other_answer = [*ANSWER[:9], 70, 71, 72]
    remember_answers((PROMPTS[0], ANSWER), (PROMPTS[0], other_answer), epoch=3).save(path)
    remember_answers((PROMPTS[0], other_answer), epoch=3).save(path)
    tokens = tokens + ANSWER[1:9]
    assert propose(drafter, [(tokens, ANSWER[1:9])]) == [[70, 71, 72]]
    path.write_bytes(b"not a history")
    assert propose(drafter, [([*tokens, 70], [70])]) == [[71, 72]]
    assert "was not read again" in caplog.text
    path.unlink()
    assert propose(drafter, [([*tokens, 70, 71], [71])]) == [[72]]


def answer(drafter, prompt: list[int], tokens: list[int]) -> list[list[int]]:
    """Generate an answer in two steps; return the drafts of the first."""
    (first,) = propose(drafter, [(prompt + tokens[:1], tokens[:1])])
    propose(drafter, [(prompt + tokens, tokens[1:])])
    return first


def test_learns_from_answers_that_have_left():
    drafter = make_proposer(end=ANSWER[-1])
    assert answer(drafter, PROMPTS[0], ANSWER) == []
    assert answer(drafter, PROMPTS[1], ANSWER[5:]) == []  # now the first has left, and ended with the end token
    assert answer(drafter, PROMPTS[0], ANSWER) == ANSWER[1:9]
    assert drafter._history.stats["tokens"] == len(ANSWER) + len(ANSWER[5:])
    assert drafter._epoch == 1  # the first prompt came again


@pytest.mark.parametrize("stops", [[7], [ANSWER[-1], 7], ANSWER[-1]])
def test_an_answer_ends_with_any_end_token_that_vllm_stops_at(stops):
    """Chat models name more end tokens in generation_config.json than in config.json."""
    last = stops if isinstance(stops, int) else stops[0]
    drafter = make_proposer(end=1, stops=stops)
    first, second = [*ANSWER[:5], last], PROMPTS[1] + ANSWER[5:6]
    propose(drafter, [(PROMPTS[0] + first, first), (second, ANSWER[5:6])])
    propose(drafter, [([*second, 70], [70])])  # no new sequence that would tell that the first has left
    assert drafter._history.stats["tokens"] == len(first)


def test_an_answer_without_an_end_counts_once_another_sequence_begins():
    """Such answers end at their longest length or at a stop string; vLLM first resumes preempted ones."""
    drafter = make_proposer()
    answer(drafter, PROMPTS[0], ANSWER[:9])
    tokens = PROMPTS[1] + ANSWER[5:6]
    propose(drafter, [(tokens, ANSWER[5:6])])
    propose(drafter, [(PROMPTS[2] + [1], [1]), ([*tokens, 70], [70])])
    assert drafter._history.stats["tokens"] == 9
    propose(drafter, [(PROMPTS[2] + [1, 2], [2])])  # the second is preempted, and goes on
    propose(drafter, [(PROMPTS[2] + [1, 2, 3], [3]), ([*tokens, 70, 71], [71])])
    assert drafter._history.stats["tokens"] == 9
    assert answer(drafter, PROMPTS[0], ANSWER[:9]) == ANSWER[1:9]
    assert drafter._history.stats["tokens"] == 9 + 3 + 3 and len(drafter._sequences) == 1


def test_a_group_is_of_one_epoch():
    drafter = make_proposer(end=ANSWER[-1])
    other_answer = [*range(70, 90), ANSWER[-1]]
    a, b = PROMPTS[0] + ANSWER[:1], PROMPTS[0] + other_answer[:1]
    propose(drafter, [(a, ANSWER[:1]), (b, other_answer[:1])])
    propose(drafter, [(PROMPTS[0] + ANSWER, ANSWER[1:]), (b + other_answer[1:2], other_answer[1:2])])
    third_answer = [*range(60, 65), ANSWER[-1]]  # takes the place of the first, while the second runs
    propose(drafter, [(b + other_answer[1:3], other_answer[2:3]), (PROMPTS[0] + third_answer[:1], third_answer[:1])])
    assert drafter._epoch == 0 and drafter._history.stats["tokens"] == len(ANSWER)


def test_a_history_that_is_shared_is_not_filled():
    history = share_answers((PROMPTS[0], ANSWER))
    drafter = make_proposer(end=ANSWER[-1])
    answer(drafter, PROMPTS[1], ANSWER)
    answer(drafter, PROMPTS[2], ANSWER)
    assert history.stats["tokens"] == len(ANSWER)


def test_records_its_answers_and_keeps_those_of_other_engines(tmp_path):
    settings = {"rlkernels_history": str(tmp_path / "history.bin"), "rlkernels_record": True, "end": ANSWER[-1]}
    first, second = make_proposer(**settings), make_proposer(**settings)
    other_answer = [*range(70, 90), ANSWER[-1]]
    answer(first, PROMPTS[0], ANSWER)
    answer(second, PROMPTS[1], other_answer)
    for drafter in (first, second, first):  # at the end of its process, and again when it is dropped
        drafter._close()
    history = rlkernels.RolloutHistory.load(tmp_path / "history.bin")
    assert history.stats["rollouts"] == 2
    assert history.draft(PROMPTS[:2], [ANSWER[:1], other_answer[:1]], max_tokens=4) == [ANSWER[1:5], other_answer[1:5]]
    assert second._history.stats["rollouts"] == 2  # it drafts from both, too
    third = make_proposer(**settings)
    assert third._epoch == history.stats["newest_epoch"] + 1  # what comes now weighs more
    assert answer(third, PROMPTS[0], ANSWER) == ANSWER[1:9]
    answer(third, PROMPTS[2], ANSWER)  # now the first has left: more than a tenth is new
    assert rlkernels.RolloutHistory.load(tmp_path / "history.bin").stats["rollouts"] == 3


@pytest.mark.parametrize("record", [True, False])
def test_a_shared_history_does_not_take_the_place_of_a_file(tmp_path, record):
    path = tmp_path / "history.bin"
    remember_answers((PROMPTS[0], ANSWER)).save(path)
    share_answers((PROMPTS[0], [*range(70, 90)]))
    drafter = make_proposer(rlkernels_history=str(path), rlkernels_record=record, end=ANSWER[-1])
    assert answer(drafter, PROMPTS[0], ANSWER) == ANSWER[1:9]
    drafter._close()
    assert rlkernels.RolloutHistory.load(path).stats["rollouts"] == 1 + record


def test_what_it_records_is_bounded(tmp_path, monkeypatch):
    """A file may have no bound, at the start and when another process has replaced it."""
    monkeypatch.setattr(integration, "HISTORY_TOKENS", 2 * len(ANSWER))
    path = tmp_path / "history.bin"
    rlkernels.RolloutHistory().save(path)
    drafter = make_proposer(rlkernels_history=str(path), rlkernels_record=True, end=ANSWER[-1])
    for _ in range(2):
        for prompt in (*PROMPTS, *PROMPTS):
            answer(drafter, prompt, ANSWER)
        drafter._close()
        for history in (drafter._history, rlkernels.RolloutHistory.load(path)):
            assert history.stats["tokens"] == 2 * len(ANSWER)
        remember_answers(*((prompt, ANSWER) for prompt in PROMPTS)).save(path)


def test_one_worker_of_a_model_records(tmp_path):
    path = tmp_path / "history.bin"
    drafter = make_proposer(rlkernels_history=str(path), rlkernels_record=True, end=ANSWER[-1], rank=1)
    answer(drafter, PROMPTS[0], ANSWER)
    drafter._close()
    assert not path.exists() and drafter._history.stats["rollouts"] == 1


def test_what_cannot_be_written_stays_in_memory(tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "history.bin"
    drafter = make_proposer(rlkernels_history=str(path), rlkernels_record=True, end=ANSWER[-1])
    path.mkdir()
    answer(drafter, PROMPTS[0], ANSWER)
    drafter._close()
    assert "was not written" in caplog.text
    path.rmdir()
    drafter._write()
    assert rlkernels.RolloutHistory.load(path).stats["rollouts"] == 1


def test_what_is_given_as_a_history_is_checked(tmp_path):
    with pytest.raises(ValueError, match="additional_config has 'rlkernel_history', which nothing reads"):
        make_proposer(rlkernel_history="history.bin")
    with pytest.raises(ValueError, match=r"\['rlkernels_record'\] must be True beside .*_history', or False, got T"):
        make_proposer(rlkernels_record=True)
    with pytest.raises(ValueError, match="num_speculative_tokens must be at most 128 in vLLM, got 129"):
        make_proposer(limit=129)
    with pytest.raises(FileNotFoundError, match="missing"):
        make_proposer(rlkernels_history=str(tmp_path / "missing"))
    with pytest.raises(TypeError, match=r"\['rlkernels_history'\] must be the path of a file .* got <.*RolloutHistory"):
        make_proposer(rlkernels_history=remember_answers())
    with pytest.raises(TypeError, match="history must be a RolloutHistory or None, got 'history.bin'"):
        share_history("history.bin")


def test_version_is_checked(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.1")
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 31, 1))
    with pytest.raises(ImportError, match="needs vllm >= 0.32, found 0.31.1"):
        importlib.reload(integration)


def greedy(llm, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    sampling = vllm.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counters(llm) -> dict[str, int]:
    return {
        metric.name.removeprefix("vllm:spec_decode_num_"): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith("vllm:spec_decode_num_") and hasattr(metric, "value")
    }


def test_greedy_answers_are_the_same(make_llm, tmp_path):
    """Draft nothing, right answers, wrong ones, and both, from a file."""
    plain = greedy(make_llm())
    assert len({tuple(answer) for answer in plain}) == 3 and all(len(set(answer)) > 10 for answer in plain)
    path = tmp_path / "history.bin"
    remember_answers(*zip(PROMPTS, plain)).save(path)
    llm = make_llm(
        speculative_config={"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 8},
        additional_config={"rlkernels_history": str(path)},
    )
    assert greedy(llm) == plain
    right_counts = counters(llm)
    assert right_counts["accepted_tokens"] == right_counts["draft_tokens"] > 150
    assert right_counts["drafts"] < 40
    wrong_answers = [[(token + 1) % VOCAB for token in answer] for answer in plain]
    remember_answers(*zip(PROMPTS, wrong_answers)).save(path)
    assert greedy(llm) == plain
    final_counts = counters(llm)
    assert final_counts["draft_tokens"] > right_counts["draft_tokens"]
    half_right_answers = [[*answer[:20], 1, *answer[21:]] for answer in plain]
    remember_answers(*zip(PROMPTS, half_right_answers)).save(path)
    assert greedy(llm) == plain


def test_a_sequence_near_the_limit_leaves_the_others_their_drafts(make_llm, tmp_path):
    """Its answer ends at the limit of the model; all answers are recorded as a whole."""
    path = tmp_path / "history.bin"
    llm = make_llm(
        speculative_config={"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 16},
        additional_config={"rlkernels_history": str(path), "rlkernels_record": True},
    )
    prompts = [*PROMPTS, PROMPTS[0] * 50]
    answers = greedy(llm, prompts)
    assert [len(answer) for answer in answers] == [80, 80, 80, MAX_LENGTH - 200]
    assert greedy(llm, prompts) == answers
    history = rlkernels.RolloutHistory.load(path)
    assert history.stats["rollouts"] == len(prompts)
    assert history.stats["tokens"] == sum(map(len, answers))
    counts = counters(llm)
    assert counts["accepted_tokens"] == counts["draft_tokens"] > 200
