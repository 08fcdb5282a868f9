"""Reward functions by TRL's signature: async ones, None, and what they may return."""

import asyncio
import copy
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from threading import Event
from unittest.mock import AsyncMock, Mock

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.process.signals import OutOfTime
from python_trainer.tasks.base import Task
from python_trainer.tasks.rewards import REWARDS, score

KINDS = [Mock, AsyncMock]  # of reward functions


def judge(timeout=None, **functions):
    examples = [Example("p", {"answer": n}) for n in (3, 5)]
    task = Task("t", examples, [], functions)
    return score(task, examples, ["a", "bb"], [[1], [2, 2]], timeout=timeout)


def plain(prompts, completions, completion_ids, answer, **_):
    return [float(n) for n in answer]


def test_async_functions_run_side_by_side():
    running = 0
    peak = 0

    async def slow(completions, completion_ids, **_):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [len(ids) / 2 for ids in completion_ids]

    class Judge:
        async def __call__(self, answer, **_):
            return await slow(None, [[0] * n for n in answer])

    scores = judge(plain=plain, first=slow, second=Judge())
    assert peak == 2 and list(scores.rewards) == ["plain", "first", "second"]
    assert scores.rewards == {"plain": [3.0, 5.0], "first": [0.5, 1.0], "second": [1.5, 2.5]}
    assert scores.total == [5.0, 8.5]


def test_async_functions_keep_their_loop():
    """State between calls belongs to the loop; a caller may have a running loop, as notebooks do."""
    narrow = asyncio.Semaphore(1)

    async def contended(completions, **_):
        async def one(text):
            async with narrow:
                await asyncio.sleep(0.001)
                return float(len(text))

        return await asyncio.gather(*map(one, completions))

    async def notebook():
        return judge(contended=contended)

    assert [judge(contended=contended).total for _ in range(2)] == [[1.0, 2.0]] * 2
    assert asyncio.run(notebook()).total == [1.0, 2.0]


@pytest.mark.parametrize("error", [SystemExit("no key"), asyncio.CancelledError()])
def test_what_ends_a_program_or_a_task_in_a_function_is_an_error_of_its_own(error):
    stays = AsyncMock(return_value=[1.0, 2.0])
    for kind in KINDS:
        with pytest.raises(UserError, match=f"reward function own raised {type(error).__name__}: "):
            judge(own=kind(side_effect=error), stays=stays)
    assert judge(stays=stays).total == [1.0, 2.0]  # the loop goes on


def test_none_leaves_a_function_out_of_the_sum():
    sometimes = AsyncMock(return_value=[None, 1.0])
    assert judge(plain=plain, sometimes=sometimes).total == [3.0, 6.0]
    with pytest.raises(UserError, match="every .* returned None for completion 0, to 'p'; return a number from one"):
        judge(sometimes=sometimes)


def test_accuracy_is_that_of_the_function_which_returned_a_value():
    """Two kinds of prompts with a function each, None on the other's: right answers of both kinds are right."""
    for value in (1.0, 0.0):
        scores = judge(math=lambda value=value, **_: [value, None], code=lambda value=value, **_: [None, value])
        assert scores.accuracy == scores.total == [value, value]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=30)
@given(st.lists(JSON, min_size=2, max_size=2))
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_no_function_changes_what_others_see(kind, cases):
    examples = [Example([{"role": "user", "content": "p"}], {"case": case}) for case in cases]
    calls = []

    def empties(prompts, completions, completion_ids, case):
        calls.append(copy.deepcopy((prompts, completions, completion_ids, case)))
        for value in (*case, *prompts, *completions, *completion_ids):
            if isinstance(value, dict | list):
                value.clear()
        for argument in (prompts, completions, completion_ids, case):
            argument.clear()
        return [1.0, 1.0]

    async def later(**arguments):
        return empties(**arguments)

    original = copy.deepcopy(examples)
    texts = ["a", [{"role": "assistant", "content": "b"}]]
    functions = {"one": empties, "two": empties if kind == "plain" else later}
    task = Task("t", examples, [], functions)
    for _ in range(2):
        score(task, examples, texts, [[1], [2]])
    assert calls == calls[:1] * 4 and examples == original and texts[1]


