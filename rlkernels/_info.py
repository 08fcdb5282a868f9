"""What was compiled and which backend each op would use here."""

import importlib.util
import os
from typing import Any

import torch

from rlkernels import __version__
from rlkernels import backend as _backend
from rlkernels.registry import OPS
from rlkernels.verdicts import load, summary

PACKAGES = {  # module -> its purpose
    "triton": "Triton kernels on a GPU",
    "safetensors": "checkpoints: stream_top1, python -m rlkernels extrapolate, the trainer",
    "transformers": "rlkernels.integrations.transformers, the trainer",
    "pydantic": "the trainer",
    "peft": "model.lora of the trainer",
    "trl": "rlkernels.integrations.trl",
    "vllm": "rlkernels.integrations.vllm, rollout.engine vllm of the trainer",
    "math_verify": "the reward math of the trainer",
}


def info() -> dict[str, Any]:
    """Return versions, what was compiled, and the backend of each op for CPU and CUDA tensors.

    Returns:
        A dictionary of plain strings, numbers and lists, ready for ``json.dumps``. ``ops[name]`` has
        ``written`` (backends that exist), ``cpu`` (what ``auto`` takes for CPU tensors) and, where a GPU is
        present, ``cuda`` (the same for the current one), ``from`` (run, verdict, record, environment or default)
        and ``verdicts`` (text about each that :func:`rlkernels.prove` left). ``missing`` has what is not installed,
        and what for.
    """
    extension_error = _backend.extension_error()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    native = torch.ops.rlkernels
    absent = {}
    if extension_error:
        absent["the compiled extension"] = "C++ on CPUs; the references in Python run in its place"
    if devices and not _backend.built_with_cuda():
        absent["the CUDA kernels"] = "dtw by CUDA C++; Triton runs in their place"
    packages = {name: purpose for name, purpose in PACKAGES.items() if importlib.util.find_spec(name) is None}
    ops = {}
    for name, op in OPS.items():
        row: dict[str, Any] = {"written": [*op.backends, "torch"]}
        row["cpu"] = _backend.choose(name, torch.device("cpu"))
        if devices:
            row["cuda"] = _backend.choose(name, torch.device("cuda"))
            backend, source = _backend.gpu_choice(name, torch.cuda.current_device())
            row["from"] = source if row["cuda"] == backend else "environment"
            verdicts = load(name, torch.cuda.current_device()) if op.on_gpu else []
            row["verdicts"] = [summary(verdict) for verdict in verdicts]
        ops[name] = row
    return {
        "version": __version__,
        "torch": torch.__version__,
        "extension": extension_error or "loaded",
        "cpu_isa": None if extension_error else native.cpu_isa(),
        "threads": None if extension_error else native.parallel_threads(),
        "cuda_kernels": _backend.built_with_cuda(),
        "triton": importlib.util.find_spec("triton") is not None,
        "gpus": devices,
        "backend": os.environ.get("RLKERNELS_BACKEND", "auto"),
        "missing": absent | packages,
        "ops": ops,
    }


def print_info() -> None:
    """Print :func:`info` as text."""
    facts = info()
    ops = facts.pop("ops")
    missing = facts.pop("missing")
    for key, value in facts.items():
        print(f"{key:<13} {', '.join(value) or 'none' if isinstance(value, list) else value}")
    print(f"\n{'op':<25} {'written':<26} {'CPU tensors':<12}" + (" GPU tensors" if facts["gpus"] else ""))
    for name, row in ops.items():
        gpu = f"{row['cuda']} ({row['from']})" if "cuda" in row else ""
        print(f"{name:<25} {', '.join(row['written']):<26} {row['cpu']:<12} {gpu}".rstrip())
        for text in row.get("verdicts", []):
            print(f"{'':<25} {text}")
    for name, purpose in missing.items():
        print(f"missing: {name}, for {purpose}")
