"""How tokens begin and end texts, and turns of a chat."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from python_trainer.data import Messages
from python_trainer.errors import UserError


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[list[list[int]], int]:
    """Encode texts with the tokenizer's special tokens around them; a text that begins with them gets no second ones.

    Returns:
        The token ids of each text, and how many special tokens end each of them.
    """
    rows: list[list[int]] = [list(row) for row in tokenizer(list(texts))["input_ids"]] if texts else []
    bare = list(tokenizer("0", add_special_tokens=False)["input_ids"])
    wrapped = list(tokenizer("0", add_special_tokens=True)["input_ids"])
    starts = [start for start in range(len(wrapped)) if bare and wrapped[start : start + len(bare)] == bare]
    if not starts:
        return rows, 0
    front = wrapped[: starts[0]]
    if set(front) <= set(tokenizer.all_special_ids):  # the text may have begun with them
        length = len(front)
        rows = [row[length:] if row[length : 2 * length] == front else row for row in rows]
    return rows, len(wrapped) - len(front) - len(bare)


def find_stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Find the tokens that end an answer, smallest first: of the generation config and of the tokenizer.

    The model's config has a say only where the generation config names none.

    Raises:
        UserError: the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no EOS token: set eos_token in its tokenizer_config.json")
    for source in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            break
    return sorted({tokenizer.eos_token_id, *([ids] if isinstance(ids, int) else ids or [])})


def find_turn_end(policy: Any) -> list[int]:
    """Find the tokens with which the chat template closes a turn of the policy, such as ``<|im_end|>``.

    The last of them ends the turn: a known stop token, or else the last added token before the next turn opens.

    Args:
        policy: with ``chat_text``, a tokenizer and ``eos_token_ids``, the known stop tokens.

    Returns:
        Their ids; empty without a template, or with one that closes turns by text alone.
    """
    user = [{"role": "user", "content": "0"}]
    try:
        closing, following = after_turn(policy, [*user, {"role": "assistant", "content": ""}], user)
    except UserError:  # no template, or one that wants other messages
        return []
    tokenizer, stops = policy.tokenizer, policy.eos_token_ids
    added = tokenizer.added_tokens_decoder
    closes, follows = (
        [token for token in tokenizer(text, add_special_tokens=False)["input_ids"] if token in added]
        for text in (closing, following)
    )
    for place, token in enumerate(closes):
        if token in stops:
            return closes[: place + 1]
    if closes:
        return closes
    # some templates close a turn only where another follows, or by the token that opens the next
    return follows[:1] if follows and follows[0] in stops else []


def missing_stop_token(policy: Any, answers: Sequence[Sequence[int]]) -> int | None:
    """Return the special token that most of these answers, which were cut, hold first; None if there is none.

    Args:
        answers: token ids that the policy wrote, without stop tokens.
    """
    special = {token for token, added in policy.tokenizer.added_tokens_decoder.items() if added.special}
    first = Counter(next((token for token in ids if token in special), None) for ids in answers)
    token, count = max(first.items(), key=lambda item: item[1], default=(None, 0))
    return token if count > len(answers) / 2 else None


def after_turn(policy: Any, messages: Messages, following: Messages) -> tuple[str, str]:
    """Return the text that closes the last turn of ``messages``, and all text after its content before ``following``.

    Raises:
        UserError: there is no template, it refuses the messages, or it does not show what the assistant says.
    """
    mark = next(mark for number in itertools.count() if (mark := f"<<turn{number}>>") not in str([messages, following]))
    turn = [*messages[:-1], messages[-1] | {"content": mark}]
    _, shown_mark, text_before_following = policy.chat_text([*turn, *following]).partition(mark)
    if not shown_mark:
        raise UserError(f"the chat template of {policy.name} does not show what the assistant says")
    text_at_end = policy.chat_text(turn, opens=False).partition(mark)[2]
    closing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text_at_end, text_before_following))
    return "".join(letter for letter, _ in closing), text_before_following


def join_messages(opening: Messages, messages: Messages) -> Messages:
    """Return a conversation; its first answer continues the last message of ``opening`` if the assistant wrote that."""
    if opening[-1]["role"] != "assistant":
        return [*opening, *messages]
    content = opening[-1]["content"] + messages[0]["content"]
    return [*opening[:-1], opening[-1] | {"content": content}, *messages[1:]]
