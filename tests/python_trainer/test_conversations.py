"""Token ids of conversations: those of the whole text, with the policy's own tokens kept."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny_policy
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from python_trainer.command_line.sft import Sft
from python_trainer.data import Example
from python_trainer.errors import UserError
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig
from python_trainer.model.turns import find_turn_end, join_messages
from python_trainer.rollout.episodes import encode_after, encode_observation

TURNS = ("12+72", "is </calc>", "=84\n", "so 84 it is.", "why 84 \u00e9?")  # of the user and the policy in turn


@dataclass
class Shape:
    """A template, and the text around what is said: of the first message and of later ones, up to the policy's turn."""

    template: str
    end: str  # token that ends a turn of the policy
    first: str
    later: str


def shape(each, opening, end, message, *, turn_separator="", start=""):
    """Return a template that writes ``each`` for every message, and ``between`` after a turn of the policy."""
    return Shape(
        f"{start}{{% for m in messages %}}{each}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}",
        end, start + message, turn_separator + message,
    )  # fmt: skip


USER = "{% if m.role == 'user' %}"
SHAPES = {
    "ChatML": shape("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>",
                    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", turn_separator="\n"),
    # writes a space before the token that ends a turn
    "Llama 2": shape(USER + "<s>[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} </s>"
                     "{% endif %}", "", "</s>", "<s>[INST] {} [/INST]"),
    "Llama 3": shape("<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot_id|>",
                     "<|head|>assistant<|/head|>\n\n", "<|eot_id|>",
                     "<|head|>user<|/head|>\n\n{}<|eot_id|><|head|>assistant<|/head|>\n\n", start="<s>"),
    "Mistral": shape(USER + "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}", "", "</s>",
                     "[INST]{}[/INST]", start="<s>"),
    "Gemma": shape("<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
                   "<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>",
                   "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n", turn_separator="\n", start="<s>"),
    # ends a conversation in another token than a turn
    "Phi-3": shape("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% if loop.last and not add_generation_prompt %}</s>"
                   "{% endif %}", "<|assistant|>\n", "<|end|>", "<|user|>\n{}<|end|>\n<|assistant|>\n",
                   turn_separator="\n"),
    "Zephyr": shape("<|{{ m.role }}|>\n{{ m.content }}</s>\n", "<|assistant|>\n", "</s>",
                    "<|user|>\n{}</s>\n<|assistant|>\n", turn_separator="\n"),
    # leaves reasoning out of what has been said
    "DeepSeek": shape(USER + "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>"
                      "{% endif %}", "<|Assistant|>", "</s>", "<|User|>{}<|Assistant|>", start="<s>"),
    # closes a turn by two tokens, of which the policy writes both
    "Command-R": shape("<|turn|>{{ '<|bot|><|say|>' if m.role == 'assistant' else '<|human|>' }}{{ m.content }}"
                       "{{ '<|/say|>' if m.role == 'assistant' else '' }}<|/turn|>", "<|turn|><|bot|><|say|>",
                       "<|/say|><|/turn|>", "<|turn|><|human|>{}<|/turn|><|turn|><|bot|><|say|>", start="<s>"),
    "Vicuna": shape(USER + "USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}", "ASSISTANT:",
                    "</s>", "USER: {} ASSISTANT:"),
    # has no end token of its own
    "Alpaca": shape("{{ '### Instruction' if m.role == 'user' else '### Response' }}:\n{{ m.content }}\n\n",
                    "### Response:\n", "</s>", "### Instruction:\n{}\n\n### Response:\n", turn_separator="\n\n"),
    # closes the last turn otherwise than earlier ones
    "OLMo": shape("<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' and not loop.last %}</s>{% endif %}"
                  "{{ '\n' }}", "<|assistant|>\n", "</s>", "<|user|>\n{}\n<|assistant|>\n", turn_separator="\n"),
    # ends a turn by the token that opens the next one
    "GLM": Shape("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
                 "{% if add_generation_prompt %}<|assistant|>{% endif %}", "<|user|>", "<|user|>\n{}<|assistant|>",
                 "\n{}<|assistant|>"),
}  # fmt: skip
TRIMS = ("Llama 2", "Llama 3", "Gemma")
SPECIAL = sorted({
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>", "<|User|>", "<|Assistant|>", "<|turn|>", "<|/turn|>",
    "<|human|>", "<|bot|>", "<|say|>", "<|/say|>",
})  # fmt: skip
CORPUS = [
    "12 + 72 is </calc>=84 so 84 it is.\n\n### Instruction: why 84?",
    "USER: user ASSISTANT: assistant [INST] [/INST]",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)


def sentence_piece():
    """As Llama's: a space in front of every text, and of every one behind a special token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special_tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=special_tokens)


def word_level():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|\w+|[^\w\s]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, trainers.WordLevelTrainer(vocab_size=400, special_tokens=SPECIAL)


@pytest.fixture(scope="module", params=[byte_level, sentence_piece, word_level], ids=lambda make: make.__name__)
def policy(request, tmp_path_factory):
    tokenizer, trainer = request.param()
    tokenizer.train_from_iterator([*CORPUS, *TURNS], trainer)
    policy = load_policy(ModelConfig(path=str(save_tiny_policy(tmp_path_factory.mktemp("tiny"))), device="cpu"))
    policy.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    return policy


def ids_of(policy, text):
    return policy.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", SHAPES)
def test_a_conversation_has_the_tokens_of_its_template(policy, name):
    """Turn by turn the ids are those of the whole conversation, written out by hand."""
    shape = SHAPES[name]
    policy.tokenizer.chat_template = shape.template
    policy.eos_token_ids = sorted({ids_of(policy, shape.end)[-1], ids_of(policy, "</s>")[-1]})
    messages_text = [text.strip() if name in TRIMS else text for text in TURNS]
    texts = [shape.first.format(messages_text[0])]
    for policy_turn, reply in zip(messages_text[1::2], messages_text[2::2]):
        texts += [texts[-1] + policy_turn + shape.end, texts[-1] + policy_turn + shape.end + shape.later.format(reply)]
    prompt, *later = [ids_of(policy, text) for text in texts]
    messages = [{"role": "user", "content": TURNS[0]}]
    assert policy.encode([messages]) == [prompt]
    ids = prompt
    for turn, (policy_turn, with_reply) in enumerate(zip(later[::2], later[1::2])):
        # else the policy's tokens could not be kept
        assert policy_turn[: len(ids)] == ids and with_reply[: len(policy_turn)] == policy_turn
        content, reply = TURNS[2 * turn + 1 : 2 * turn + 3]
        messages += [{"role": "assistant", "content": content}]
        observation = encode_observation(policy, policy_turn, messages, reply)
        assert policy_turn + observation == with_reply, policy.tokenizer.decode(observation)
        messages += [{"role": "user", "content": reply}]
        ids = with_reply


@pytest.mark.parametrize("name", SHAPES)
def test_a_last_message_of_the_assistant_is_continued(policy, name):
    """TRL also leaves the prompt of such a row open."""
    data_utils = pytest.importorskip("trl.data_utils")
    form = SHAPES[name]
    policy.tokenizer.chat_template = form.template
    messages = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": "is 8"}]
    between = {"Llama 2": " ", "Vicuna": " ", "GLM": "\n"}.get(name, "")  # written with the content
    ids = ids_of(policy, form.first.format(TURNS[0]) + between + "is 8")
    assert policy.encode([messages, messages[:1]]) == [ids, ids_of(policy, form.first.format(TURNS[0]))]
    assert ids_of(policy, data_utils.apply_chat_template({"prompt": messages}, policy.tokenizer)["prompt"]) == ids


def test_a_turn_that_continues_a_message_is_one_message(policy):
    """Mistral's template, for example, refuses two messages of the assistant after one another."""
    policy.tokenizer.chat_template = SHAPES["ChatML"].template
    policy.eos_token_ids = ids_of(policy, "<|im_end|>")[-1:]
    opening = [{"role": "user", "content": "12+72"}, {"role": "assistant", "content": "is "}]
    new_messages = [{"role": "assistant", "content": "84"}, {"role": "user", "content": "why 84?"}]
    text = "<|im_start|>user\n12+72<|im_end|>\n<|im_start|>assistant\nis 84<|im_end|>"
    assert join_messages(opening, new_messages) == [
        opening[0],
        {"role": "assistant", "content": "is 84"},
        new_messages[1],
    ]
    observation = encode_observation(policy, ids_of(policy, text), join_messages(opening, new_messages[:1]), "why 84?")
    expected = f"{text}\n<|im_start|>user\nwhy 84?<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(policy, text) + observation == ids_of(policy, expected)
    assert join_messages(opening[:1], new_messages) == [opening[0], *new_messages]


# the end token of the tokenizer is </s>; without it in the generation config GLM's template does not tell where to stop
ENDS = {name: form.end for name, form in SHAPES.items()} | {"Alpaca": "", "GLM": ""}


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_of_a_turn_is_found_in_the_template(policy, name):
    policy.tokenizer.chat_template = SHAPES[name].template
    policy.eos_token_ids = ids_of(policy, "</s>")[-1:]
    special = [token for token in ids_of(policy, ENDS[name]) if token in policy.tokenizer.added_tokens_decoder]
    assert find_turn_end(policy) == special
    if name == "GLM":
        policy.eos_token_ids = ids_of(policy, "<|user|>")[-1:]
        assert find_turn_end(policy) == policy.eos_token_ids


@pytest.mark.parametrize("name", [None, "fixed", "strict"])
def test_templates_that_do_not_show_a_turn_have_no_end(policy, name):
    templates = {"fixed": "{{ messages | length }}</s>", "strict": "{{ raise_exception('no') }}"}
    policy.tokenizer.chat_template = templates.get(name)
    assert find_turn_end(policy) == []


@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_supervised_answers_have_the_tokens_of_the_template(policy, name, column):
    """A text prompt has the tokens of its text; a chat without a column answer ends with the answer."""
    shape = SHAPES[name]
    policy.tokenizer.chat_template = shape.template
    policy.eos_token_ids = ids_of(policy, "</s>")[-1:]
    policy.turn_end = find_turn_end(policy)
    end = "</s>" if not policy.turn_end else shape.end.replace(" ", "")
    messages = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": "84 = 12+72"}]
    chat = Example(messages[:1], {"answer": "84 = 12+72"}) if column else Example(messages)
    run = SimpleNamespace(policy=policy)
    chat_answer, text_answer = Sft.answers(run, "train", [chat, Example("12+", {"answer": 72})])
    chat_text = shape.first.format(TURNS[0]) + "84 = 12+72" + end
    assert chat_answer.prompt_ids + chat_answer.response_ids == ids_of(policy, chat_text)
    assert policy.tokenizer.decode(text_answer.prompt_ids + text_answer.response_ids) == "12+72</s>"


def test_answers_keep_all_special_tokens_but_the_end(policy):
    policy.eos_token_ids = sorted(ids_of(policy, text)[-1] for text in ("</s>", "<|/turn|>"))
    policy.turn_end = [ids_of(policy, text)[-1] for text in ("<|/say|>", "<|/turn|>")]
    for text, ended in (
        ("<|head|>12+72</s>", "<|head|>12+72"),
        ("12 =84<|/say|><|/turn|>", "12 =84"),
        ("12<|/say|> is 84", "12<|/say|> is 84"),
        ("<|user|>84<|/turn|>", "<|user|>84"),
    ):
        ids = ids_of(policy, text)
        assert policy.decode(ids) == policy.tokenizer.decode(ids_of(policy, ended)), text
    assert policy.decode([]) == policy.decode(ids_of(policy, "</s>")[-1:]) == ""


def test_a_turn_without_an_end_token_is_closed(policy):
    """A turn that a stop string has ended gets what the template writes after it; tools speak through the template."""
    policy.tokenizer.chat_template = SHAPES["ChatML"].template
    policy.eos_token_ids = ids_of(policy, "<|im_end|>")[-1:]
    text = "<|im_start|>user\n12+72<|im_end|>\n<|im_start|>assistant\nis </calc>"
    messages = [{"role": "user", "content": "12+72"}, {"role": "assistant", "content": "is </calc>"}]
    observation = encode_observation(policy, ids_of(policy, text), messages, [{"role": "user", "content": "84"}])
    expected = f"{text}<|im_end|>\n<|im_start|>user\n84<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(policy, text) + observation == ids_of(policy, expected)
    policy.tokenizer.chat_template = "{{ messages | length }}"
    with pytest.raises(UserError, match="does not show what the assistant says"):
        encode_observation(policy, ids_of(policy, text), messages, "84")


WORDS = st.lists(st.sampled_from(["12", "84", "+", "=", "==", "</calc>", "is", " ", "\n"]), max_size=8).map("".join)


@settings(max_examples=60, deadline=None)
@given(answer=WORDS.filter(bool), observation=WORDS)
def test_an_observation_is_read_as_it_was_said(policy, answer, observation):
    """No space comes in between, and none is lost, whatever would merge."""
    ids = ids_of(policy, answer)
    observation_ids = encode_after(policy, ids, observation)
    if policy.tokenizer.unk_token_id not in observation_ids:
        assert policy.tokenizer.decode(ids + observation_ids) == policy.tokenizer.decode(ids) + observation
    joint_ids = ids_of(policy, answer + observation)
    assert ids + observation_ids == joint_ids or joint_ids[: len(ids)] != ids or policy.tokenizer.unk_token_id in ids


def test_messages_to_a_text_are_refused(policy):
    ids = ids_of(policy, "12 + 72 is </calc>")
    assert policy.tokenizer.decode(encode_observation(policy, ids, None, "=84")) == "=84"
    with pytest.raises(UserError, match="said messages to a prompt that is text"):
        encode_observation(policy, ids, None, [{"role": "tool", "content": "78"}])