@pytest.mark.parametrize("split", ["train", "test", "gate"])
def test_a_column_that_a_batch_lacks_is_none(split):
    """Rows of a JSONL file need not have the same columns, and ranks judge parts of a batch."""

    def hinted(hint, **_):
        return [0.0 if text is None else 1.0 for text in hint]

    bare = Example("p", {})
    splits = {"train": [], "test": []} | {split: [Example("q", {"hint": "h"})]}
    task = Task("t", reward_functions={"hinted": hinted}, **splits)
    assert score(task, [bare, bare], ["a", "b"], [[1], [2]]).total == [0.0, 0.0]


def test_a_prompt_with_several_answers_has_a_row_for_each():
    example = Example("p", {"cases": [1, 2]})

    def pops(cases, **_):
        return [float(row.pop()) for row in cases]

    task = Task("t", [example], [], {"pops": pops})
    assert score(task, [example] * 3, ["a"] * 3, [[1]] * 3).total == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [[1, 0], (1.0, 0.0), numpy.array([1.0, 0.0]), torch.tensor([1.0, 0.0]), [numpy.float32(1), numpy.int64(0)],
     [True, False], [Fraction(1), Decimal(0)], [torch.tensor(1.0), None], range(1, -1, -1)],
    ids=str,
)  # fmt: skip
def test_numbers_of_every_kind_are_rewards(kind, values):
    scores = judge(own=kind(return_value=values), other=lambda **_: [1.0, 0.0])
    assert scores.rewards["own"] == [1.0, None if values[1] is None else 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "values",
    [{"a": 1.0, "b": 0.0}, {1.0, 0.0}, "10", b"10", 3.0, None, [10**400, 0], [1.0, "0"], [1.0, b"0"], [1.0, [0.0]],
     [1.0, {}], [1.0, 1j], [1.0, float("inf")], [Decimal("NaN"), 0], [-(1e20**2), 0], [1.0], [1.0, 2.0, 3.0]],
    ids=str,
)  # fmt: skip
def test_everything_else_is_one_error(kind, values):
    allowed = "; allowed: " if not isinstance(values, list) or len(values) == 2 else " values for 2 completions$"
    with pytest.raises(UserError, match=rf"^reward function own returned .*{allowed}"):
        judge(own=kind(return_value=values))


OWN = """
import functools, json

def right(completions, total, **columns):
    return [deeper(text) for text in completions]

def deeper(text):
    return json.loads(text)

def asks(completions, **columns):
    return [float(columns["total"])] * 2

async def later(answer, **columns):
    return answer.strip()

def narrow(completions):
    return [1.0, 1.0]

class Judge:
    def __call__(self, answer, **columns):
        return 1 / 0

judge = functools.partial(Judge(), more=1)
"""


@pytest.mark.parametrize(("name", "message"), [
    ("right", r"right raised TypeError: right\(\) missing 1 required positional argument: "
     r"'total'; it is given prompts, completions, completion_ids, answer$"),
    ("deeper", r"deeper raised TypeError: .*unexpected keyword .*'; it is given prompts, "),
    ("narrow", r"narrow raised TypeError: .*unexpected .*'; it is given .*, answer$"),
    ("asks", r"asks raised KeyError: 'total' \(own_rewards.py:11\); it is given prompts, .*, answer$"),
    ("later", r"later raised AttributeError: .* 'strip' \(own_rewards.py:14\)$"),
    ("judge", r"judge raised ZeroDivisionError: division by zero \(own_rewards.py:21\)$"),
])  # fmt: skip
def test_errors_name_the_place_and_what_was_given(tmp_path, monkeypatch, name, message):
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    function = REWARDS.resolve(f"own_rewards:{name}")
    sys.modules.pop("own_rewards")
    with pytest.raises(UserError, match=message):
        judge(**{name: function})
    if name == "right":  # entered: its own line, not one of what it calls
        task = Task("t", [], [], {"right": function})
        with pytest.raises(UserError, match=r"right raised JSONDecodeError: .* \(own_rewards.py:5\)$"):
            score(task, [Example("p", {"total": 1})], ["no JSON"], [[1]])


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]


