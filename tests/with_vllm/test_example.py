"""examples/vllm_drafts.py, as somebody would run it, and what docs/integrations.md says that it prints."""

import re

import pytest
from support import ROOT, run_python


@pytest.mark.slow
def test_the_example(tmp_path):
    page = (ROOT / "docs/integrations.md").read_text()
    (printed,) = re.findall(r"^python examples/vllm_drafts.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    printed = re.sub(r"^# ", "", printed, flags=re.MULTILINE)
    example = str(ROOT / "examples/vllm_drafts.py")
    said = run_python(example, cwd=tmp_path, PYTHONPATH=str(ROOT))
    counts = r"(\d+) tokens in (\d+) steps of a sequence: (\d+) of (\d+) draft tokens accepted\n"
    tokens, steps, right, offered = map(int, re.search(counts, said).groups())
    assert re.search(counts, printed) and tokens == steps + right
    assert right > offered / 2 and tokens > 4 * steps
    assert printed.splitlines()[-1] in said.splitlines()
