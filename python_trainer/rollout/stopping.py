"""Stop strings, looked for in the text of the last few tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Tells when an answer (given prefix and all) has just come to contain one of the strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]):
        self.tokenizer, self.strings = tokenizer, strings
        # a token brings at least one byte; a few more tokens for a character that starts before the string
        self.window = max(len(string.encode()) for string in strings) + 4

    def ends(self, response_ids: Sequence[int]) -> bool:
        """True when the last token completes a stop string; one that was there before does not count."""
        tail = list(response_ids[-self.window :])
        now, before = (self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (tail, tail[:-1]))
        return any(now.count(string) > before.count(string) for string in self.strings)
