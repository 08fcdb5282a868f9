"""The script of docs/vllm.md, as somebody would run it who copies it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_of_the_page(tmp_path):
    page = (ROOT / "docs/vllm.md").read_text()
    (script,) = re.findall(r"^```python\n(# drafts.py\n.*?)^```", page, re.S | re.M)
    (printed,) = re.findall(r"^\$ FOLDER/bin/python drafts.py\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "drafts.py").write_text(script)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "drafts.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    counts = r"(\d+) tokens in (\d+) steps of a sequence: (\d+) of (\d+) draft tokens accepted\n"
    tokens, steps, right, offered = map(int, re.search(counts, done.stdout).groups())
    assert re.search(counts, printed) and tokens == steps + right
    assert right > offered / 2 and tokens > 4 * steps
    assert printed.splitlines()[-1] in done.stdout.splitlines()
    assert (tmp_path / "history.bin").exists()
