"""Deltas of weights: the same bits on the other side, or an error and nothing changed."""

import json
import struct
import sys
import zlib

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import rlkernels
from rlkernels.weights import apply_, delta, encode, merged_weight

zstandard = pytest.importorskip("zstandard", reason="this machine lacks zstandard")

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


@pytest.fixture(params=[64, None], ids=["many pieces", "one piece"])
def piece(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(delta, "PIECE_BYTES", request.param)


def raw(tensor):
    """Return the bytes of a tensor, row-major."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype, *shape, seed=0):
    """Return a tensor of any bits, NaN of all kinds among them; of bool valid ones."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count, np.uint8)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def check(new, old, weights=None):
    """Check that the delta turns the old weights into the bits of the new ones; return the delta."""
    data = encode(new, old)
    weights = {name: tensor.clone() for name, tensor in old.items()} if weights is None else weights
    expected = {name: raw(tensor) for name, tensor in new.items()}
    apply_(weights, data)
    assert {name: raw(weights[name]) for name in new} == expected
    return data


@pytest.mark.usefixtures("piece")
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", DTYPES)
def test_bits_of_every_dtype(name):
    dtype = getattr(torch, name)
    shapes = {"matrix": (7, 5), "vector": (129,), "number": (), "empty": (3, 0, 2)}
    new, old = ({name: random_bits(dtype, *shape, seed=i) for name, shape in shapes.items()} for i in (1, 2))
    assert raw(new["matrix"]) != raw(old["matrix"])
    check(new, old)
    check(old, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    check({"w": every}, {"w": every.flip(0)})
    view = torch.zeros(2**16, 2, dtype=dtype)[:, 1]
    check({"w": every}, {"w": torch.zeros_like(every)}, {"w": view})


@pytest.mark.usefixtures("piece")
def test_views():
    """New, old and changed weights are views; the memory between them stays."""
    values = torch.randn(3, 24, 20, generator=torch.Generator().manual_seed(0))
    for view in (
        lambda x: x.T, lambda x: x[::2, 1::3], lambda x: x[:, 5], lambda x: x[4:], lambda x: x.view(-1)[::7],
        lambda x: x.reshape(4, 6, 20).permute(2, 0, 1), lambda x: torch.complex(x, x).T.conj(),
        lambda x: torch.complex(x, x).conj().imag,
    ):  # fmt: skip
        old, new, target = (view(x.clone()) for x in values)
        target.copy_(old)
        buffer = target._base if target._base is not None else target
        original = buffer.clone()
        check({"w": new}, {"w": old}, {"w": target})
        target.copy_(old)
        assert torch.equal(torch.view_as_real(buffer) if buffer.is_complex() else buffer,
                           torch.view_as_real(original) if original.is_complex() else original)  # fmt: skip
    check({"w": values[0, :1].expand(24, 20)}, {"w": values[1, :1].expand(24, 20)}, {"w": values[1, :1].repeat(24, 1)})


@pytest.mark.usefixtures("piece")
def test_weights_that_share_memory():
    """Tied weights, parts of one buffer, a whole beside its parts, columns between columns: each bit turns once."""
    old, new = torch.randn(2, 6, 40)

    def named(x):
        return {"whole": x, "tied": x, "rows": x[2:4], "even": x[:, ::2], "odd": x[:, 1::2], "last": x.view(-1)[-3:]}

    for names in ("whole tied", "rows last", "even odd", "whole rows", "odd rows tied last", "last even whole"):
        weights = named(old.clone())
        chosen = names.split()
        check({n: named(new)[n] for n in chosen}, {n: named(old)[n] for n in chosen}, {n: weights[n] for n in chosen})
    model = torch.nn.Linear(8, 8)
    state = {"embed": model.weight, "head": model.weight, "bias": model.bias}
    check({n: p.detach() + 1 for n, p in state.items()}, {n: p.detach().clone() for n, p in state.items()}, state)
    assert model.weight.requires_grad


def test_weights_whose_own_elements_share_memory():
    def make():
        """Return windows over 12 numbers, and a weight between whose elements others lie."""
        return {"windows": torch.arange(12.0).unfold(0, 4, 2), "columns": torch.ones(3, 4)[:, ::2]}

    old = make()
    new = {name: (tensor + 1).contiguous() for name, tensor in old.items()}
    check(new, old, make())
    new["windows"][1, 0] += 1  # also the last but one of the first window
    refuses(make(), encode(new, old), "to which the delta gives two values: windows")


@pytest.mark.parametrize("names", ["whole tied", "whole rows", "even whole odd"])
def test_weights_that_are_tied_on_one_side_alone(names):
    """The sender's have become different: there is no right answer, and nothing changes, not even other ties."""
    old, new = torch.randn(2, 6, 40)

    def named(x):
        return {"whole": x, "tied": x, "rows": x[2:4], "even": x[:, ::2], "odd": x[:, 1::2]}

    chosen = names.split()
    pair = torch.randn(2, 3)
    start_weights = {name: named(old)[name].clone() for name in chosen} | {"a": pair[0].clone(), "b": pair[0].clone()}
    new_weights = {name: named(new)[name].clone() for name in chosen} | {"a": pair[1], "b": pair[1]}
    new_weights[chosen[-1]] += 1
    weights = {name: named(old)[name] for name in chosen} | dict.fromkeys("ab", pair[0].clone())
    refuses(
        weights, encode(new_weights, start_weights), f"to which the delta gives two values: {', '.join(sorted(chosen))}"
    )


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_any_model(data):
    sizes = st.lists(st.integers(0, 5), max_size=3)
    dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.complex64])
    shapes = data.draw(st.dictionaries(st.text(max_size=5), st.tuples(dtypes, sizes), max_size=5))
    new, old = ({n: random_bits(d, *s, seed=i) for n, (d, s) in shapes.items()} for i in (1, 2))
    check(new, dict(reversed(old.items())))


