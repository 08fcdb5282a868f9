"""examples/vllm_drafts.py, as somebody would run it, and what docs/integrations.md says that it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example(tmp_path):
    page = (ROOT / "docs/integrations.md").read_text()
    (printed,) = re.findall(r"^python examples/vllm_drafts.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    printed = re.sub(r"^# ", "", printed, flags=re.MULTILINE)
    example = str(ROOT / "examples/vllm_drafts.py")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, example], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    counts = r"(\d+) tokens in (\d+) steps of a sequence: (\d+) of (\d+) draft tokens accepted\n"
    tokens, steps, right, offered = map(int, re.search(counts, done.stdout).groups())
    assert re.search(counts, printed) and tokens == steps + right
    assert right > offered / 2 and tokens > 4 * steps
    assert printed.splitlines()[-1] in done.stdout.splitlines()
