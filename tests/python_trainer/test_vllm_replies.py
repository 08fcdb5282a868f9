"""What a vLLM server may answer: each wrong reply is one clear line, and no reply lasts for ever."""

import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
from fake_vllm import serving

from python_trainer.data import Request
from python_trainer.errors import UserError
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.settings import RolloutConfig
from python_trainer.rollout.vllm import servers as servers_module
from python_trainer.rollout.vllm.engine import VLLMEngine
from python_trainer.rollout.vllm.servers import AnswerTimeout, Server, Servers, read

END = 63
DEEP = "[" * 100_000


@pytest.fixture
def fake():
    with serving() as server:
        yield server


def choice(index, ids=(1, END), logprobs=None, finish_reason="stop", **facts):
    logprobs = {"token_logprobs": [-1.0] * len(ids) if logprobs is None else logprobs}
    return {"index": index, "token_ids": list(ids), "logprobs": logprobs, "finish_reason": finish_reason, **facts}


def ask(fake, model, tmp_path, reply, *, stop=(), tokenizer=None):
    """Request two answers of at most four tokens from a server that sends ``reply``."""
    fake.answers["/v1/completions"] = reply if isinstance(reply, str) else {"choices": reply}
    servers = Servers(model, [fake.url], tmp_path / "weights")
    engine = VLLMEngine(model, servers, eos_token_ids=[END], tokenizer=tokenizer)
    return engine.generate([Request([1, 2], (), 2, 4)], SamplingParams(stop=stop))


GOOD = choice(1, [5, 6, 7, 8], [-1, -0.5, 0, 1e-6], "length")  # whole numbers, and a rounding error


def test_a_good_reply_in_any_order_and_with_other_fields(fake, model, tmp_path):
    rollouts = ask(fake, model, tmp_path, [GOOD, choice(0, text="\x1b", stop_reason=None)])
    assert [(r.ids, r.logprobs, r.finish_reason) for r in rollouts] == [
        ([1, END], [-1.0, -1.0], "stop"), ([5, 6, 7, 8], [-1.0, -0.5, 0.0, 1e-6], "length"),
    ]  # fmt: skip


def test_a_stop_string_ends_an_answer_without_an_end_token(fake, model, tokenizer, tmp_path):
    rollouts = ask(fake, model, tmp_path, [GOOD, choice(0, [1, 2])], stop=("2",), tokenizer=tokenizer)
    assert [r.ids for r in rollouts] == [[1, 2], [5, 6, 7, 8]]


