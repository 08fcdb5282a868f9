"""Builds ``rlkernels._C``: torch ops and host data structures from ``csrc``.

Everything about flags lives here. The sources fall into three groups:

* ``csrc/ops``, ``csrc/runtime``, ``csrc/bindings``, ``csrc/module.cpp``: ordinary extension sources.
* ``csrc/cpu``: compiled once per instruction set (``ISA_FLAGS``) by this script, because one extension
  cannot give two sets of flags to one file. ``csrc/include/dispatch.h`` picks the copy to run.
* ``csrc/cuda``: compiled by nvcc and linked only into a CUDA build of torch. Elsewhere
  ``python setup.py check_cuda`` compiles them as a check.

Environment: ``DEBUG=1`` (no optimisation, symbols), ``MAX_JOBS``, ``TORCH_CUDA_ARCH_LIST``,
``RLKERNELS_NO_CUDA=1`` (leave the CUDA kernels out), ``RLKERNELS_NO_EXTENSION=1`` (pure Python install).
"""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import setuptools
import torch
from setuptools import Command, setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension

ROOT = Path(__file__).parent.resolve()
CSRC = ROOT / "csrc"
DEBUG = os.environ.get("DEBUG") == "1"
JOBS = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
WITH_CUDA = bool(torch.version.cuda) and CUDA_HOME is not None and os.environ.get("RLKERNELS_NO_CUDA") != "1"

COMMON_FLAGS = ["-std=c++20", "-fvisibility=hidden", "-Wall", "-fopenmp", f"-I{CSRC / 'include'}"]
COMMON_FLAGS += ["-O0", "-g"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]
# No errno or trap semantics in kernels; NaN and infinity keep theirs.
KERNEL_FLAGS = ["-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-exceptions", "-fno-rtti"]
X86 = platform.machine().lower() in {"x86_64", "amd64"}
ISA_FLAGS: dict[str, list[str]] = {"portable": []}
if X86:
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        "-mprefer-vector-width=512",
    ]
    # Sapphire Rapids and later: bf16 dot products and AMX tiles.
    ISA_FLAGS["amx"] = [*ISA_FLAGS["avx512"], "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]
# A source whose name says so is compiled for that instruction set only: csrc/cpu/NAME.amx.cpp
NVCC_FLAGS = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", f"-I{CSRC / 'include'}"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)


def is_stale(target: Path, sources: list[Path], command: str) -> bool:
    """True unless the object is newer than its sources and was made by the same command (flags, architectures)."""
    if not target.exists() or target.stat().st_mtime < max(s.stat().st_mtime for s in sources):
        return True
    made_by = target.with_suffix(".command")
    return not made_by.exists() or made_by.read_text() != command


def compile_all(jobs: list[tuple[Path, Path, list[str]]]) -> None:
    """Runs (source, object, command) jobs side by side, skipping objects that are up to date."""
    headers = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh")]

    def compile_one(job: tuple[Path, Path, list[str]]) -> None:
        source, target, command = job
        if is_stale(target, [source, *headers], " ".join(command)):
            run(command)
            target.with_suffix(".command").write_text(" ".join(command))

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(compile_one, jobs))


def isa_jobs(out: Path) -> list[tuple[Path, Path, list[str]]]:
    compiler = os.environ.get("CXX", "g++")
    jobs = []
    for source in sorted((CSRC / "cpu").glob("*.cpp")):
        name, _, only = source.stem.partition(".")
        for isa, flags in ISA_FLAGS.items():
            if only and isa != only:
                continue
            target = out / f"{name}.{isa}.o"
            command = [compiler, *COMMON_FLAGS, *KERNEL_FLAGS, *flags, f"-DRLK_ISA={isa}", "-c", str(source)]
            jobs.append((source, target, [*command, "-o", str(target)]))
    return jobs


