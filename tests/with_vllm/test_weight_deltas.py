"""Weights by deltas inside the real vLLM, which fuses layers and ties the head: on servers, and in this process."""

import sys
from itertools import pairwise

import pytest
import torch
from rollouts import EOS, MEMORY, PROMPTS, load
from sampling_cases import compute_logprobs
from tiny import generate_greedy

from bench._vllm_server import VLLMServer
from python_trainer.data import Request
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.vllm.engine import WORKER, VLLMEngine
from python_trainer.rollout.vllm.servers import Servers
from rlkernels import weights

pytest.importorskip("zstandard", reason="this machine lacks zstandard")
SAMPLING = SamplingParams(seed=1)


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    """Start two servers."""
    log = tmp_path_factory.mktemp("servers") / "log"
    running = [VLLMServer(sys.executable, folder, log.with_name(str(i)), MEMORY) for i in range(2)]
    for server in running:
        server.start()
    yield running
    for server in running:
        server.stop()


def move(model, seed):
    """Change a few weights of every layer, as a step at a low rate does, but enough to change answers."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + (torch.rand(p.shape, generator=gen) < 0.02) * torch.randn(p.shape, generator=gen))


def check_answers(engine, model):
    """Check that all servers have the model's weights: enough copies of each prompt reach both; return sent bytes."""
    requests = [Request(prompt, max_new_tokens=8, sample_id=8 * i) for i, prompt in enumerate(PROMPTS * 2)]
    old_bytes = engine.stats["weight_bytes"]
    for request, answer in zip(requests, engine.generate(requests, SAMPLING), strict=True):
        expected = compute_logprobs(model, request.prompt_ids, answer.ids, SAMPLING)
        assert answer.logprobs == pytest.approx(expected, abs=2e-4)
    return engine.stats["weight_bytes"] - old_bytes


def test_servers_are_kept_up_to_date(servers, model, tmp_path):
    """They get deltas; a restarted server gets all weights, and so do both from a run that goes on."""
    backend = Servers(model, [server.url for server in servers], tmp_path / "weights")
    engine = VLLMEngine(model, backend, eos_token_ids=[EOS])
    sent_bytes = []
    for step in range(5):
        if step == 3:
            servers[1].stop()
            servers[1].start()
        move(model, step)
        engine.policy_updated()
        sent_bytes.append(check_answers(engine, model))
    whole_bytes, *delta_bytes = sent_bytes
    assert all(size < whole_bytes / 4 for size in (*delta_bytes[:2], delta_bytes[3]))
    assert whole_bytes < delta_bytes[2] < whole_bytes * 1.25
    resumed = VLLMEngine(model, Servers(model, [servers[0].url], tmp_path / "weights"), eos_token_ids=[EOS])
    assert check_answers(resumed, model) == whole_bytes


def test_in_this_process(make_llm, untied_folder, caplog):
    """The copy is made of whole weights; a delta of others is refused, and the engine goes on with those it has."""
    llm = make_llm(worker_extension_cls=WORKER)
    model = load(untied_folder)
    states = []
    for step in range(3):
        states.append({name: weight.clone() for name, weight in model.state_dict().items()})
        move(model, step)

    def answers():
        from vllm import SamplingParams as Sampling

        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], Sampling(temperature=0, max_tokens=9),
                             use_tqdm=False)  # fmt: skip
        llm.reset_prefix_cache()
        return [list(output.outputs[0].token_ids) for output in outputs]

    def expected(state):
        model.load_state_dict(state)
        return [generate_greedy(model, prompt, 9) for prompt in PROMPTS]

    first_delta, second_delta = (weights.encode(new, old) for old, new in pairwise(states))
    assert llm.collective_rpc("load_policy", args=(first_delta,)) == [{"loaded": False}]
    whole_weights = (list(states[0].items()), None, True)
    assert llm.collective_rpc("load_policy", args=whole_weights) == [{"loaded": True}]
    assert answers() == expected(states[0])
    assert llm.collective_rpc("load_policy", args=(second_delta,)) == [{"loaded": False}]
    assert "the delta was not loaded: weights are not those that the delta was made from: 'model." in caplog.text
    for delta, state in zip((first_delta, second_delta), states[1:]):
        assert llm.collective_rpc("load_policy", args=(delta,)) == [{"loaded": True}]
        assert answers() == expected(state)
    assert expected(states[0]) != expected(states[2])
    check_weights_that_do_not_fit(llm, states[2], lambda: answers() == expected(states[2]))


def check_weights_that_do_not_fit(llm, state, goes_on):
    """Check that an error names them, and that the engine keeps its weights, or takes all as soon as they come."""

    def refuse(weights, error, message):
        with pytest.raises(error, match=message):
            llm.collective_rpc("load_policy", args=(weights, None, True))

    refuse([], ValueError, "weights must hold those of a model, got none")
    refuse({"model.norm.weight": [1.0]}, TypeError, "must be tensors by their names, got list for 'model.norm.weight'")
    query = "model.layers.0.self_attn.q_proj.weight"
    refuse({query: state[query] + 1}, ValueError, "must hold all of model.layers.0.self_attn.qkv_proj, got 4096 of")
    up = "model.layers.1.mlp.up_proj.weight"
    without_up = {name: weight + 1 for name, weight in state.items() if name != up}
    refuse(without_up, ValueError, "must hold all of model.layers.1.mlp.gate_up_proj, got 3072 of .*, without up_proj;")
    assert llm.collective_rpc("load_policy", args=(state,)) == [{"loaded": True}]
    assert goes_on()
    wrong_shape, unknown = {**state, query: state[query][:3]}, {**state, "model.layers.0.foo.weight": state[query]}
    refuse(wrong_shape, ValueError, rf"vLLM cannot load the weight {query} of shape \[3, 64\]")
    refuse(
        unknown, ValueError, r"vLLM cannot load the weight model.layers.0.foo.weight of shape .* named 'layers.0.foo'"
    )
    assert llm.collective_rpc("load_policy", args=(weights.encode(state, state),)) == [{"loaded": False}]
    assert llm.collective_rpc("load_policy", args=(state,)) == [{"loaded": True}]
    assert goes_on()