def test_chat_prompts_reach_reward_functions_as_in_trl():
    """The forms in TRL: GRPOTrainer gives lists of messages where prompts are lists of messages, texts otherwise."""
    keep = Mock(return_value=[1.0, 0.0])
    examples = [Example(CHAT, {"answer": "2"}), Example("p", {"answer": "3"})]
    score(Task("t", examples, [], {"keep": keep}), examples, ["2", "2"], [[7], [8]])
    assert keep.call_args.kwargs == {
        "prompts": [CHAT, "p"],
        "completions": [[{"role": "assistant", "content": "2"}], "2"],
        "completion_ids": [[7], [8]],
        "answer": ["2", "3"],
    }


def sleeps(**_):
    time.sleep(600)


def retries(**_):
    """Retry like a client whose server has gone."""
    while True:
        try:
            time.sleep(600)
        except Exception:
            continue


def backtracks(**_):
    """Match a regular expression that tries 2^40 ways, and lets no other thread run."""
    re.match(r"(a|a)*$", "a" * 40 + "b")


def sets_alarms(**_):
    """Set an alarm as math-verify does for its timeouts."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(600)
    signal.alarm(0)
    time.sleep(600)


async def waits(**_):
    await asyncio.sleep(600)


async def blocks_its_loop(**_):
    time.sleep(2)


SLOW = [sleeps, retries, backtracks, sets_alarms, waits, blocks_its_loop]


@pytest.mark.parametrize("function", SLOW)
def test_a_function_that_takes_too_long_is_an_error(function):
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    stays = AsyncMock(return_value=[1.0, 2.0])
    message = r"reward function slow took longer than task.reward_seconds, 0.4 s, for 2 completions.*null sets no limit"
    with pytest.raises(UserError, match=message) as raised:
        judge(0.4, slow=function, stays=stays)
    assert ("test_rewards.py" in str(raised.value)) == (not asyncio.iscoroutinefunction(function))
    signal.signal(signal.SIGALRM, handlers[0])
    assert [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGVTALRM)] == handlers
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert judge(600, stays=stays).total == [1.0, 2.0], "the loop of async functions works again"


def test_the_limit_holds_in_another_thread():
    """Signals do not work there, as for a trainer that a program runs in the background."""
    with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match="slow took longer .*, 0.05 s, "):
        thread.submit(judge, 0.05, slow=lambda **_: Event().wait(2)).result()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(judge, 600, plain=plain).result().total == [3.0, 5.0]
        with pytest.raises(UserError, match="own raised TimeoutError: of its own"):
            thread.submit(judge, 600, own=Mock(side_effect=TimeoutError("of its own"))).result()


def test_a_reward_that_never_ends_ends_the_run(run, monkeypatch):
    limits = []

    def call(seconds, function):
        limits.append(seconds)
        if len(limits) > 3:  # in step 3, after the evaluation at the start
            raise OutOfTime
        return function()

    monkeypatch.setattr("python_trainer.tasks.rewards.call_within", call)
    code, errors = run({"task": {"reward_seconds": 600}, "save": {"save_steps": 0}})
    assert code == 2 and limits == [600.0] * 4 and errors.count("error: ") == 1
    assert "digits took longer than task.reward_seconds, 600 s, for 16 completions" in errors
    assert "step 2 is saved: --resume" in errors
