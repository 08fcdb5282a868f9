"""A real language model learns to write under constraints; ``make language`` runs the first of them.

- ``keys``: one short sentence with three given words, no two of them side by side.
- ``near``: one sentence of a given number of words, one more or less; ``count``: exactly that many.
- ``form``: five lines, as in two worked examples; the last one is a sentence with two given words. An answer takes up
  to 80 tokens (``rollout.max_completion_length``).

SmolLM2-135M meets each constraint now and then, so training needs no supervised steps. These tasks check mechanisms;
they do not stand for a real use. From this folder, after ``python ../tools/smollm2.py ../runs/smollm2``:

    python -m python_trainer train --config sentences.yaml --output-dir ../runs/language
"""

import itertools
import random
import re
from typing import Literal

from python_trainer.data import Example
from python_trainer.tasks import Task, TaskSettings

WORDS = (
    "apple baker beach bird book bread bridge camera car cat castle chair city clock cloud coat coffee "
    "desert doctor dog engine farmer fish flower forest garden hat horse island kitchen lake lamp letter "
    "lion market mirror moon mountain music ocean orange painter phone rain river road robot school ship "
    "shoe singer star storm summer table teacher tiger train tree truck village window winter "
)
NOUNS = WORDS.split()
LENGTHS = range(5, 15)  # words of a sentence, in `near` and `count`
LABELS = ("Name", "Looks", "Food", "Home", "Story")  # of the lines of a form
WORKED_FORMS = (  # subject, two words, and the form
    (
        ("dog", "tree", "rain"),
        "Name: Max the dog\nLooks: brown fur and a long tail\nFood: meat, bread and milk\n"
        "Home: a small house by the lake\nStory: The dog waited under a tree until the rain was over.",
    ),
    (
        ("singer", "lamp", "bridge"),
        "Name: Ada the singer\nLooks: long red hair and a green coat\nFood: apples, cheese and tea\n"
        "Home: a room above the school\nStory: The singer left her lamp on the bridge and went home.",
    ),
)


def words_of(text):
    """Return the words of a text in lower case."""
    return re.findall("[a-z'-]+", text.lower())


def is_sentence(text):
    """Tell whether a text is one line that begins with a capital and ends with its only full stop."""
    return text[:1].isupper() and text.find(".") == len(text) - 1 and "\n" not in text


def varied(words, share):
    """Tell whether at least this share of the words are different ones."""
    return len(set(words)) >= share * len(words)


def has_keys(text, keys):
    """Tell whether a text is a sentence of 8 to 20 words that holds all keys, with another word between any two."""
    words = words_of(text)
    if not (is_sentence(text) and 8 <= len(words) <= 20 and varied(words, 0.7) and set(keys) <= set(words)):
        return False
    places = sorted(words.index(key) for key in keys)
    return all(after - before > 1 for before, after in itertools.pairwise(places))


def has_length(text, subject, length, tolerance):
    """Tell whether a text is a sentence about the subject whose number of words is within the tolerance."""
    words = words_of(text)
    right_length = abs(len(words) - length) <= tolerance
    return is_sentence(text) and right_length and subject in text.lower() and varied(words, 0.8)


def first_wrong_line(text, keys):
    """Return the index of the first line of a form that is wrong, or None.

    A line is right if it has its label and one to 12 words; the last one if it has its label and a sentence with the
    keys.
    """
    lines = text.split("\n")
    for index, label in enumerate(LABELS):
        line = lines[index] if index < len(lines) else ""
        entry = line.removeprefix(f"{label}: ")
        right = has_keys(entry, keys) if label == LABELS[-1] else 1 <= len(words_of(entry)) <= 12
        if entry == line or not right:
            return index
    return None if len(lines) == len(LABELS) else len(LABELS)


def texts_of(completions):
    """Return the texts of chat completions, each of which is a list with one message."""
    return [completion[0]["content"].strip() for completion in completions]


def keys(prompts, completions, completion_ids, words, **columns):
    """Return 1 for each completion that holds its prompt's words, else 0."""
    return [float(has_keys(text, keys)) for text, keys in zip(texts_of(completions), words, strict=True)]


def near(prompts, completions, completion_ids, subject, length, **columns):
    """Return 1 for each completion whose number of words is right within one, else 0."""
    rows = zip(texts_of(completions), subject, length, strict=True)
    return [float(has_length(*row, tolerance=1)) for row in rows]


def count(prompts, completions, completion_ids, subject, length, **columns):
    """Return 1 for each completion whose number of words is right, else 0."""
    rows = zip(texts_of(completions), subject, length, strict=True)
    return [float(has_length(*row, tolerance=0)) for row in rows]


def form(prompts, completions, completion_ids, words, **columns):
    """Return 1 for each completion that is a form with its prompt's words in the last line, else 0."""
    rows = zip(texts_of(completions), words, strict=True)
    return [float(first_wrong_line(text, words[1:]) is None) for text, words in rows]


REWARDS = {"keys": keys, "near": near, "count": count, "form": form}
TEST_SIZE = 256


def user_message(text):
    """Return a prompt of one message, which the model's chat template wraps."""
    return [{"role": "user", "content": text}]


def keys_prompt(words):
    """Return the prompt of a sentence with three words."""
    return user_message(f"Write one short sentence with the words {words[0]}, {words[1]} and {words[2]}.")


def form_prompt(words):
    """Return the prompt of a form about the first word, after two worked examples."""
    messages = []
    for (subject, *keys), answer in (*WORKED_FORMS, (words, "")):
        request = (
            f"Fill in the form about a {subject}: {', '.join(LABELS)}. The story has the words {' and '.join(keys)}."
        )
        messages += [*user_message(request), {"role": "assistant", "content": answer}]
    return messages[:-1]


def draw_words(rng, number, prompt_of):
    """Draw this many prompts of three words, no two with the same three."""
    drawn = {}
    while len(drawn) < number:
        words = rng.sample(NOUNS, 3)
        drawn.setdefault(frozenset(words), Example(prompt_of(words), {"words": words}))
    return list(drawn.values())


def draw_lengths(rng):
    """Return a prompt for every subject and length, shuffled."""
    examples = []
    for subject, length in itertools.product(NOUNS, LENGTHS):
        prompt = f"Write one sentence about a {subject} with exactly {length} words."
        examples.append(Example(user_message(prompt), {"subject": subject, "length": length}))
    rng.shuffle(examples)
    return examples


class SentencesSettings(TaskSettings):
    """Settings of the tasks: those of all tasks, and the constraint."""

    name: str = "sentences:SentencesSettings"
    constraint: Literal["keys", "near", "count", "form"] = "keys"
    """What an answer must meet."""

    def load(self) -> Task:
        rng = random.Random(0)
        gate_size = self.gate_size or 0
        prompts = {"keys": keys_prompt, "form": form_prompt}
        prompt_of = prompts.get(self.constraint)
        examples = draw_words(rng, 768 + gate_size, prompt_of) if prompt_of else draw_lengths(rng)
        rest = len(examples) - gate_size
        train, test, gate = examples[: rest - TEST_SIZE], examples[rest - TEST_SIZE : rest], examples[rest:]
        rewards = {self.constraint: REWARDS[self.constraint]}
        return Task("sentences", train[: self.train_size], test[: self.test_size], rewards, gate)