def cuda_arch_flags() -> list[str]:
    wanted = os.environ.get("TORCH_CUDA_ARCH_LIST", "8.0;9.0").replace(",", ";").replace(" ", ";")
    digits = [arch.removesuffix("+PTX").replace(".", "") for arch in wanted.split(";") if arch]
    flags = [f"-gencode=arch=compute_{d},code=sm_{d}" for d in digits]
    newest = max(digits, key=lambda d: int("".join(c for c in d if c.isdigit())))
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def cuda_jobs(out: Path, nvcc: str) -> list[tuple[Path, Path, list[str]]]:
    jobs = []
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        target = out / f"{source.stem}.cu.o"
        jobs.append((source, target, [nvcc, *NVCC_FLAGS, *cuda_arch_flags(), "-c", str(source), "-o", str(target)]))
    return jobs


class BuildKernels(BuildExtension):
    """Compiles the per-ISA and CUDA objects, then lets torch build and link the rest."""

    def build_extensions(self):
        out = Path(self.build_temp).resolve() / "kernels"
        out.mkdir(parents=True, exist_ok=True)
        jobs = isa_jobs(out)
        if WITH_CUDA:
            jobs += cuda_jobs(out, str(Path(CUDA_HOME) / "bin" / "nvcc"))
        compile_all(jobs)
        for extension in self.extensions:
            extension.extra_objects = [str(target) for _, target, _ in jobs]
        super().build_extensions()


class CheckCuda(Command):
    """Compiles every CUDA source with plain nvcc; needs no GPU and no CUDA build of torch."""

    description = "compile the CUDA sources with nvcc as a check"
    user_options: ClassVar = [("out=", None, "folder for the objects")]

    def initialize_options(self):
        self.out = str(ROOT / "build" / "check_cuda")

    def finalize_options(self):
        pass

    def run(self):
        nvcc = shutil.which("nvcc") or sys.exit("check_cuda: nvcc was not found on PATH; install the CUDA toolkit")
        out = Path(self.out)
        out.mkdir(parents=True, exist_ok=True)
        jobs = cuda_jobs(out, nvcc)
        compile_all(jobs)
        print(f"check_cuda: {len(jobs)} CUDA sources compiled by {nvcc}")


def extension() -> CppExtension:
    sources = [CSRC / "module.cpp"]
    for folder in ("ops", "runtime", "bindings"):
        sources += (CSRC / folder).glob("*.cpp")
    macros = [(f"RLK_HAVE_{isa.upper()}", "1") for isa in ISA_FLAGS]
    include, library, link = [], [], ["-fopenmp"]
    if WITH_CUDA:
        macros.append(("RLK_WITH_CUDA", "1"))
        include, library = [str(Path(CUDA_HOME) / "include")], [str(Path(CUDA_HOME) / "lib64")]
        link += ["-lcudart", "-lc10_cuda", "-ltorch_cuda"]
    return CppExtension(
        "rlkernels._C",
        sorted(str(s.relative_to(ROOT)) for s in sources),
        define_macros=macros,
        include_dirs=include,
        library_dirs=library,
        extra_compile_args=COMMON_FLAGS,
        extra_link_args=link,
        depends=[str(p) for p in [*CSRC.rglob("*.h"), *(CSRC / "cpu").glob("*.cpp"), *(CSRC / "cuda").glob("*.cu*")]],
    )


class Unread(setuptools.Distribution):
    """For ``build_ext`` of a setuptools before 77, which refuses the licence that pyproject.toml names."""

    def parse_config_files(self, *_, **__):
        pass  # nothing in it says how the extension is built


OLD = int(setuptools.__version__.partition(".")[0]) < 77
setup(
    **({"distclass": Unread} if OLD and "build_ext" in sys.argv else {}),
    ext_modules=[] if os.environ.get("RLKERNELS_NO_EXTENSION") == "1" else [extension()],
    cmdclass={"build_ext": BuildKernels, "check_cuda": CheckCuda},
)
