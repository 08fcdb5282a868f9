"""Models in GGUF files."""

import importlib.util

import numpy
import pytest
import torch
from support import lacks

from python_trainer.errors import UserError
from python_trainer.model.policy import load_policy
from python_trainer.model.settings import ModelConfig

LAYERS, HIDDEN, INNER, HEADS = 2, 32, 64, 4


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    """A folder with a random Llama in a file of its own, and its embedding."""
    if importlib.util.find_spec("gguf") is None:
        lacks("the package gguf")
    import gguf

    folder = tmp_path_factory.mktemp("gguf")
    random, tokens = numpy.random.default_rng(0), [*map(chr, range(48, 110)), "01", "<|endoftext|>"]
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["0 1"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(len(tokens) - 1)
    square, norm = (HIDDEN, HIDDEN), (HIDDEN,)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": norm}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{name}": square for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (HIDDEN, INNER)}
        shapes |= {f"blk.{layer}.{name}_norm": norm for name in ("attn", "ffn")}
    embedding = None
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(numpy.float32)
        embedding = values if embedding is None else embedding
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, embedding


def test_a_gguf_file_is_unpacked_and_saved_as_a_plain_model(gguf_folder, tmp_path):
    folder, embedding = gguf_folder
    policy = load_policy(ModelConfig(path=str(folder), device="cpu"))
    found = policy.model.get_input_embeddings().weight
    assert found.dtype == torch.float32 and found.requires_grad
    error = (found.detach() - torch.from_numpy(embedding)).abs()
    assert 0 < error.max() < 0.3  # four bits for values of +-4, a scale for each 32
    ids = policy.encode(["BCD"])
    assert ids == [[18, 19, 20]] and policy.eos_token_ids == [63]
    policy.save(tmp_path / "saved")
    assert "quantization" not in (tmp_path / "saved/config.json").read_text()
    again = load_policy(ModelConfig(path=str(tmp_path / "saved"), device="cpu"))
    assert again.encode(["BCD"]) == ids
    logits = [p.model(torch.tensor(ids)).logits for p in (policy, again)]
    assert torch.equal(*logits)
    of_file = load_policy(ModelConfig(path=str(folder / "tiny.gguf"), device="cpu", dtype="bfloat16"))
    assert torch.equal(of_file.model.get_input_embeddings().weight, found.bfloat16())


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"no such thing")
    with pytest.raises(UserError, match=r"model.path: .*model.gguf holds no causal language model"):
        load_policy(ModelConfig(path=str(tmp_path / "model.gguf"), device="cpu"))
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"model.path: .* holds no causal language model"):  # two: which one?
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
