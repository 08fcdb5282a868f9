"""Environments: what a policy has turns with while it answers a prompt."""

from python_trainer.data import Example, Messages
from python_trainer.registry import Registry


class Environment:
    """One episode: the turns of one answer. A subclass is the plug-in, which ``task.environment`` names.

    Every answer has an object of its own, made without arguments. Its methods are called one after the other, those of
    different objects at the same time, each in a thread.
    """

    def reset(self, example: Example) -> str | Messages:
        """Begins an episode -> its prompt, of the kind that the example's is; the same for the same example.

        Called for every prompt when a run is set up, and again for every answer, before its first :meth:`step`: what is
        slow or costly to begin belongs there.
        """
        return example.prompt

    def step(self, text: str) -> tuple[str | Messages, float, bool]:
        """What the policy wrote in its turn -> what it is told, a reward, and whether the episode is over.

        What it is told stands in the answer as it is; of a chat, text is a message of the user, and messages (of a
        tool, for example) go through the tokenizer's template. The rewards of an episode add up.
        """
        raise NotImplementedError


ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", {}, classes=True, of=Environment)