def test_format():
    """Read as the module describes it, by zstandard and json alone."""
    new, old = ({"a": torch.tensor([[1.0, x]]), "b": torch.tensor(x).bfloat16()} for x in (2.0, -3.0))
    data = encode(new, old)
    magic = b"rlkernels delta 1\n"
    (checksum, size) = struct.unpack("<IQ", data[18:30])
    header = json.loads(data[30 : 30 + size])
    frames = data[30 + size :]
    assert data[:18] == magic and checksum == zlib.crc32(data[30:])
    (name, dtype, shape, [[length, checksum_before, checksum_after]]), (*second, [[last, *_]]) = header
    assert (name, dtype, shape, second) == ("a", "float32", [1, 2], ["b", "bfloat16", []])
    assert (checksum_before, checksum_after) == (
        zlib.crc32(struct.pack("<2f", 1, -3)),
        zlib.crc32(struct.pack("<2f", 1, 2)),
    )
    xor = bytes(a ^ b for a, b in zip(struct.pack("<2f", 1, -3), struct.pack("<2f", 1, 2)))
    assert zstandard.decompress(frames[:length]) == xor and length + last == len(frames)


def test_a_step_in_bfloat16_is_small():
    """One weight in 256 moves by a unit in the last place, as in a step at a learning rate of 1e-6."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1 << 21, generator=generator).bfloat16()
    new = (old.view(torch.int16) + (torch.rand(1 << 21, generator=generator) < 1 / 256)).view(torch.bfloat16)
    assert old.nbytes > 100 * len(check({"w": new}, {"w": old}))


def test_threads_do_not_change_the_bytes(monkeypatch):
    monkeypatch.setattr(delta, "PIECE_BYTES", 256)
    new, old = ({str(i): random_bits(torch.bfloat16, 100, 9 + i, seed=seed + i) for i in range(9)} for seed in (1, 20))
    deltas = set()
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        deltas.add(check(new, old))
    assert len(deltas) == 1


def test_few_pieces_are_in_memory():
    """Copy what is not contiguous, and pieces on their way from a device, when their turn comes."""
    drawn = []
    results = delta._in_threads(lambda i: i, ((drawn.append(i) or i,) for i in range(1000)))
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(drawn) <= 2 * torch.get_num_threads() + 6
    assert list(results) == list(range(5, 1000))


def test_contiguous_weights_are_not_copied(monkeypatch):
    monkeypatch.setattr(delta.Delta, "_new", None)
    check({"a": torch.ones(9), "b": torch.ones(2, 3)}, {"a": torch.zeros(9), "b": torch.zeros(2, 3)})


@pytest.fixture
def example(monkeypatch):
    """Return (new, old, delta) of two tensors, the first in three pieces."""
    monkeypatch.setattr(delta, "PIECE_BYTES", 64)
    new, old = ({"w": torch.randn(5, 8), "tail": torch.randn(3).bfloat16()} for _ in range(2))
    return new, old, encode(new, old)


def refuses(weights, data, message=None, error=ValueError):
    bits = {name: raw(tensor) for name, tensor in weights.items()}
    with pytest.raises(error, match=message):
        apply_(weights, data)
    assert {name: raw(tensor) for name, tensor in weights.items()} == bits


def test_damage_anywhere(example):
    _, old, data = example
    for position in range(len(data)):
        for bit in (1, 128):
            refuses(old, data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :], "damaged")
        refuses(old, data[:position], "damaged")
    refuses(old, data + b"\0", "damaged")


def test_a_wrong_base(example):
    """The last bit of the last tensor: all that comes before it was right."""
    new, old, data = example
    refuses(new, data, "not those that the delta was made from: 'w' differs")
    for weights in old, new:
        weights["tail"].view(torch.int16)[-1] ^= 1
    refuses(old, data, "not those that the delta was made from: 'tail' differs")


def forge(data, change):
    """Return the delta after ``change`` of its header and frames, with their right checksum."""
    size = struct.unpack_from("<Q", data, 22)[0]
    header, frames = change(json.loads(data[30 : 30 + size]), data[30 + size :])
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return data[:18] + struct.pack("<IQ", zlib.crc32(text + frames), len(text)) + text + frames


def with_last_frame(header, frames, frame, checksum=None):
    """Return header and frames with another frame in the last piece."""
    piece = header[-1][3][-1]
    frames = frames[: -piece[0]] + frame
    piece[0], piece[2] = len(frame), piece[2] if checksum is None else checksum
    return header, frames


BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 24))
HUGE = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 50) + b"\x01\x00\x00"  # declares 2^50 bytes
STREAMED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(6))


@pytest.mark.parametrize("change", [
    lambda header, frames: with_last_frame(header, frames, BOMB),
    lambda header, frames: with_last_frame(header, frames, HUGE),
    lambda header, frames: with_last_frame(header, frames, STREAMED),
    lambda header, frames: with_last_frame(header, frames, b"no frame"),
    lambda header, frames: with_last_frame(header, frames, zstandard.compress(bytes(6)) + b"more"),
    lambda header, frames: with_last_frame(header, frames, zstandard.compress(bytes(6))),  # of another checksum
    lambda header, frames: with_last_frame(header, frames, zstandard.compress(bytes(6)), "text"),
    lambda header, frames: (header + header, frames),
    lambda header, frames: (header[:1], frames),
    lambda header, frames: ([[*header[0][:3], header[0][3] * 9], header[1]], frames),
    lambda header, frames: ([[*header[0][:3], header[0][3][:2]], header[1]], frames),
    lambda header, frames: ([[*header[0][:3], [[-5, 0, 0], [5, 0, 0]]], header[1]], frames),
    lambda header, frames: ([[*header[0][:3], [[1.0, 0, 0], [True, 0, 0]]], header[1]], frames),
    lambda header, frames: ([["w", "float32", [1 << 60, 1 << 60], header[0][3]], header[1]], frames),
    lambda header, frames: ([["w", "torch.save", [5, 8], header[0][3]], header[1]], frames),
    lambda header, frames: ([[["w"], *header[0][1:]], header[1]], frames),
    lambda header, frames: ([["unknown", *header[0][1:]], header[1]], frames),
    lambda header, frames: ({"w": 1}, frames), lambda header, frames: (7, frames),
    lambda header, frames: (b"[" * 100_000, frames), lambda header, frames: (b"\xff", frames),
    lambda header, frames: (b"[" + b"9" * 10_000 + b"]", frames), lambda header, frames: (b"", b""),
])  # fmt: skip
def test_a_forged_delta(example, change):
    """Its checksums are right. What it declares takes no memory, and no tensor has changed when it fails."""
    _, old, data = example
    refuses(old, forge(data, change))


def test_forgeries_are_of_the_right_form(example):
    new, old, data = example
    apply_(old, forge(data, lambda header, frames: (header, frames)))
    assert {n: raw(t) for n, t in old.items()} == {n: raw(t) for n, t in new.items()}


def test_weights_of_another_kind(example):
    new, old, data = example
    refuses({"w": old["w"]}, data, "must hold every tensor of the delta, but 'tail' is missing")
    refuses(old | {"w": old["w"].T}, data, r"float32 \[5, 8\] for 'w', got float32 \[8, 5\]")
    refuses(old | {"w": old["w"].view(torch.int32)}, data, "got int32")
    refuses(old | {"w": old["w"][:1].expand(5, 8)}, data, "'w' is expanded")
    extra = {"other": torch.zeros(2)}
    apply_(old | extra, data)
    assert raw(old["w"]) == raw(new["w"]) and not extra["other"].any()
    for first, second, message in (
        ({"a": new["w"]}, {}, "and None for 'a'"), ({}, {"b": new["w"]}, "got None and .* for 'b'"),
        ({"a": new["w"]}, {"a": new["w"].T}, r"got \('float32', \[5, 8\]\) and \('float32', \[8, 5\]\) for 'a'"),
        ({"a": new["w"]}, {"a": new["w"].double()}, r"and \('float64', \[5, 8\]\) for 'a'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            encode(first, second)


class Sharded(torch.Tensor):
    def to_local(self):
        return self


@pytest.mark.parametrize(("weights", "message"), [
    (None, "new must be a dictionary"), ([torch.zeros(1)], "new must be a dictionary"), ({"w": 1}, "new of 'w'"),
    ({1: torch.zeros(1)}, "names that are text, got 1"), ({"w": torch.eye(2).to_sparse()}, "dense tensor.*sparse"),
    ({"w": torch.zeros(2, device="meta")}, "dense.*meta"), ({"w": torch.zeros(2).as_subclass(Sharded)}, "to_local"),
])  # fmt: skip
def test_what_is_no_weight(weights, message):
    with pytest.raises(TypeError, match=message):
        encode(weights, {})
    with pytest.raises(TypeError, match=message.replace("new", "weights")):
        apply_(weights, encode({}, {}))


def test_a_delta_is_bytes(example):
    new, old, data = example
    refuses(old, "text", "none of rlkernels.weights.encode: .*not 'str'")
    for kind in (bytearray, memoryview):
        weights = {name: tensor.clone() for name, tensor in old.items()}
        apply_(weights, kind(data))
        assert raw(weights["tail"]) == raw(new["tail"])


def test_autograd_sees_the_change():
    """A backward pass through values that are gone fails, as after any operation in place."""
    weight = torch.nn.Parameter(torch.ones(3))
    data = encode({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    loss = (weight * weight).sum()
    apply_({"w": weight}, data)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inside = torch.ones(3)
    apply_({"w": inside}, data)
    assert not inside.any()


def test_any_default_device_and_dtype(example):
    new, old, data = example
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert encode(new, old) == data
            apply_(old, data)
    finally:
        torch.set_default_dtype(torch.float32)
    assert raw(old["w"]) == raw(new["w"])


def test_threads_get_finished_copies(monkeypatch):
    """On a GPU they use other streams than the caller, who therefore waits for each copy that it makes."""
    finished = []
    in_threads = delta._in_threads

    def check(function, jobs):
        def call(name, number, *pieces):
            waited_for = {tensor.untyped_storage().data_ptr() for tensor in finished}
            assert {piece.untyped_storage().data_ptr() for piece in pieces} <= waited_for, name
            return function(name, number, *pieces)

        return in_threads(call, jobs)

    monkeypatch.setattr(delta, "_synchronize", finished.extend)
    monkeypatch.setattr(delta, "_in_threads", check)
    tied = torch.randn(8)

    def make():
        z = torch.randn(5, dtype=torch.complex64)
        return {"contiguous": torch.randn(6), "transposed": torch.randn(5, 7).T, "negated": z.conj().imag}

    new, old = make() | {"a": tied, "b": tied[2:]}, make() | {"a": tied + 1, "b": tied[2:] + 1}
    data = encode(new, old)
    weights = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in old.items()}
    weights["b"] = weights["a"][2:]
    apply_(weights, data)
    assert {name: raw(tensor) for name, tensor in weights.items()} == {
        name: raw(tensor) for name, tensor in new.items()
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine lacks a GPU")
def test_weights_on_a_gpu(example):
    """Use a stream of the caller's, whose work is not over when the delta is made."""
    new, old, data = example
    with torch.cuda.stream(torch.cuda.Stream()):
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            big = big @ big / 64
        sent = {name: tensor.to("cuda", non_blocking=True) for name, tensor in new.items()}
        assert encode(sent, old) == data == encode(sent, {name: tensor.cuda() for name, tensor in old.items()})
        wide = torch.zeros(5, 16, device="cuda")
        wide[:, ::2] = old["w"].cuda()
        weights = {"w": wide[:, ::2], "tail": old["tail"].cuda()}
        apply_(weights, data)
    assert all(raw(weights[name].cpu()) == raw(new[name]) for name in new) and not wide[:, 1::2].any()


def test_without_zstandard(example, monkeypatch):
    new, old, data = example
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r"deltas of weights need zstandard: pip install 'rlkernels\[weights\]'"):
        encode(new, old)
    refuses(old, data, "pip install", ImportError)


def test_one_import_is_enough():
    assert rlkernels.weights.encode is encode


def test_a_merged_weight_is_exact_in_float32_under_autocast():
    base, down, up = torch.randn(6, 5), torch.randn(2, 5), torch.randn(6, 2)
    expected = merged_weight(base, down, up, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged_weight(base, down, up, 0.5), expected)
    torch.testing.assert_close(expected, base + 0.5 * (up @ down))
