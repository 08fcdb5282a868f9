"""A backend of vLLM's weight transfer for tests on a CPU: weights go through a file, in the steps of its NCCL backend.

``Worker`` is for ``--worker-extension-cls``: its module is imported in the server's worker before the engine is made.
"""

from dataclasses import dataclass
from typing import ClassVar

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlkernels.integrations.vllm_worker import PolicyWorker

NAME = "letters"


@dataclass
class LettersInit(WeightTransferInitInfo):
    box: str


@dataclass
class LettersUpdate(WeightTransferUpdateInfo):
    names: list[str]


@dataclass
class LettersTrainerInit(TrainerInitInfo):
    backend: ClassVar[str] = NAME
    box: str


class Receiver(WeightTransferEngine[LettersInit, LettersUpdate]):
    init_info_cls, update_info_cls = LettersInit, LettersUpdate

    def init_transfer_engine(self, init_info):
        self.box = init_info.box

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))  # without waiting for an accelerator

    def receive_weights(self, update_info):
        weights = load_file(self.box)
        assert list(weights) and set(weights) == set(update_info.names)
        self.model.load_weights((name, weights[name]) for name in update_info.names)

    def shutdown(self):
        pass


class Sender(TrainerWeightTransferEngine[LettersTrainerInit]):
    init_info_cls = LettersTrainerInit

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(client=client, source=source)
        engine.box = init_info.box
        client.init_weight_transfer_engine({"box": init_info.box})
        return engine

    def send_weights(self):
        save_file({name: weight.contiguous() for name, weight in self.source}, self.box)
        self.client.start_weight_update()
        self.client.update_weights({"names": [meta.name for meta in self.source.metadata()]})
        self.client.finish_weight_update()


class LettersWorker(PolicyWorker):
    """The worker of the trainer, and with it the backend."""


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, Receiver)
    WeightTransferTrainerFactory.register_engine(NAME, Sender)
