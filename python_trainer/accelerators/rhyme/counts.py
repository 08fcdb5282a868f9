"""What came of the stored answers in a step."""

from dataclasses import dataclass


@dataclass
class Counts:
    """Over all rounds of dynamic sampling."""

    step: int = 0
    groups: int = 0
    with_candidates: int = 0  # of the groups
    candidates: int = 0
    near: int = 0  # of the candidates, to the present policy
    weight: float = 0.0  # of importance, summed over the candidates
    spared: int = 0  # fresh answers that were left out
    fresh: int = 0  # answers
    stored: int = 0  # answers that joined
    passed_over: int = 0  # candidates that others were ranked before
    failed: int = 0  # groups without a right fresh answer
    rescued: int = 0  # of those, groups with a stored one

    def metrics(self) -> dict[str, float]:
        looked = max(self.candidates, 1)
        found = {"too_far": 1 - self.near / looked, "weight": self.weight / looked} if self.candidates else {}
        own = found | {
            "prompts_with_candidates": self.with_candidates / max(self.groups, 1),
            "candidates": self.candidates,
            "spared_answers": self.spared,
            "stored_answers": self.stored,
            "stored_share": self.stored / max(self.fresh + self.stored, 1),
            "passed_over": self.passed_over,
            "failed_groups": self.failed / max(self.groups, 1),
            "rescued_groups": self.rescued / max(self.groups, 1),
        }
        return {f"rhyme/{name}": float(value) for name, value in own.items()}
