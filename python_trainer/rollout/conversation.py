"""Token ids of what an environment says, as they stand in the whole conversation."""

from collections.abc import Sequence
from itertools import count, takewhile

from python_trainer.data import Messages
from python_trainer.errors import UserError
from python_trainer.model.policy import Policy

TAIL = 64  # tokens before a text that decide how it is divided into tokens
ANCHORS = (".", "0", "a", "\n")  # one of them does not merge with the text's first character


def encode_observation(
    policy: Policy, ids: Sequence[int], messages: Messages | None, said: str | Messages
) -> list[int]:
    """Returns token ids of what is said after a turn of the policy, up to where its next turn begins.

    Of a chat: what the template writes after the turn, without the end of the turn where the policy wrote one.

    Args:
        ids: of the conversation up to the end of the turn, which stay as they are.
        messages: the same in a chat, the policy's turn last; None: the prompt is text.

    Raises:
        UserError: messages outside of a chat, or a template that refuses them or does not show the assistant's.
    """
    if messages is not None:
        return encode_after(policy, ids, _text_after_turn(policy, messages, as_messages(said), ids[-1]))
    if not isinstance(said, str):
        raise UserError(f"an environment said messages to a prompt that is text: {said!r:.80}; allowed: text")
    return encode_after(policy, ids, said)


def as_messages(said: str | Messages) -> Messages:
    """Returns text as a message of the user."""
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


def encode_after(policy: Policy, ids: Sequence[int], text: str) -> list[int]:
    """Returns the token ids of a text that continues these tokens.

    By itself it would get other ones: SentencePiece puts a space in front, and some tokens strip what follows them.
    """

    def encode(text: str) -> list[int]:
        return list(policy.tokenizer(text, add_special_tokens=False)["input_ids"])

    before = policy.tokenizer.decode(list(ids[-TAIL:]), clean_up_tokenization_spaces=False)
    for anchor in (before, *ANCHORS):
        head, whole = encode(anchor), encode(anchor + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return encode(text)


def _text_after_turn(policy: Policy, messages: Messages, said: Messages, last: int) -> str:
    """Returns what the template writes after the policy's turn, which ended in the token ``last``."""
    mark = next(mark for number in count() if (mark := f"<<turn{number}>>") not in str([messages, said]))
    turn = [*messages[:-1], messages[-1] | {"content": mark}]
    _, found, text = policy.chat_text([*turn, *said]).partition(mark)
    if not found:
        raise UserError(f"the chat template of {policy.name} does not show what the assistant says")
    if last not in policy.eos_token_ids:
        return text
    # the policy's end token stands for what closes the turn: up to an end token, or to some other special token
    alone = policy.chat_text(turn, opens=False).partition(mark)[2]
    closing = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, text)))
    ends = [policy.tokenizer.decode([token]) for token in policy.eos_token_ids]
    special = [token.content for token in policy.tokenizer.added_tokens_decoder.values() if token.special]
    for tokens in (ends, special):
        if found_ends := [closing.index(token) + len(token) for token in tokens if token in closing]:
            return text[min(found_ends) :]
    # some templates close a turn only where another follows, or by the token that opens the next
    rest = text.lstrip()
    own = policy.tokenizer.decode([last])
    return rest.removeprefix(own) if rest.startswith(own) else text