WRONG = {
    "one more": ([choice(0), GOOD, choice(2)], r"choices must have the indexes 0 to 1, got \[0, 1, 2\]"),
    "one less": ([choice(0)], r"choices must have the indexes 0 to 1, got \[0\]"),
    "none": ([], r"choices must have the indexes 0 to 1, got \[\]"),
    "equal indexes": ([choice(0), choice(0)], r"indexes 0 to 1, got \[0, 0\]"),
    "index as text": ([choice("0"), GOOD], "choices.0.index: Input should be a valid integer, got '0'"),
    "NaN": (
        [choice(0, logprobs=[float("nan"), -1]), GOOD],
        r"token_logprobs.0: Input should be a finite number, got nan",
    ),
    "positive": ([choice(0, logprobs=[-1, 0.01]), GOOD], r"token_logprobs.1: .*less than or equal to .*got 0.01"),
    "infinite": ([choice(0, logprobs=[-1, float("-inf")]), GOOD], "token_logprobs.1: .*finite number, got -inf"),
    "null log-probability": ([choice(0, logprobs=[None, -1]), GOOD], "token_logprobs.0: .*valid number, got None"),
    "fewer log-probabilities": (
        [choice(0, logprobs=[-1]), GOOD],
        "choice 0: token_logprobs must be 2, as token_ids, got 1",
    ),
    "too many tokens": ([choice(0, [1] * 500), GOOD], "choice 0: token_ids must be at most max_tokens 4, got 500"),
    "no tokens": ([choice(0, []), GOOD], "choice 0: token_ids must hold a token, got none"),
    "behind the end": (
        [choice(0, [1, END, 2]), GOOD],
        "choice 0: .*must end at the first end token, got more behind 63",
    ),
    "no end": ([choice(0, [1, 2]), GOOD], r"choice 0: finish_reason stop needs one of the tokens \[63\] .*, got 2"),
    "cut early": ([choice(0, [1, 2], None, "length"), GOOD], "finish_reason length needs max_tokens 4 tokens, got 2"),
    "outside the vocabulary": ([choice(0, [64, END]), GOOD], "choice 0: token_ids must be below vocab_size 64, got 64"),
    "negative id": ([choice(0, [-1, END]), GOOD], "choices.0.token_ids.0: .*greater than or equal to 0, got -1"),
    "huge id": (
        [choice(0, [10**400, END]), GOOD],
        r"choices.0.token_ids.0: Input should be less than 2147483648, got 10+\.\.\.0+",
    ),
    "ids as text": ([choice(0, ["1", END]), GOOD], "choices.0.token_ids.0: Input should be a valid integer, got '1'"),
    "ids as fractions": ([choice(0, [1.5, END]), GOOD], "choices.0.token_ids.0: .*integer.*got 1.5"),
    "null ids": ([choice(0) | {"token_ids": None}, GOOD], "choices.0.token_ids: .*valid array, got None"),
    "null log-probabilities": ([choice(0) | {"logprobs": None}, GOOD], "choices.0.logprobs: .*object, got None"),
    "null list of them": (
        [choice(0) | {"logprobs": {"token_logprobs": None}}, GOOD],
        "token_logprobs: .*array, got None",
    ),
    "null reason": ([choice(0) | {"finish_reason": None}, GOOD], "choices.0.finish_reason: .*string, got None"),
    "null choice": ([None, GOOD], "choices.0: Input should be an object, got None"),
    "null choices": ('{"choices": null}', "choices: Input should be a valid array, got None"),
    "no choices": ("{}", "choices: Field required, got {}"),
    "a list": ("[1]", "Input should be an object"),
    "nothing": ("", "Invalid JSON: EOF while parsing"),
    "half": ('{"choices": [', "Invalid JSON: EOF while parsing"),
    "deep": (DEEP, "Invalid JSON: recursion limit exceeded"),
    "deep in a field": (f'{{"choices": {DEEP}', "Invalid JSON: recursion limit exceeded"),
    "controls": ("\x1b[2J\x9b", "Invalid JSON: expected value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reply_names_server_and_field(fake, model, tmp_path, name):
    reply, message = WRONG[name]
    with pytest.raises(
        UserError, match=f"{fake.url}/v1/completions must answer as vLLM, got .*: .*{message}"
    ) as caught:
        ask(fake, model, tmp_path, reply)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize(("path", "reply", "message"), [
    ("/version", '{"version": "0.32.0\\u001b[2J"}', "/version must answer .*version: String should match pattern"),
    ("/version", '{"version": 1}', "/version must answer .*version: .*valid string, got 1"),
    ("/v1/models", '{"data": [{"id": 5}]}', "/v1/models must answer .*data.0.id: .*valid string, got 5"),
    ("/v1/models", '{"data": null}', "/v1/models must answer .*data: .*valid array, got None"),
    ("/collective_rpc", '{"results": []}', "/collective_rpc must answer .*results: List should have at least 1"),
    ("/collective_rpc", '{"results": [null]}', "/collective_rpc must answer .*results.0: .*object, got None"),
    ("/collective_rpc", '{"results": [{"logprobs_mode": "raw_logprobs"}]}', "max_model_len: Field required"),
    ("/collective_rpc", DEEP, "recursion limit exceeded"),
])  # fmt: skip
def test_replies_when_a_server_is_met(fake, model, path, reply, message):
    fake.answers[path] = reply
    with pytest.raises(UserError, match=message) as caught:
        Server(model, fake.url)
    assert fake.url in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "abc", ""])
