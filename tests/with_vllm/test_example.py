"""examples/vllm_drafts.py, run as a user would, prints what docs/integrations.md says."""

import re

import pytest
from support import ROOT, run_python


@pytest.mark.slow
def test_the_example(tmp_path):
    page = (ROOT / "docs/integrations.md").read_text()
    (expected_output,) = re.findall(r"^python examples/vllm_drafts.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    expected_output = re.sub(r"^# ", "", expected_output, flags=re.MULTILINE)
    example = str(ROOT / "examples/vllm_drafts.py")
    output = run_python(example, cwd=tmp_path, PYTHONPATH=str(ROOT))
    counts = r"(\d+) tokens in (\d+) steps of a sequence: (\d+) of (\d+) draft tokens accepted\n"
    tokens, steps, accepted, offered = map(int, re.search(counts, output).groups())
    assert re.search(counts, expected_output) and tokens == steps + accepted
    assert accepted > offered / 2 and tokens > 4 * steps
    assert expected_output.splitlines()[-1] in output.splitlines()
