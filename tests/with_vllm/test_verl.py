"""The line of verl that brings our drafts into its vLLM: by verl's own settings and arguments, and vLLM's parser."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

LINE = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method:custom_class,"
    "model:rlkernels.integrations.vllm.HistoryProposer,num_speculative_tokens:16}"
)


@pytest.fixture(scope="module")
def verl():
    """Return the folder of verl, which needs Ray and more to be imported; none of that takes part here."""
    spec = importlib.util.find_spec("verl")
    if spec is None or importlib.util.find_spec("hydra") is None:
        pytest.skip("this machine lacks verl and hydra (tools/vllm_env.sh installs both)")
    return Path(spec.submodule_search_locations[0])


def test_the_drafts_reach_the_vllm_of_verl(verl, untied_folder):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with initialize_config_dir(str(verl / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", [LINE])
    engine_kwargs = OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm)
    source = ast.parse((verl / "workers/rollout/vllm_rollout/utils.py").read_text())
    name = "build_cli_args_from_config"
    (function,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == name)
    namespace: dict = {"json": json}
    exec("from typing import Any\n" + ast.unparse(function), namespace)
    arguments = namespace[name]({"dtype": "float32", "enforce_eager": True, "max_model_len": 64, **engine_kwargs})
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", untied_folder, *arguments]))
    parsed.skip_tokenizer_init = True
    speculative = parsed.create_engine_config().speculative_config
    assert speculative.method == "custom_class" and speculative.num_speculative_tokens == 16
    assert speculative.model == "rlkernels.integrations.vllm.HistoryProposer"
