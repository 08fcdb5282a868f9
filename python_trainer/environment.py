"""Environments: tools, games and users that take turns with the policy within an answer."""

from typing import ClassVar

from python_trainer.data import Example, Messages
from python_trainer.settings import Registry


class Environment:
    """One episode: the turns of one answer. ``task.environment`` names a subclass.

    Every answer has an object of its own, made without arguments. Its methods are called one after the other; methods
    of different objects run at the same time, each in a thread.

    Attributes:
        timeout: seconds for one step, the first with its reset; an answer whose step takes longer fails.
    """

    timeout: ClassVar[float] = 60.0

    def reset(self, example: Example) -> str | Messages:
        """Begin an episode; return its prompt, text or messages like the example's, the same for the same example.

        Called for every prompt when a run is set up, and again for every answer before its first :meth:`step`. Slow
        set-up belongs into :meth:`step`.
        """
        return example.prompt

    def step(self, text: str) -> tuple[str | Messages, float, bool]:
        """Return the reply to a turn of the policy, a reward, and whether the episode is over.

        The reply stands in the answer as it is. In a chat, text is a message of the user, and messages (of a tool, for
        example) go through the tokenizer's template. The rewards of an episode add up.

        Args:
            text: the policy's turn, with its special tokens but the end token.
        """
        raise NotImplementedError


ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", {}, classes=True, of=Environment)
