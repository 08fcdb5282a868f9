"""Blocks of the pages run, links lead somewhere, and the settings and make targets that they name exist."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ROOT, run_python
from transformers import AutoModelForCausalLM

from python_trainer.__main__ import main
from python_trainer.config import describe_settings
from python_trainer.model.hub import policy_folder

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- needs: (\w+) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = ("python", "yaml", "console")  # kinds of blocks that run_page runs; test_shell_commands runs those of sh
SLOW = {"quickstart.md", "algorithms.md", "accelerators.md", "integrations.md", "scale.md", "CONTRIBUTING.md"}
BENCH = [ROOT / "bench" / "README.md", ROOT / "bench" / "gpu" / "README.md"]
CHECKPOINTS = "BASE CHECKPOINT-10 CHECKPOINT-20 CHECKPOINT-30 CHECKPOINT-40"
STEPS = (
    "task.train_size=16 task.test_size=16 rollout.num_generations=2 rollout.max_completion_length=32 "
    "evaluation.eval_steps=0"
)
LITTLE = {  # beginning of a command, whole words -> options that shorten it; the last that fits counts
    "python -m python_trainer train": f"--set max_steps=2 {STEPS}",
    "python -m python_trainer train --dry-run": "",
    "python -m python_trainer history": "",
    "python -m python_trainer compare": f"--set max_steps=2 {STEPS}",
    "torchrun --nproc-per-node 2": f"--set max_steps=1 {STEPS}",
    "torchrun --nproc-per-node 1": f"--set max_steps=2 {STEPS}",
    "python -m rlkernels extrapolate": "",
    "python -m pytest": "--collect-only",
    "python -m bench": "--list",
    "python -m bench --quick": "keyed_uniform",
    "python -m bench.faults": "--only 'SIGTERM, plain' --times 1 --records faults.jsonl --work-dir faults",
    "python -m bench.faults fuzz": "--cases 2 --only settings --records faults.jsonl --work-dir faults",
    "python -m bench.faults --report": "",
    "python -m bench.soak": "--operations 2000 --records soak.jsonl",
    "python -m bench.studies.lossless": "--settings 1 --records lossless.csv",
}
NOT_RUN = {  # why
    "vllm serve": "needs a server; the classes that it names are looked up",
    "VLLM_SERVER_DEV_MODE=1 vllm serve": "the same",
    "python examples/vllm_drafts.py": "needs vLLM; tests/with_vllm runs it",
    "python -m verl.trainer": "needs GPUs; tests/with_vllm passes the option through verl's code",
    "python -m rlkernels prove": "needs a GPU; test_proof runs the command with kernels of its own",
    "python -m bench.soak memory": "memory grows in the first steps; test_soak runs it",
    "python -m bench.studies rpo": "takes hours; test_studies runs short ones",
    "python -m bench.studies sentences": "the same; test_ranks measures weights of short runs",
    "python -m bench.gpu.records": "rewrites rlkernels/records.json; test_bench_gpu_records compares that file",
    "python -m bench.gpu.session": "needs a GPU; test_bench_gpu runs it on a CPU",
    "python -m bench.gpu.train": "the same; test_bench_gpu_train does",
    "tools/gpu_wheels.sh": "fetches packages for another machine",
    "python3 -m pip install -q --no-index": "installs them there",
    "make setup": "not again",
    ". .venv": "",
    "mkdir": "",
    "export": "",
}
SECTION = re.compile(r"`((?:task|model|rollout|algorithm|optimizer|critic|evaluation|save|sft|accelerators)(?:\.\w+)+)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        kind: language of the fence.
        needs: "gpu", or a module without which the block cannot run; empty: nothing.
    """

    kind: str
    text: str
    needs: str = ""

    @property
    def file(self) -> str | None:
        """Return the name of the file that the block is, from a comment on its first line."""
        first_line = re.match(r"# (\S+\.(?:py|yaml))\n", self.text)
        return first_line and first_line[1]

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Return (command, what it prints) of a console block."""
        matches = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", self.text, re.MULTILINE)
        return [(re.sub(r"\\\n\s*", "", command), printed.strip()) for command, printed in matches]

    @property
    def lines(self) -> list[str]:
        """Return the commands of an sh block, without comments."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line))]


