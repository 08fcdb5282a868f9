"""A rollout history: its drafts, its limits, its files and tensors, and what of them is refused."""

import math
import os
import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import take_backend

import rlkernels
from bench.soak.operations import HistoryPair

compiled_only = pytest.mark.parametrize("implementation", ["cpu"], indirect=True)


@pytest.fixture(params=["cpu", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Run every test on the compiled index and on its model in Python, unless it is marked compiled_only."""
    return take_backend(request.param, monkeypatch)


def test_replays_a_stored_response():
    history = rlkernels.RolloutHistory()
    response = list(range(100, 140))
    history.add([1, 2], response, reward=1.0)
    assert history.draft([[1, 2]], [[]], max_tokens=8) == [response[:8]]
    assert history.draft([[1, 2]], [response[:5]], max_tokens=8) == [response[5:13]]
    assert history.draft([[1, 2]], [[7, *response[:5]]], max_tokens=3) == [response[5:8]]
    assert history.draft([[1, 2]], [response[:37]], max_tokens=8) == [response[37:]]
    assert history.draft([[1, 2]], [response], max_tokens=8) == [[]]  # nothing follows the end
    assert history.draft([[1, 2]], [[5, 6, 7]], max_tokens=8) == [[]]
    assert history.draft([[1, 2], [1, 2]], [[], []], max_tokens=0) == [[], []]


def test_a_draft_without_feedback_is_as_long_as_asked_for():
    history = rlkernels.RolloutHistory(token_cost=0.0)
    history.add([1], [5] * 70_000)
    assert history.draft([[1]], [[]], max_tokens=69_000) == [[5] * 69_000]


def test_finds_the_longest_prompt_that_a_sequence_begins_with():
    history = rlkernels.RolloutHistory(max_tokens=4)
    assert history.longest_prompt([1, 2, 3]) == 0
    for prompt in ([1, 2], [1, 2, 3, 4], [9]):
        history.add(prompt, [5], epoch=1)
    handle = history.track([1, 2, 3])  # not a prompt with answers
    history.add([1, 2, 3, 4, 5], [])
    lengths = [history.longest_prompt(ids) for ids in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3], [1], [], [9, 1, 2])]
    assert lengths == [4, 4, 2, 0, 0, 1]
    history.release(handle)
    history.add([9], [5, 6], epoch=2)  # one token too many: the first answer goes
    assert history.longest_prompt([1, 2, 3]) == 0 and history.longest_prompt([1, 2, 3, 4]) == 4


def test_other_prompts_are_the_fallback():
    history = rlkernels.RolloutHistory()
    history.add([1], [10, 11, 12, 13, 14, 15])
    assert history.draft([[2]], [[99, 10, 11, 12, 13]], max_tokens=4) == [[14, 15]]
    history.add([2], [11, 12, 13, 77])
    assert history.draft([[2]], [[99, 10, 11, 12, 13]], max_tokens=1) == [[77]]  # the same prompt weighs more
    assert history.draft([[3]], [[10, 11, 12, 13, 14]], max_tokens=4) == [[15]]  # five tokens
    history.add([4], [20, 21, 22, 13, 14, 88])
    assert history.draft([[3]], [[10, 11, 12, 13, 14]], max_tokens=4) == [[15]]  # five tokens beat three


def test_own_text_is_drafted_from_too():
    history = rlkernels.RolloutHistory(token_cost=0.001)
    prompt = [40, 41, 42, 43, 44, 45]
    handle = history.track(prompt)

    def drafted():
        ids, lengths = history.draft_tracked([handle], max_tokens=8)
        one_off = history.draft([prompt], [generated], max_tokens=8)[0]
        assert ids.shape == (1, 8) and ids[0].tolist() == one_off + [-1] * (8 - int(lengths[0]))
        return one_off

    generated: list[int] = []
    assert drafted() == []
    for tokens, expected in [
        ([41, 42], [43, 44, 45]),
        ([45], []),
        ([7], []),
        ([41], [42, 45, 7, 41]),
        ([42, 45, 7], 41),
    ]:
        history.extend(handle, tokens)
        generated += tokens
        draft = drafted()
        assert draft == expected or draft[0] == expected  # the newest and the longest match weigh most
    history.release(handle)
    with pytest.raises(ValueError, match=f"handle {handle} is not tracked"):
        history.draft_tracked([handle], max_tokens=4)


def test_extending_many_sequences_at_once():
    history = rlkernels.RolloutHistory()
    history.add([1], list(range(20, 60)))
    batched, single = ([history.track([1]) for _ in range(3)] for _ in range(2))
    extensions = [[20, 21], [], [30, 31, 32, 33]]
    history.extend_tracked(
        batched,
        [token for extension in extensions for token in extension],
        [len(extension) for extension in extensions],
    )
    for handle, extension in zip(single, extensions):
        history.extend(handle, extension)
    drafts, single_drafts = (history.draft_tracked(handles, max_tokens=4)[0].tolist() for handles in (batched, single))
    assert drafts == single_drafts == [[22, 23, 24, 25], [20, 21, 22, 23], [34, 35, 36, 37]]
    history.extend_tracked([], [], [])
    with pytest.raises(ValueError, match=r"lengths must add up to the number of ids \(1\), got 2"):
        history.extend_tracked([batched[0]], [1], [2])
    with pytest.raises(ValueError, match=r"one entry per handle \(1\), got 0"):
        history.extend_tracked([batched[0]], [], [])


def test_token_cost_of_one_call():
    history = rlkernels.RolloutHistory(token_cost=0.0)
    history.add([1], list(range(100)))
    handle = history.track([1])

    def offered(**cost):
        return int(history.draft_tracked([handle], max_tokens=16, **cost)[1][0])

    assert offered() == 16 and offered(token_cost=0.9) == 2 and offered(token_cost=1.0) == 0  # 0.95^2 > 0.9 > 0.95^3
    for _ in range(20):
        history.observe([handle], [6], [1])
    assert offered(token_cost=0.1) > 0
    offered(token_cost=0.5)
    history.observe([handle], [6], [1])  # 1 token won, 3 steps' worth spent: off
    assert offered(token_cost=0.5) == 0 and offered(token_cost=0.1) > 0  # until it costs less
    with pytest.raises(ValueError, match="token_cost must be between"):
        offered(token_cost=-1)


def test_votes_by_match_reward_and_epoch():
    history = rlkernels.RolloutHistory()
    history.add([1], [5, 6, 7, 100], reward=1.0)
    history.add([1], [5, 6, 7, 200], reward=0.0)
    assert history.draft([[1]], [[5, 6, 7]], max_tokens=1) == [[100]]  # the better reward
    history.add([1], [5, 6, 7, 200], reward=0.0, epoch=3)
    assert history.draft([[1]], [[5, 6, 7]], max_tokens=1) == [[200]]  # the later epoch
    history.add([1], [4, 4, 4, 5, 6, 7, 300], reward=0.0, epoch=3)
    assert history.draft([[1]], [[4, 4, 5, 6, 7]], max_tokens=1) == [[300]]  # the longer match
    history = rlkernels.RolloutHistory()
    for token, epoch in ((100, -(2**63)), (200, 2**63 - 1)):
        history.add([1], [5, 6, 7, token], epoch=epoch)
    assert history.draft([[1]], [[5, 6, 7]], max_tokens=1) == [[200]]  # however far apart


def test_window_follows_what_was_offered():
    history = rlkernels.RolloutHistory(token_cost=0.001)
    history.add([1], list(range(1000)))
    handle = history.track([1])

    def offered():
        return int(history.draft_tracked([handle], max_tokens=1000)[1][0])

    first = offered()
    history.observe([handle], [first - 3], [first - 3])  # a shorter draft than the window, all accepted: it grows
    assert offered() == 2 * first
    history.observe([handle], [2 * first], [5])
    assert offered() == 10
    history.observe([handle], [10], [9])
    assert offered() == 9
    history.observe([handle], [9], [0])
    assert offered() == 6  # not shorter
    history.observe([handle], [0], [0])  # nothing offered, nothing learnt
    assert offered() == 6


def test_drafting_that_does_not_pay_pauses_for_twice_as_long_each_time():
    history = rlkernels.RolloutHistory(token_cost=0.1)
    history.add([1], list(range(1000)))
    handle = history.track([1])
    offers = []
    for _ in range(80):
        offers.append(int(history.draft_tracked([handle], max_tokens=4)[1][0]) > 0)
        history.observe([handle], [2 * offers[-1]], [0])
    # running mean 0.75^n - 0.2 (1 - 0.75^n) is negative from n = 7 on; then pauses of 8, 16, 32 with one try between
    assert offers == [True] * 7 + [False] * 8 + [True] + [False] * 16 + [True] + [False] * 32 + [True] + [False] * 14
    for _ in range(50):  # the pause of 64 ends; a draft that pays ends the doubling
        history.draft_tracked([handle], max_tokens=4)
    assert int(history.draft_tracked([handle], max_tokens=4)[1][0]) > 0
    history.observe([handle], [2], [2])
    assert int(history.draft_tracked([handle], max_tokens=4)[1][0]) > 0


def test_evicts_lowest_epoch_then_lowest_reward_then_oldest():
    history = rlkernels.RolloutHistory(max_tokens=30)
    responses = {name: [10 * i + j for j in range(10)] for i, name in enumerate("abcdef")}
    history.add([1], responses["a"], reward=1.0, epoch=0)
    history.add([1], responses["b"], reward=0.0, epoch=1)
    history.add([1], responses["c"], reward=0.0, epoch=1)

    def kept():
        return "".join(n for n, r in responses.items() if history.draft([[1]], [r[:5]], max_tokens=1) != [[]])

    assert kept() == "abc" and history.stats["tokens"] == 30
    for name, reward, epoch, expected in [("d", 0.5, 1, "bcd"), ("e", 0.5, 2, "cde"), ("f", 0.9, 0, "cde")]:
        history.add([1], responses[name], reward=reward, epoch=epoch)
        assert kept() == expected and history.stats["tokens"] == 30
    history.add([2], range(1000, 1100), epoch=3)
    assert history.stats["tokens"] == 30 and history.stats["rollouts"] == 1  # cut to what fits


def test_another_bound_holds_for_what_is_there():
    history = rlkernels.RolloutHistory()
    for i, (reward, epoch) in enumerate([(1.0, 0), (0.0, 1), (0.5, 1), (0.0, 2)]):
        history.add([i], [10 * i + j for j in range(10)], reward=reward, epoch=epoch)

    def remaining():
        return [i for i in range(4) if history.longest_prompt([i])]

    for bound, expected in [(40, [0, 1, 2, 3]), (29, [2, 3]), (None, [2, 3]), (19, [3])]:
        history.resize(bound)
        assert remaining() == expected and history.stats["tokens"] == 10 * len(expected)
        assert history.draft([[3]], [[30, 31]], max_tokens=2) == [[32, 33]]
        restored = rlkernels.RolloutHistory.from_bytes(history.to_bytes())  # the bound is kept, too
        for i in range(9):
            restored.add([9], [90 + i] * 5, epoch=9)
        assert restored.stats["tokens"] == 65 if bound is None else 10 < restored.stats["tokens"] <= bound
    with pytest.raises(ValueError, match="max_tokens must be between 1 and .* got 0"):
        history.resize(0)


@compiled_only
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([None, 1, 25, 60]), st.sampled_from([0.0, 0.02, 0.4]),
       st.sampled_from([5, 7, 24]))  # fmt: skip
def test_equals_its_model_in_python(seed, max_tokens, token_cost, depth):
    rng = random.Random(seed)
    pair = HistoryPair(None)
    empty = np.zeros(0, np.int32)
    pair.histories = tuple(type(history)(max_tokens, token_cost, depth) for history in pair.histories)
    for _ in range(100):
        pair.step(rng.randrange)
        if rng.random() < 0.1:
            pair.run_on_both("resize", rng.choice([None, 1, 9, 40, 300]))
            pair.run_on_both("add", empty, np.arange(rng.randrange(9), dtype=np.int32), 0.5, pair.epoch)
            pair.run_on_both("draft", empty, np.arange(rng.randrange(9), dtype=np.int32), 6)
        pair.compare()


@compiled_only
def test_equals_its_model_on_long_histories():
    pair = HistoryPair(6000)
    rng = np.random.default_rng(0)
    base = rng.integers(0, 50, (8, 120), np.int32)
    for i in range(200):  # table growth, packing, long matches
        prompt = rng.integers(8, size=1, dtype=np.int32)
        changed = np.where(rng.random(120) < 0.1, rng.integers(0, 50, 120, np.int32), base[prompt[0]])
        response = changed[: rng.integers(1, 120)]
        pair.run_on_both("add", prompt, response, i % 3, i // 50)
        pair.run_on_both("draft", prompt, response[: rng.integers(len(response))], 16)
    pair.compare()
    native, model = (history.to_bytes() for history in pair.histories)
    assert np.array_equal(native, model)
    facts = pair.histories[0].stats()
    assert facts["evicted"] > 50 and 5000 < facts["tokens"] <= 6000


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda h: rlkernels.RolloutHistory(max_tokens=0), ValueError, "max_tokens must be between 1 and .* got 0"),
    (lambda h: h.add([1], [1], epoch=2**63), ValueError, "epoch must be between .* got 9223372036854775808"),
    (lambda h: h.release(2**63), ValueError, "handle must be between .* got 9223372036854775808"),
    (lambda h: h.add([1], [1], reward="1"), TypeError, "reward must be a number, got '1'"),
    (lambda h: rlkernels.RolloutHistory(token_cost=2), ValueError, "token_cost must be between 0.0 and 1.0"),
    (lambda h: rlkernels.RolloutHistory(depth=4), ValueError, "depth must be between 5 and 64, got 4"),
    (lambda h: h.add([1], [-1]), ValueError, r"response_ids must be between 0 and 2\*\*31 - 1, got -1"),
    (lambda h: h.add([2**31], [1]), ValueError, "prompt_ids must be between 0"),
    (lambda h: h.add("ab", [1]), TypeError, "prompt_ids must be a list of integers, got 'ab'"),
    (lambda h: h.add([1], torch.zeros(3)), TypeError, "response_ids must be integers, got float32"),
    (lambda h: h.add([1], torch.zeros(3).bfloat16()), TypeError, r"response_ids must be integers, got tensor\(\[0"),
    (lambda h: h.add([1], [1], reward=math.nan), ValueError, "reward must be finite, got nan"),
    (lambda h: h.draft([[1]], [], max_tokens=3), ValueError, "generated_ids_list must have one entry per prompt"),
    (lambda h: h.draft([[1]], [[]], max_tokens=-1), ValueError, "max_tokens must be between 0 and .* got -1"),
    (lambda h: h.draft([[1]], [[]], max_tokens=2**70), ValueError, "max_tokens must be between 0 and .* got 11805"),
    (lambda h: h.draft_tracked([], max_tokens=2**70), ValueError, "max_tokens must be between 0 and .* got 11805"),
    (lambda h: rlkernels.RolloutHistory(max_tokens=2**70), ValueError, "max_tokens must be between 1 .* got 118"),
    (lambda h: h.draft(None, [[]], max_tokens=3), TypeError, "prompt_ids_list must be a list .* got None"),
    (lambda h: h.add([[1], [2, 3]], [1]), ValueError, r"prompt_ids must have 1 dimension, got \[\[1\], \[2, 3\]\]"),
    (lambda h: h.observe([0], [1], [2]), ValueError, r"accepted must be between 0 and offered \(1\), got 2"),
    (lambda h: h.observe([0], [1], []), ValueError, "must have one length, got 1, 1, 0"),
    (lambda h: h.extend(5, [1]), ValueError, "handle 5 is not tracked"),
])  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(rlkernels.RolloutHistory())


def test_save_and_load(tmp_path):
    history = rlkernels.RolloutHistory(max_tokens=5000, token_cost=0.03, depth=16)
    for i in range(30):
        prompt = [i % 4, 1]
        history.add(prompt, torch.randint(20, (i,)).tolist(), reward=i / 7, epoch=i // 10)
    history.save(tmp_path / "h.bin")
    loaded = rlkernels.RolloutHistory.load(tmp_path / "h.bin")
    loaded.save(tmp_path / "again.bin")
    assert (tmp_path / "h.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()
    data = history.to_bytes()
    assert bytes(data.tolist()) == (tmp_path / "h.bin").read_bytes()
    assert torch.equal(rlkernels.RolloutHistory.from_bytes(data).to_bytes(), data)
    data[-1] ^= 1
    with pytest.raises(ValueError, match="the tensor is damaged"):
        rlkernels.RolloutHistory.from_bytes(data)
    for i in range(100):
        prompt = [i % 4, 1]
        generated = torch.randint(20, (i % 9,)).tolist()
        assert history.draft([prompt], [generated], max_tokens=8) == loaded.draft([prompt], [generated], max_tokens=8)
    assert list(tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2  # no temporary file left


def test_savers_of_one_path_do_not_meet(tmp_path):
    path = tmp_path / "h.bin"

    def save(seed):
        history = rlkernels.RolloutHistory()
        for i in range(12):
            history.add([seed], range(300 * (i % 3), 500))
            history.save(path)

    umask = os.umask(0o002)
    try:
        rlkernels.RolloutHistory().save(path)
        with ThreadPoolExecutor(6) as pool:
            savers = [pool.submit(save, seed) for seed in range(6)]
            while not all(saver.done() for saver in savers):
                rlkernels.RolloutHistory.load(path)
    finally:
        os.umask(umask)
    assert not any(saver.exception() for saver in savers)
    assert rlkernels.RolloutHistory.load(path).stats["rollouts"] > 0
    assert path.stat().st_mode & 0o777 == 0o664  # as any new file
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        rlkernels.RolloutHistory().save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "h.bin"]  # no temporary file left


def test_saving_keeps_links_and_permissions(tmp_path):
    history = rlkernels.RolloutHistory()
    history.add([1], [2, 3])
    (tmp_path / "disk").mkdir()
    link = tmp_path / "h.bin"
    file = tmp_path / "disk" / "history"
    link.symlink_to("disk/history")
    for mode in (0o600, 0o664):  # at first the link leads nowhere
        history.save(link)
        assert link.is_symlink() and rlkernels.RolloutHistory.load(file).stats["tokens"] == 2
        file.chmod(mode)
        history.save(link)
        assert file.stat().st_mode & 0o777 == mode
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "h.bin", "history"]


def test_paths_are_taken_as_the_system_takes_them(tmp_path):
    history = rlkernels.RolloutHistory()
    history.add([1], [2, 3])
    for path in (tmp_path / "\udcff", os.fsencode(tmp_path / "bytes")):
        history.save(path)
        assert rlkernels.RolloutHistory.load(path).stats["tokens"] == 2
    files = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="null byte"):
        history.save(f"{tmp_path}/bytes\0more")  # would be another file
    with pytest.raises(ValueError, match="null byte"):
        rlkernels.RolloutHistory.load(f"{tmp_path}/bytes\0more")
    assert sorted(os.listdir(tmp_path)) == files


def test_an_emptied_history_forgets_the_epoch_as_its_file_does():
    history = rlkernels.RolloutHistory()
    history.add([1], range(5), epoch=9)
    history.resize(3)
    assert history.stats["rollouts"] == 0
    restored = rlkernels.RolloutHistory.from_bytes(history.to_bytes())
    assert torch.equal(history.to_bytes(), restored.to_bytes())
    assert torch.equal(history.to_bytes(), rlkernels.RolloutHistory(max_tokens=3).to_bytes())


@compiled_only
def test_records_that_make_no_sense():
    """A file with a right checksum that was not written by us; the model in Python trusts it."""
    history = rlkernels.RolloutHistory(max_tokens=20)
    history.add([1], [2, 3], reward=0.5, epoch=4)
    payload = bytes(history.to_bytes().tolist())[24:]

    def load(data):
        file_bytes = b"RLKHIST\0" + struct.pack("<IIQ", 1, zlib.crc32(data), len(data)) + data
        return rlkernels.RolloutHistory.from_bytes(torch.tensor(list(file_bytes), dtype=torch.uint8))

    assert load(payload).stats["tokens"] == 2
    # bound, cost, depth, epoch, prompts, rollouts; of a prompt length, ids; of a rollout prompt, length, reward, epoch
    for position, kind, value in [
        (0, "q", 1), (8, "d", math.nan), (16, "q", 4), (24, "q", 3), (32, "Q", 2**60), (40, "Q", 2), (48, "I", 2**31),
        (52, "i", -1), (56, "I", 1), (60, "I", 0), (64, "d", math.inf), (80, "i", -5),
    ]:  # fmt: skip
        data = bytearray(payload)
        struct.pack_into(f"<{kind}", data, position, value)
        with pytest.raises(ValueError, match="the tensor is damaged: a record does not make sense"):
            load(bytes(data))
    with pytest.raises(ValueError, match="a record does not make sense"):
        load(payload + b"1234")


@pytest.mark.parametrize("damage", ["empty", "magic", "version", "cut", "longer", "flip"])
def test_damaged_file(tmp_path, damage):
    history = rlkernels.RolloutHistory()
    history.add([1], list(range(50)))
    path = tmp_path / "h.bin"
    history.save(path)
    data = path.read_bytes()
    broken, message = {
        "empty": (b"", "not a rollout history"),
        "magic": (b"X" + data[1:], "not a rollout history"),
        "version": (data[:8] + b"\x09" + data[9:], "version 9"),
        "cut": (data[:-5], "damaged"),
        "longer": (data + b"12345", "damaged"),
        "flip": (data[:60] + bytes([data[60] ^ 4]) + data[61:], "damaged"),
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=message):
        rlkernels.RolloutHistory.load(path)
    with pytest.raises(FileNotFoundError):
        rlkernels.RolloutHistory.load(tmp_path / "none")