def test_counters_are_finite_numbers(fake, model, monkeypatch, value):
    server = Server(model, fake.url)
    lines = f'vllm:other{{a="1"}} abc\nvllm:prompt_tokens_total{{engine="0"}} {value}\n'
    monkeypatch.setattr(servers_module, "read", lambda *_: (200, lines))
    with pytest.raises(UserError, match="/metrics must answer .*prompt_tokens_total must be a finite number >= 0"):
        server.counters()


def test_an_error_body_moves_no_cursor(fake, model, monkeypatch):
    body = "\x1b[31mred\x1b[0m \x07\x08 \u202ereversed\r\n" + "x" * 10_000

    server = Server(model, fake.url)
    monkeypatch.setattr(servers_module, "read", lambda *_: (500, body))
    with pytest.raises(UserError) as caught:
        server.counters()
    assert str(caught.value).isprintable() and r"\x1b[31mred" in str(caught.value) and len(str(caught.value)) < 600


@contextmanager
def endless(first, byte):
    """Serve ``first`` and then a byte at a time, as long as somebody listens."""
    over = threading.Event()

    class Trickle(BaseHTTPRequestHandler):
        def do_POST(self):
            with suppress(OSError):
                self.wfile.write(first)
                while not over.wait(0.02):
                    self.wfile.write(byte)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


ENDLESS = {
    "nothing": (b"", b""),
    "status line": (b"HTTP/1.1 2", b"0"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a"),
    "header after header": (b"HTTP/1.1 200 OK\r\n", b"a:b\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n{", b" "),
    "body of a length": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n{", b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_no_answer_lasts_for_ever(name):
    with endless(*ENDLESS[name]) as url, pytest.raises(AnswerTimeout, match="not complete after 0.2 s"):
        read(url, b"{}", lambda: None, 0.2)


def test_who_waits_for_no_answer_any_more_is_heard_while_bytes_come(monkeypatch):
    monkeypatch.setattr(servers_module, "LOOK_SECONDS", 0.05)
    nobody = UserError("nobody waits")
    with endless(*ENDLESS["body"]) as url, pytest.raises(UserError, match="nobody waits"):
        read(url, b"{}", Mock(side_effect=nobody))


def test_an_answer_has_a_largest_size(monkeypatch, fake):
    monkeypatch.setattr(servers_module, "LARGEST_ANSWER", 1000)
    for size in (1000, 1001):
        fake.answers["/large"] = "x" * size
        if size == 1000:
            assert read(f"{fake.url}/large") == (200, "x" * 1000)
        else:
            with pytest.raises(OSError, match="more than 1000 bytes"):
                read(f"{fake.url}/large")


def test_half_of_an_answer_is_none(fake, monkeypatch):
    fake.answers["/half"] = "{}"
    monkeypatch.setattr("fake_vllm.len", lambda data: 9, raising=False)  # bytes that it announces
    with pytest.raises(OSError, match="IncompleteRead"):
        read(f"{fake.url}/half")


def test_the_time_limit_is_a_setting(fake, model, tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(servers_module, "LOOK_SECONDS", 0.05)
    fake.answers |= {"/v1/completions": lambda body: over.wait(60) and {}, "/health": ""}
    settings = RolloutConfig(engine="vllm", vllm_server=[fake.url], vllm_request_timeout=0.5)
    engine = VLLMEngine(model, Servers(model, [fake.url], tmp_path / "weights", None, settings), eos_token_ids=[END])
    try:
        limit = "its answer is not complete after 0.5 s, the limit of rollout.vllm_request_timeout"
        with pytest.raises(UserError, match=f"{fake.url}/v1/completions: {limit}"):
            engine.generate([Request([1])], SamplingParams())
    finally:
        over.set()
    assert fake.token_requests()