def read_blocks(path: Path) -> list[Block]:
    return [Block(kind, text, needs) for needs, kind, text in FENCE.findall(path.read_text(encoding="utf-8"))]


def has(needs: str) -> bool:
    """Return whether this machine has what a block needs."""
    return torch.cuda.is_available() if needs == "gpu" else not needs or find_spec(needs) is not None


def run_page(path: Path, capsys: Any) -> int:
    """Run the blocks of a page in the current folder, in their order; return how many ran.

    A block of Python or YAML that begins with the name of a file is written there. Other Python is executed, and the
    next blocks see its names. Of a console block each command is run and its output compared.
    """
    names: dict[str, Any] = {"__name__": "page"}
    num_blocks = 0
    for block in read_blocks(path):
        if block.kind not in RUN or not has(block.needs):
            continue
        num_blocks += 1
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
            sys.modules.pop(Path(block.file).stem, None)
        elif block.kind == "python":
            exec(compile(block.text, path.name, "exec"), names)
        for command, printed in block.commands if block.kind == "console" else ():
            check_command(command, printed, capsys)
    return num_blocks


def check_command(command: str, printed: str, capsys: Any) -> None:
    """Run a command of a page, and compare its exit code and output with the page; ``...`` stands for anything."""
    arguments = shlex.split(command)
    if arguments[:3] == ["python", "-m", "python_trainer"] and "|" not in arguments:
        capsys.readouterr()
        try:
            code = main(arguments[3:])
        except SystemExit as exit:  # of --help-settings and the like
            code = exit.code or 0
        output = "".join(capsys.readouterr())
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}."}
        process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
        code, output = process.returncode, process.stdout + process.stderr
    expected_code = 2 if printed.startswith("error: ") else 0
    assert code == expected_code, f"{command} ended with {code}, not {expected_code}:\n{output[-3000:]}"
    pattern = ".*".join(map(re.escape, re.split(r"\s*\.\.\.\s*", printed)))
    assert re.search(pattern, output, re.DOTALL), f"{command} printed\n{output[-3000:]}\nand the page says\n{printed}"


@pytest.mark.parametrize("page", [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in SLOW else [])  # slow: they train
    for page in PAGES if any(block.kind in ("python", "console") for block in read_blocks(page))
])  # fmt: skip
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules_before = set(sys.modules)
    assert run_page(page, capsys)
    for name in set(sys.modules) - modules_before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_files_on_the_pages_pass_the_linter(tmp_path):
    """Check the files with the pages' blank lines; an example may define names that it never uses."""
    for page in PAGES:
        for block in read_blocks(page):
            if block.kind == "python" and block.file:
                (tmp_path / page.stem).mkdir(exist_ok=True)
                (tmp_path / page.stem / block.file).write_text(block.text)
    first_party = 'lint.isort.known-first-party = ["python_trainer", "rlkernels"]'
    options = ["--no-cache", "--config", "pyproject.toml", "--config", first_party]
    run_python("-m", "ruff", "check", *options, str(tmp_path))


