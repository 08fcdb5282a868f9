"""The critic of PPO: the reward that is still to come, predicted before every response token."""

from typing import Any

import torch

from python_trainer.model.forward import flat_inputs
from python_trainer.model.optimizer import MasterWeightAdamW
from python_trainer.model.packing import PackedRollouts
from python_trainer.model.policy import Policy, recompute_activations, recomputes
from python_trainer.model.settings import CriticConfig, OptimizerConfig
from rlkernels.integrations.transformers_attention import IMPLEMENTATION


class Critic(torch.nn.Module):
    """Values of packed answers: a linear layer, at first all zeros, on the last hidden states.

    They are the hidden states of the policy's own pass, whose weights then also learn to foresee rewards; or, with
    ``separate``, those of a second model that starts as a copy of the policy and shares nothing with it afterwards.

    Args:
        ranks: the RankGroup that shares the run; it copies that model of the policy's, and cuts the critic into shards.
    """

    def __init__(self, policy: Policy, config: CriticConfig, optimizer: OptimizerConfig, ranks: Any):
        super().__init__()
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.body: Any = None
        if config.separate:
            self.body = ranks.copy(policy.inference_model.base_model, trains=True)
            self.body.set_attn_implementation(IMPLEMENTATION)
            if recomputes(policy.model):  # not so what adapters were merged into, which only generates
                recompute_activations(self.body)
        self.head = torch.nn.Linear(width, 1, device=policy.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        ranks.shard(self)
        self.optimizer = MasterWeightAdamW(self, optimizer.model_copy(update={"learning_rate": config.learning_rate}))

    def forward(self, packed: PackedRollouts, states: torch.Tensor) -> torch.Tensor:
        """Predict values [M, L] float32, 0 where masked; ``states`` [R, H] come from ``Policy.token_logprobs``."""
        if self.body is not None:
            inputs = flat_inputs(packed.ids, packed.position_ids, packed.layout)
            states = self.body(**inputs).last_hidden_state[0, packed.rows]
        return packed.spread(self.head(states.float())[:, 0])
