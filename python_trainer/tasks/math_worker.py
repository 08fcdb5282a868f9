"""Judge mathematical answers with math-verify, one JSON line after the other; run by ``mathematics.py``.

A process of its own, because algebra on what a model wrote may never end, and nothing inside a process can stop it
for certain: math-verify's own limit is a signal handler, which needs the main thread and waits for long calls in C.
Here the timer of the system ends the process.
"""

import json
import logging
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

MAX_MEMORY_BYTES = 4 << 30  # bytes; numbers may grow faster than time passes
MARKED = re.compile(r"\\boxed|\\\(|\\\[|\$.*\$", re.DOTALL)  # the text says itself where its mathematics is


@lru_cache(4096)
def gold_value(gold: str) -> list[Any]:
    """Parse the known answer: bare LaTeX, text with marked mathematics, or GSM8K's with ``####``."""
    gold = gold.rpartition("####")[2].strip()
    if MARKED.search(gold):
        return parse(gold, parsing_timeout=None)
    bare = re.sub(r"(?<!\\)%", r"\\%", gold).replace("\\$", "").replace("$", "")  # % begins a comment, $ the end
    return parse(f"${bare}$", parsing_timeout=None)


def judge(completion: str, gold: str) -> bool | None:
    """Return whether the completion's answer equals the gold one; None where the gold one cannot be read."""
    try:
        expected = gold_value(gold)
    except Exception:
        expected = []
    if not expected:
        return None
    try:
        return verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None)
    except Exception:  # whatever parsers and algebra raise on a model's text: it is no right answer
        return False


def main() -> None:
    seconds, replies = float(sys.argv[1]), sys.stdout
    sys.stdout = sys.stderr
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    judge(r"$\frac{1}{2}$", "0.5")  # loads the parsers
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time, so that a busy machine judges alike
        verdict = judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
