"""Losslessness: how often the engine draws each token, against the exact probabilities, over random settings.

    python -m bench.studies.lossless --settings 1000

A setting is a random policy, prompt, prefix, temperature, top-k, top-p and block size, with or without drafts from a
history. :class:`python_trainer.rollout.PagedEngine` draws 1,000 answers. A chi-square test compares the first tokens
with the exact probabilities, and another the tokens after the most frequent first token; tokens with an expected count
below five form one cell. The p-values of a lossless engine are uniform, which a Kolmogorov-Smirnov test checks. Each
setting is a row of the records; a recorded setting is not drawn again.
"""

import argparse
import csv
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from transformers import Qwen2Config, Qwen2ForCausalLM

from bench._runner import commit
from python_trainer.data import Request
from python_trainer.rollout.drafting import Drafter
from python_trainer.rollout.engine import SamplingParams
from python_trainer.rollout.paged.engine import PagedEngine
from rlkernels import RolloutHistory

RECORDS = Path(__file__).parent / "results" / "lossless.csv"
VOCAB = 24
DRAWS = 1000
MIN_EXPECTED = 5  # expected count of a cell
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": 32}  # fmt: skip
DRAWN = ("prompt", "prefix", "temperature", "top_p", "top_k", "block_size", "drafts")
P_VALUES = ("first", "second")  # empty: nothing to test, as with one token that is certain


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.lossless", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first setting")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(args.seed, args.seed + args.settings)
    rows = read_rows(args.records)
    for seed in seeds:
        if seed not in rows:
            values, drawn = setting_p_values(seed)
            append_row(args.records, {"seed": seed, **drawn, **dict(zip(P_VALUES, values)), "commit": commit()})
    rows = {seed: row for seed, row in read_rows(args.records).items() if seed in seeds}
    print("\n".join(summary(list(rows.values()))))


def read_rows(path: Path) -> dict[int, dict[str, str]]:
    """Return the rows by the seed of their setting."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {int(row["seed"]): row for row in csv.DictReader(file)}


def append_row(path: Path, row: dict[str, Any]) -> None:
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["seed", *DRAWN, *P_VALUES, "commit"], lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def summary(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return a line for all settings, and one each for those with and without drafts."""
    lines = []
    subsets = {"all": rows}
    for value in ("0", "1"):
        subsets[f"drafts {value}"] = [row for row in rows if row["drafts"] == value]
    for name, subset in subsets.items():
        values = [float(row[column]) for row in subset for column in P_VALUES if row[column]]
        if values:
            lines.append(
                f"{name}: {len(subset):,} settings, {len(values):,} p-values, smallest {min(values):.2g}, "
                f"Kolmogorov-Smirnov against uniform p = {uniform_p_value(values):.3f}"
            )
    return lines or ["nothing could be judged: --settings must be larger"]


def uniform_p_value(values: Sequence[float]) -> float:
    return float(stats.kstest(values, "uniform").pvalue)


@torch.no_grad()
def setting_p_values(seed: int) -> tuple[list[float | None], dict[str, Any]]:
    """Return one setting's p-values of the first token and of the second after the likeliest first, and the draws."""
    rng = random.Random(f"lossless/{seed}")
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=VOCAB, **SIZES, initializer_range=0.5, eos_token_id=None, bos_token_id=None)
    model = Qwen2ForCausalLM(config).eval()
    prompt, prefix = ([rng.randrange(VOCAB) for _ in range(n)] for n in (rng.randint(1, 8), rng.choice([0, 0, 3])))
    temperature = rng.choice([0.3, 0.7, 1.0, 1.5])
    top_p = rng.choice([1.0, 1.0, 0.9, 0.6])
    top_k = rng.choice([0, 0, 1, 2, 7])
    block_size = rng.choice([4, 16])
    drafts = rng.random() < 0.5
    drafter = Drafter(make_useless_history(rng, prompt, prefix), pass_overhead=1e9) if drafts else None
    drawn = (len(prompt), len(prefix), temperature, top_p, top_k, block_size, int(drafts))
    engine = PagedEngine(model, eos_token_ids=(), memory_bytes=1 << 20, block_size=block_size)
    engine.drafter = drafter
    request = Request(prompt, prefix, num_generations=DRAWS, max_new_tokens=2)
    answers = [answer.ids for answer in engine.generate([request], SamplingParams(temperature, top_p, top_k, seed))]

    def exact(ids: list[int]) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        return distribution(logits, temperature, top_p, top_k)

    first = Counter(ids[0] for ids in answers)
    likeliest = max(first, key=lambda token: (first[token], -token))
    second = Counter(ids[1] for ids in answers if ids[0] == likeliest)
    first_p = p_value(first, exact([*prompt, *prefix]))
    second_p = p_value(second, exact([*prompt, *prefix, likeliest]))
    return [first_p, second_p], dict(zip(DRAWN, drawn))


def make_useless_history(rng: random.Random, prompt: list[int], prefix: list[int]) -> RolloutHistory:
    """Make a history whose drafts are random."""
    history = RolloutHistory()
    for _ in range(8):
        history.add(prompt, [*prefix, *(rng.randrange(VOCAB) for _ in range(2))], reward=1.0, epoch=0)
    return history


def distribution(logits: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """Return float64 [V]: after the temperature, cut to the ``top_k`` largest, then to the fewest with ``top_p``."""
    probs = torch.softmax(logits.double() / temperature, 0)
    order = probs.argsort(descending=True, stable=True)
    top_probs = probs[order][: top_k or None]
    top_probs = top_probs / top_probs.sum()
    top_probs = top_probs * (top_probs.cumsum(0) - top_probs < top_p)
    return torch.zeros_like(probs).scatter_(0, order[: len(top_probs)], top_probs / top_probs.sum())


def p_value(counts: Counter[int], probs: torch.Tensor) -> float | None:
    """Return the p-value of the counts; 0 if an impossible token came, None without enough counts."""
    total = sum(counts.values())
    if any(probs[token] == 0 for token in counts):
        return 0.0
    pairs = [(float(p) * total, counts[token]) for token, p in enumerate(probs.tolist())]
    cells = [pair for pair in pairs if pair[0] >= MIN_EXPECTED]
    rare = [pair for pair in pairs if pair[0] < MIN_EXPECTED]
    rare_expected = sum(expected for expected, _ in rare)
    if rare_expected >= MIN_EXPECTED:
        cells.append((rare_expected, sum(count for _, count in rare)))
    if len(cells) < 2:
        return None
    observed = [count for _, count in cells]
    scale = sum(observed) / sum(expected for expected, _ in cells)
    return float(stats.chisquare(observed, [expected * scale for expected, _ in cells]).pvalue)


if __name__ == "__main__":
    main()
