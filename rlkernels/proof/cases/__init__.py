"""One set of cases for the proof on a user's GPU and for ``bench.gpu``: ops that have a GPU kernel of ours."""

from rlkernels.proof.cases import attention, logits, rank1, similarity
from rlkernels.proof.problem import Case
from rlkernels.proof.workload import Workload

CASE_MODULES = (attention, logits, rank1, similarity)
SMALL: list[Case] = [case for module in CASE_MODULES for case in module.SMALL]


def cases_of(workload: Workload) -> list[Case]:
    """Return the small cases, which any workload has to pass, and the timed ones of this workload."""
    return SMALL + [case for module in CASE_MODULES for case in module.timed(workload)]