@pytest.mark.parametrize(
    "page", [*PAGES, *BENCH, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page.name} links to {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Return what the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_targets_exist(page):
    text = page.read_text()
    settings = [key for key, *_ in describe_settings()]
    sections = {key.rpartition(".")[0] for key in settings}
    for key in SECTION.findall(text):
        assert key in settings or key in sections or key.endswith(".py"), f"{page.name} names {key}"
    makefile = (ROOT / "Makefile").read_text()
    code = re.findall(r"`([^`\n]+)`", text) + [block.text for block in read_blocks(page)]
    for target in set(re.findall(r"^(?:\$ )?make ([a-z-]+)", "\n".join(code), re.M)):
        assert re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.M), f"{page.name} names make {target}"


def shell_commands(page: Path) -> list[str]:
    """Return the commands of the sh blocks of a page."""
    return [line for block in read_blocks(page) if block.kind == "sh" for line in block.lines]


def test_every_shell_command_has_a_test():
    """``shorten`` names one that is in neither LITTLE nor NOT_RUN; the slow test below runs them."""
    commands = [command for page in [*PAGES, *BENCH] for command in shell_commands(page)]
    shortened = [shorten(c) for c in commands if not c.startswith(tuple(NOT_RUN)) and "pip install" not in c]
    assert len(shortened) > 20


def test_commands_of_several_processes_set_parallel():
    """torchrun refuses them otherwise; ``shorten`` leaves one process of some, which needs no ``parallel``."""
    commands = [line for page in PAGES for line in shell_commands(page) if line.startswith("torchrun")]
    assert len(commands) > 2
    assert not [command for command in commands if "parallel=" not in command]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, *BENCH], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_shell_commands_run(page, tmp_path, monkeypatch, capsys):
    """Run them with few steps, small numbers and new records; compare installs with pyproject.toml."""
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "FILE.yaml").symlink_to(ROOT / "configs" / "sums.yaml")
    (tmp_path / "MODEL").symlink_to(policy_folder("small"))
    policy = AutoModelForCausalLM.from_pretrained("MODEL", dtype="float32")
    for name in CHECKPOINTS.split() if any("CHECKPOINT" in block.text for block in read_blocks(page)) else ():
        policy.save_pretrained(tmp_path / name)
        policy.model.layers[0].mlp.up_proj.weight.data[0] += 0.1
    for command in shell_commands(page):
        for module, name in re.findall(r"rlkernels\.integrations\.(\w+)\.(\w+)", command):
            assert f"class {name}" in (ROOT / "rlkernels" / "integrations" / f"{module}.py").read_text(), command
        if command.startswith(tuple(NOT_RUN)):
            continue
        if "pip install" in command:
            check_install(command)
        else:
            check_command(shorten(command), "", capsys)


def shorten(command):
    """Return a command that does little of what this one does, and writes into the current folder only."""
    command = command.replace("BASE CHECKPOINT...", CHECKPOINTS).replace(".venv/bin/", "")
    command = command.replace("node 2", "node 1").replace("node 4", "node 2")
    if "vllm" in command:  # no server is here, but the settings can be read
        return re.sub("^torchrun --nproc-per-node [0-9]", "python", command) + " --dry-run"
    if command.startswith("make "):
        return f"make -n -C {ROOT} {command[5:]}"
    options = [option for beginning, option in LITTLE.items() if f"{command} ".startswith(f"{beginning} ")]
    assert options, f"nothing makes a test of {command}: add it to LITTLE or NOT_RUN"
    return f"{command} {options[-1]}"


def check_install(command):
    """Check that extras exist, and that requirements are those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    requirements = {listed for extra in extras.values() for listed in extra}
    base = project["build-system"]["requires"] + project["project"]["dependencies"]
    requirements |= {name.partition(">")[0] for name in base}
    for word in shlex.split(command.partition("pip install")[2]):
        extras_match = re.fullmatch(r"\.(?:\[(.*)\])?", word)
        if extras_match:
            assert set((extras_match[1] or "train").split(",")) <= set(extras)
        else:
            assert word[0] == "-" or word in requirements


def test_files_that_contributing_names_exist():
    file_names = set(re.findall(r"`([a-z_/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(file_names) >= 20
    for name in file_names - {"reference.py", "triton_kernels.py"}:  # of each folder of ops
        assert any((ROOT / folder / name).is_file() for folder in ("", "python_trainer", "tests/python_trainer")), name
