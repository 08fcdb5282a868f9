"""A vLLM server that generates for the trainer is killed: all of it, or the process of its engine alone.

The server needs an environment with vLLM: this one, or the one that ``make test-vllm`` makes. Its policy has heads of
32 numbers, the least that vLLM's attention on a CPU takes.
"""

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench._vllm_server import ROOT, VLLMServer
from bench.faults.case import Case, Outcome, Place, with_
from bench.faults.training import STEPS, apart, processes_of, saved_steps
from python_trainer.run_directory import read_metrics

MEMORY_BYTES = 8 << 20  # of its KV cache
Kill = Callable[[VLLMServer], None]


def interpreter() -> Path | None:
    """That of an environment with vLLM."""
    if importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    found = ROOT / ".venv-vllm" / "bin" / "python"
    return found if found.exists() else None


def cases(times: int, seed: int) -> Iterator[Case]:
    python = interpreter()
    if python is None:
        print("not run: no environment has vLLM here (make test-vllm makes one)", flush=True)
        return
    servers: dict[Path, VLLMServer] = {}  # one for all, started with the first that is run
    try:
        for number in range(seed, seed + times):
            yield Case("the vLLM server killed", "plain", number, with_(killed, python, servers, VLLMServer.kill))
            yield Case(
                "the engine of the vLLM server killed", "plain", number, with_(killed, python, servers, kill_engine)
            )
    finally:
        for server in servers.values():
            server.stop()


def kill_engine(server: VLLMServer) -> None:
    """What listens stays for a while, and answers with errors."""
    assert server.process is not None
    engine = [pid for pid, name in processes_of([server.process.pid]).items() if "EngineCore" in name]
    os.kill(engine[0], signal.SIGKILL)


def killed(place: Place, case: Case, args: tuple[Path, dict[Path, VLLMServer], Kill]) -> Outcome:
    """The run ends with one line; with a new server at the same address it goes on."""
    python, servers, kill = args
    rng, outcome = random.Random(f"{case.fault}/{case.seed}"), Outcome()
    server = servers.get(place.root) or serve(place.root, python)
    servers[place.root] = server
    changes = using(place.root, server)
    untouched = place.untouched("vllm", changes)
    walls = [row["time/wall_s"] for row in read_metrics(untouched)]
    step_seconds = min(after - before for before, after in pairwise(walls))  # the first ones of a server take longer
    training = place.train(changes=changes)
    training.wait_for_step(rng.randint(0, STEPS - 4))
    time.sleep(rng.uniform(0, step_seconds))
    before = max(saved_steps(place.run), default=0)
    kill(server)
    ended = training.end()
    outcome.times = int(ended.code != 0)  # in the last update it needs no server
    place.check_end(outcome, ended, 0, 2)
    place.check_newest(outcome, before)
    outcome.expect(not (place.run / ".vllm").exists(), "weights for the server were left")
    server.kill()
    server.start()
    place.check_resume(outcome, untouched, changes)
    return outcome


def serve(root: Path, python: Path) -> VLLMServer:
    """Started, with the policy that it serves."""
    if not (root / "policy-vllm").exists():  # that of the run without a fault, which may be of an earlier time
        apart(write_policy, root)
    server = VLLMServer(python, root / "policy-vllm", root / "vllm.log", MEMORY_BYTES)
    server.start()
    return server


def write_policy(root: Path) -> None:
    """The policy of the other runs with larger heads."""
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = AutoConfig.from_pretrained(root / "policy", **heads)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "policy-vllm")
    AutoTokenizer.from_pretrained(root / "policy").save_pretrained(root / "policy-vllm")


def using(root: Path, server: VLLMServer) -> dict[str, Any]:
    """Settings of a run with this server."""
    return {
        "model": {"path": str(root / "policy-vllm"), "device": "cpu"},
        "rollout": {"engine": "vllm", "vllm_server": server.url},
    }
