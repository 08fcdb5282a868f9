"""PTX of the kernels that a proof times. A record stores it: by it later code is known to be what was proved."""

import contextlib
import json
import lzma
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc/include'}"]
Kernels = dict[str, str]  # by name: normalized PTX
Code = dict[str, dict[str, Kernels]]  # by op and backend


def normalize(ptx: str) -> str:
    """Return PTX without comments, debug information and names, which change where no instruction does."""
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"\.section\s+\.debug\w*\s*\{[^}]*\}", "", text)
    text = re.sub(r"^\s*(\.(loc|file)\b.*|\$L__(tmp|func_begin|func_end)\d+:\s*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\$L__BB\d+_", "$L_", text)  # the number of the kernel in its file
    for name in set(re.findall(r"\.entry\s+([\w$]+)", text)):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|\b)", "kernel", text)
    names: dict[str, str] = {}  # of C++, by order of appearance
    text = re.sub(r"\b_Z\w+", lambda match: names.setdefault(match[0], f"name{len(names)}"), text)
    return "\n".join(line for line in map(str.strip, text.splitlines()) if line)


def split(ptx: str) -> dict[str, str]:
    """Split PTX into its kernels, by name, each with what stands before the first."""
    head, *bodies = re.split(r"^(?=(?:\.visible\s+|\.weak\s+)*\.entry\b)", ptx, flags=re.MULTILINE)
    return {re.search(r"\.entry\s+([\w$]+)", body)[1]: head + body for body in bodies}  # type: ignore[index]


def collect(compiled: list[tuple[str, str]]) -> Kernels:
    """Normalize the PTX of launches, given with the kernels' names; several variants of a kernel are numbered."""
    kernels: Kernels = {}
    for name, ptx in compiled:
        text = normalize(ptx)
        number = 1
        while kernels.setdefault(name if number == 1 else f"{name} {number}", text) != text:
            number += 1
    return kernels


@contextlib.contextmanager
def captured() -> Iterator[list[tuple[str, str]]]:
    """Collect the names and PTX of the Triton kernels that are launched within, in order."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    launched: list[tuple[str, str]] = []

    def run(kernel, *args, **kwargs):
        built = launch(kernel, *args, **kwargs)
        launched.append((kernel.fn.__name__, built.asm["ptx"]))
        return built

    with patch.object(JITFunction, "run", run):
        yield launched


def nvcc_version() -> str | None:
    """Return the version of the nvcc on PATH, None without one or without csrc."""
    if shutil.which("nvcc") is None or not (ROOT / "csrc/cuda").is_dir():
        return None
    printed = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    return re.findall(r"V(\d+\.\d+\.\d+)", printed)[0]


def compile_cuda(source: str, arch: int) -> str:
    """Return the PTX of a file in csrc/cuda, for arch 90 say. Needs nvcc."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out.ptx"
        options = [*NVCC_FLAGS, "-ptx", f"-arch=compute_{arch}", "-o", str(target)]
        subprocess.run(["nvcc", *options, str(ROOT / "csrc/cuda" / source)], check=True)
        return target.read_text()


def cuda_kernels(arch: int) -> Kernels:
    """Return all kernels of csrc/cuda.

    Raises:
        FileNotFoundError: nvcc or csrc is missing.
    """
    if nvcc_version() is None:
        raise FileNotFoundError("nvcc is not on PATH, or this is no checkout with csrc/cuda")
    files = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    return collect([kernel for file in files for kernel in split(compile_cuda(file.name, arch)).items()])


def code_path(record: Path) -> Path:
    """Return where the PTX of a record lies: beside it."""
    return record.with_suffix(".ptx.xz")


def write_code(record: Path, code: Code) -> None:
    """Write the PTX of a record."""
    code_path(record).write_bytes(lzma.compress(json.dumps(code, indent=0).encode(), preset=9 | lzma.PRESET_EXTREME))


def read_code(record: Path) -> Code:
    """Read the PTX of a record; empty if it has none."""
    path = code_path(record)
    return json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
