"""Stands in for vLLM within the trainer: tokens that depend on prompt and seed alone, and a memory that can be lost."""

import sys
from types import SimpleNamespace

from fake_vllm import LIMIT, draw

from python_trainer.rollout.vllm.engine import COUNTERS, DRAFT_COUNTERS


class FakeLLM:
    """Says in ``events`` what happens to it, and fails where the real one would: without weights or a cache."""

    def __init__(self, folder, **options):
        self.folder, self.options, self.events, self.loaded = folder, options, [], {}
        self.there = {"weights", "kv_cache"}
        self.model_config = SimpleNamespace(max_model_len=LIMIT)
        self.prompt_tokens = 0
        type(self).last = self

    def get_metrics(self):
        counts = {"vllm:prompt_tokens": self.prompt_tokens}
        names = COUNTERS | (DRAFT_COUNTERS if "speculative_config" in self.options else {})
        return [SimpleNamespace(name=name, value=counts.get(name, 0.0)) for name in names.values()]

    def sleep(self, level):
        assert self.options["enable_sleep_mode"] and self.there == {"weights", "kv_cache"}
        self.there, self.loaded, self.lost = set(), {}, self.loaded
        self.events.append(f"sleep {level}")

    def wake_up(self, tags):
        assert not self.there & set(tags)
        self.there |= set(tags)
        self.events += [f"wake {tag}" for tag in tags]

    def collective_rpc(self, method, args):
        assert method == "load_policy" and "weights" in self.there
        self.loaded = {name: weight.clone() for name, weight in args[0]}
        self.events.append("load" if "kv_cache" in self.there else "load without a cache")

    def generate(self, prompts, params, use_tqdm):
        assert self.there == {"weights", "kv_cache"} and self.loaded
        if self.events[-1] != "generate":
            self.events.append("generate")
        self.prompt_tokens += sum(one.n * len(p["prompt_token_ids"]) for p, one in zip(prompts, params, strict=True))
        return [
            SimpleNamespace(outputs=[self._output(choice) for choice in drawn["choices"]])
            for drawn in (draw(vars(one) | {"prompt": p["prompt_token_ids"]}) for p, one in zip(prompts, params))
        ]

    @staticmethod
    def _output(choice):
        pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        logprobs = [{token: SimpleNamespace(logprob=value)} for token, value in pairs]
        return SimpleNamespace(token_ids=choice["token_ids"], logprobs=logprobs, finish_reason=choice["finish_reason"])


def install(patch, *, sleeps):
    """Puts it in vLLM's place, on a device that can sleep or one that cannot; ``patch`` is pytest's."""
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "RANK", "LOCAL_RANK"):
        patch.setenv(name, "0")  # so that what is set comes undone
    module = SimpleNamespace(__version__="0.32.0", LLM=FakeLLM, SamplingParams=SimpleNamespace)
    patch.setitem(sys.modules, "vllm", module)
    patch.setattr("python_trainer.rollout.vllm.engine._can_sleep", lambda device: sleeps)
