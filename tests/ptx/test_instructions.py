"""Instructions of the interpreter against Python's numbers, numpy and torch, and the faults it must notice."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from ptx.gpu import Gpu
from ptx.memory import Fault
from ptx.program import TYPES, parse
from ptx.tensor_cores import places


def run(lines, tensors=(), threads=32, shared=0, gpu=None):
    """Run lines of PTX in one block. %me holds the thread, %at its word; %rd0, %rd1, ... the addresses of the tensors,
    and %own0, %own1, ... those of the thread's equal shares of them."""
    head = [".reg .pred %p<9>;", ".reg .b16 %h<9>;", ".reg .b32 %r<99>;", ".reg .f32 %f<99>;", ".reg .b64 %rd<99>;",
            ".reg .f64 %d<9>;", ".reg .b32 %me;", ".reg .b32 %at;", ".reg .b64 %own<9>;"]  # fmt: skip
    start = ["mov.u32 %me, %tid.x;", "shl.b32 %at, %me, 2;"]
    for i, tensor in enumerate(tensors):
        start += [f"ld.param.u64 %rd{i}, [p{i}];", f"mad.wide.u32 %own{i}, %me, {tensor.nbytes // threads}, %rd{i};"]
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(tensors)))
    text = "\n".join([f".visible .entry test({parameters})", "{", *head, *start, *lines, "ret;", "}"])
    gpu = gpu or Gpu(90)
    gpu.run(text, "test", [gpu.pointer(tensor) for tensor in tensors], (1,), threads, shared)


def compute(statement, kinds, to, inputs):
    """``statement`` of d, a, b, c for every row of inputs -> the results; one thread a row."""
    count = len(inputs)
    threads = -(-count // 32) * 32
    filled = [*inputs, *[inputs[0]] * (threads - count)]
    columns = [np.array(column, TYPES[kind]) for column, kind in zip(zip(*filled), kinds)]
    tensors = [torch.from_numpy(column.view(f"i{column.itemsize}")) for column in columns]
    predicate = to == "pred"
    out = torch.zeros(threads, dtype=getattr(torch, f"int{32 if predicate else 8 * TYPES[to].itemsize}"))
    lines, names = [], []
    for i, kind in enumerate([*kinds, "u32" if predicate else to]):
        size = TYPES[kind].itemsize
        names.append(f"{ {2: '%h', 4: '%r', 8: '%rd8'}[size] }{i + 1}")
        lines.append(f"ld.global.b{8 * size} {names[i]}, [%own{i}];")
    result = "%p1" if predicate else names[-1]
    lines.append(statement.format(d=result, **dict(zip("abc", names))) + ";")
    if predicate:
        lines.append(f"selp.b32 {names[-1]}, 1, 0, %p1;")
    lines.append(f"st.global.b{8 * size} [%own{len(kinds)}], {names[-1]};")
    run(lines, [*tensors, out], threads)
    actual = out.numpy()[:count]
    return actual.astype(bool) if predicate else actual.view(TYPES[to])


def wrap(value, kind):
    bits = 8 * TYPES[kind].itemsize
    value %= 1 << bits
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def toward_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


WHOLE = {
    "s32": [0, 1, -1, 7, -8, 2**31 - 1, -(2**31)], "u32": [0, 1, 7, 2**31, 2**32 - 1],
    "s64": [0, 1, -3, 2**40, 2**63 - 1, -(2**63)], "u64": [0, 5, 2**40, 2**64 - 1],
}  # fmt: skip
INTEGERS = {
    "add.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: a + b, "sub.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: a - b,
    "mul.lo.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: a * b, "min.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: min(a, b),
    "max.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: max(a, b),
    "div.{k} {{d}}, {{a}}, {{b}}": lambda a, b, k: toward_zero(a, b) if b else -1,
    "mad.lo.{k} {{d}}, {{a}}, {{b}}, {{a}}": lambda a, b, k: a * b + a,
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("text", INTEGERS, ids=lambda text: text.split(".")[0])
def test_integers(text, kind):
    rows = list(itertools.product(WHOLE[kind], repeat=2))
    if text.startswith("div"):
        rows = [(a, b) for a, b in rows if (a, b) != (min(WHOLE[kind]), -1)]  # as little defined as in C
    actual = compute(text.format(k=kind), (kind, kind), kind, rows)
    assert actual.tolist() == [wrap(INTEGERS[text](a, b, kind), kind) for a, b in rows]


@pytest.mark.parametrize(("kind", "bits"), [("s32", 32), ("u32", 32), ("s64", 64), ("u64", 64)])
def test_shifts_beyond_all_bits_fields_and_counts(kind, bits):
    rows = [(a, n) for a in WHOLE[kind] for n in (0, 1, bits - 1, bits, 200)]
    left = compute(f"shl.b{bits} {{d}}, {{a}}, {{b}}", (kind, "u32"), kind, rows)
    assert left.tolist() == [wrap(a << n, kind) if n < bits else 0 for a, n in rows]
    right = compute(f"shr.{kind} {{d}}, {{a}}, {{b}}", (kind, "u32"), kind, rows)
    assert right.tolist() == [a >> n for a, n in rows]
    counted = compute(f"popc.b{bits} {{d}}, {{a}}", (kind,), "u32", [(a,) for a in WHOLE[kind]])
    assert counted.tolist() == [(a % (1 << bits)).bit_count() for a in WHOLE[kind]]
    if bits == 32:
        field = compute(f"bfe.{kind} {{d}}, {{a}}, 4, 3", (kind,), kind, [(a,) for a in WHOLE[kind]])
        cut = [(a >> 4) & 7 for a in WHOLE[kind]]
        assert field.tolist() == [c - 8 if kind == "s32" and c & 4 else c for c in cut]


def test_bytes_are_chosen_out_of_two_numbers():
    rows = [(0x83828100, 0x87860504, choice) for choice in (0x3210, 0x7654, 0x5410, 0x0FC9, 0x8BAF)]
    actual = compute("prmt.b32 {d}, {a}, {b}, {c}", ("u32",) * 3, "u32", rows)
    assert actual.tolist() == [0x83828100, 0x87860504, 0x05048100, 0x00FF00FF, 0x00FFFFFF]


def test_wide_and_high_products():
    for kind, wide in (("s32", "s64"), ("u32", "u64")):
        rows = list(itertools.product(WHOLE[kind], repeat=2))
        actual = compute(f"mul.wide.{kind} {{d}}, {{a}}, {{b}}", (kind, kind), wide, rows)
        assert actual.tolist() == [a * b for a, b in rows]
        actual = compute(f"mul.hi.{kind} {{d}}, {{a}}, {{b}}", (kind, kind), kind, rows)
        assert actual.tolist() == [wrap(a * b >> 32, kind) for a, b in rows]


def test_a_fused_product_is_rounded_once():
    rows = [(1 + 2**-12, 1 + 2**-12, -1.0), (3.0, 1 / 3, -1.0), (1e-3, 1e3, 7.0), (2.0**-70, 2.0**-70, 0.0)]
    rows = [tuple(float(np.float32(x)) for x in row) for row in rows]
    actual = compute("fma.rn.f32 {d}, {a}, {b}, {c}", ("f32",) * 3, "f32", rows)
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in rows]
    assert actual.tolist() == [float(np.float32(float(e))) for e in exact]


NAN = math.nan
COMPARED = [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0), (NAN, 1.0), (1.0, NAN), (math.inf, NAN), (0.0, -0.0)]


@pytest.mark.parametrize(("name", "holds"), [
    ("lt", lambda a, b: a < b), ("ge", lambda a, b: a >= b), ("eq", lambda a, b: a == b),
    ("ne", lambda a, b: a != b and a == a and b == b), ("neu", lambda a, b: a != b),
    ("geu", lambda a, b: not a < b), ("leu", lambda a, b: not a > b), ("num", lambda a, b: a == a and b == b),
    ("nan", lambda a, b: a != a or b != b),
])  # fmt: skip
def test_comparisons_of_numbers_that_are_missing(name, holds):
    actual = compute(f"setp.{name}.f32 {{d}}, {{a}}, {{b}}", ("f32", "f32"), "pred", COMPARED)
    assert actual.tolist() == [holds(a, b) for a, b in COMPARED]


def test_minima_drop_a_missing_number_or_keep_it():
    assert compute("min.f32 {d}, {a}, {b}", ("f32", "f32"), "f32", [(NAN, 1.0), (2.0, NAN)]).tolist() == [1.0, 2.0]
    assert np.isnan(compute("max.NaN.f32 {d}, {a}, {b}", ("f32", "f32"), "f32", [(NAN, 1.0), (2.0, NAN)])).all()
    assert compute("max.bf16 {d}, {a}, {b}", ("u16", "u16"), "u16", [(0x3F80, 0x4000)]).tolist() == [0x4000]
    rows = [(0x3F80_BF80, 0x7FFF_4000), (0xC000_3F80, 0xBF80_7FFF)]  # 1 and -1, NaN and 2; -2 and 1, -1 and NaN
    assert compute("max.bf16x2 {d}, {a}, {b}", ("u32", "u32"), "u32", rows).tolist() == [0x3F80_4000, 0xBF80_3F80]
    actual = compute("max.NaN.bf16x2 {d}, {a}, {b}", ("u32", "u32"), "u32", rows)
    assert actual.tolist() == [0x7FFF_4000, 0xBF80_7FFF]


HALVES = [1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 3.4e38, 1e-40, 65519.0, math.inf, -0.0]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_sixteen_bits_round_to_the_nearest_and_ties_to_even(name, dtype):
    rows = [(a,) for a in HALVES]
    expected = torch.tensor(HALVES).to(dtype)
    actual = compute(f"cvt.rn.{name}.f32 {{d}}, {{a}}", ("f32",), "u16", rows)
    assert actual.tolist() == expected.view(torch.uint16).tolist()
    back = compute(f"cvt.f32.{name} {{d}}, {{a}}", ("u16",), "f32", [(bits,) for bits in actual])
    assert back.tolist() == expected.float().tolist()
    pairs = compute(f"cvt.rn.{name}x2.f32 {{d}}, {{a}}, {{b}}", ("f32", "f32"), "u32", [(1.0, -2.5)])
    high, low = torch.tensor([1.0, -2.5]).to(dtype).view(torch.uint16).tolist()
    assert pairs.tolist() == [high << 16 | low]


def test_conversions_to_integers_stop_at_the_ends():
    values = [2.5, -2.5, 3e9, -3e9, NAN, 0.5]
    rows = [(v,) for v in values]
    assert compute("cvt.rzi.s32.f32 {d}, {a}", ("f32",), "s32", rows).tolist() == [2, -2, 2**31 - 1, -(2**31), 0, 0]
    assert compute("cvt.rni.s32.f32 {d}, {a}", ("f32",), "s32", rows).tolist() == [2, -2, 2**31 - 1, -(2**31), 0, 0]
    assert compute("cvt.rzi.u32.f32 {d}, {a}", ("f32",), "u32", rows).tolist() == [2, 0, 3 * 10**9, 0, 0, 0]
    assert compute("cvt.s64.s32 {d}, {a}", ("s32",), "s64", [(-5,)]).tolist() == [-5]
    assert compute("cvt.u64.u32 {d}, {a}", ("s32",), "s64", [(-5,)]).tolist() == [2**32 - 5]


@pytest.mark.parametrize(("mode", "count", "source"), [
    ("bfly", 5, lambda lane: lane ^ 5), ("up", 3, lambda lane: lane - 3 if lane >= 3 else lane),
    ("idx", 7, lambda lane: 7),
])  # fmt: skip
def test_shuffles(mode, count, source):
    out = torch.zeros(64, dtype=torch.int32)
    bound = 0 if mode == "up" else 31
    run([f"shfl.sync.{mode}.b32 %r1, %at, {count}, {bound}, -1;", "st.global.b32 [%own0], %r1;"], [out], 64)
    assert out.tolist() == [4 * (warp + source(lane)) for warp in (0, 32) for lane in range(32)]


def test_lanes_of_a_diverged_warp_come_together_again():
    out = torch.zeros(32, dtype=torch.int32)
    run(["mov.u32 %r1, 0;", "$loop:", "add.s32 %r1, %r1, 1;", "setp.lt.u32 %p1, %r1, %me;", "@%p1 bra $loop;",
         "shfl.sync.idx.b32 %r2, %r1, 31, 31, -1;", "st.global.b32 [%own0], %r2;"], [out])  # fmt: skip
    assert out.tolist() == [31] * 32


def test_product_of_a_warp_by_the_places_that_the_manual_gives():
    """m16n8k16: where thread l holds entry i of A, B and C."""
    a, b, c = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16(), torch.randn(16, 8)
    fragments = torch.zeros(3, 32, 8, dtype=torch.int16), torch.zeros(32, 4)
    for lane, i in itertools.product(range(32), range(8)):
        group, place = lane // 4, lane % 4
        row, column = group + (8 if i in (2, 3, 6, 7) else 0), 2 * place + (i & 1) + (8 if i >= 4 else 0)
        fragments[0][0, lane, i] = a.view(torch.int16)[row, column]
        if i < 4:
            fragments[0][1, lane, i] = b.view(torch.int16)[2 * place + (i & 1) + (8 if i >= 2 else 0), group]
            fragments[1][lane, i] = c[group + (8 if i >= 2 else 0), 2 * place + (i & 1)]
    left, right = (fragments[0][i].contiguous() for i in (0, 1))
    out = torch.zeros(32, 4)
    run(["ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%own0];", "ld.global.v2.b32 {%r5, %r6}, [%own1];",
         "ld.global.v4.b32 {%f1, %f2, %f3, %f4}, [%own2];",
         "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, "
         "{%f1, %f2, %f3, %f4};", "st.global.v4.b32 [%own3], {%f1, %f2, %f3, %f4};"],
        [left, right, fragments[1], out])  # fmt: skip
    expected = (a.double() @ b.double() + c).float()
    for lane, i in itertools.product(range(32), range(4)):
        assert out[lane, i] == expected[lane // 4 + (8 if i >= 2 else 0), 2 * (lane % 4) + (i & 1)]


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_between_shared_memory_and_registers(turned):
    """Thread l gets two neighbours of row l // 4, or of that column; what is stored back is what was loaded."""
    matrix, registers, back = torch.randperm(64).short(), torch.zeros(32, dtype=torch.int32), torch.zeros(64).short()
    trans = ".trans" if turned else ""
    run(["ld.global.b32 %r1, [%own0];", "st.shared.b32 [%at], %r1;", "and.b32 %r2, %me, 7;", "shl.b32 %r2, %r2, 4;",
         f"ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {{%r3}}, [%r2];", "st.global.b32 [%own1], %r3;",
         f"stmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 [%r2 + 128], {{%r3}};", "ld.shared.b32 %r4, [%at + 128];",
         "st.global.b32 [%own2], %r4;"], [matrix, registers, back], shared=256)  # fmt: skip
    square = matrix.view(8, 8).T if turned else matrix.view(8, 8)
    assert torch.equal(registers.view(torch.int16).view(8, 8), square.contiguous())
    assert torch.equal(back, matrix)


def test_operands_of_asynchronous_products_lie_in_swizzled_rows():
    """Rows of 128 bytes: the 16-byte piece c of row r lies at place c ^ (r % 8); eight rows take 1,024 bytes."""
    descriptor = 1 << 62 | (1024 >> 4) << 32 | (64 >> 4)  # starts at byte 64 of the first row: at piece 4
    at = places(descriptor, 64, 0)
    for row, k in itertools.product(range(64), range(16)):
        piece = (4 + k // 8) ^ row % 8
        assert at[row, k] == row // 8 * 1024 + row % 8 * 128 + 16 * piece + 2 * (k % 8)


STORE, BARRIER, OTHER_WARP = "st.shared.b32 [%at], %me;", "bar.sync 0;", "xor.b32 %r1, %at, 128;"
FAULTS = {
    "outside of all tensors": ["ld.global.b32 %r1, [%rd0 + 4096];"],
    "no multiple of 4": ["ld.global.b32 %r1, [%rd0 + 2];"],
    "what nobody wrote": ["ld.shared.b32 %r1, [%at];"],
    "outside of 256 bytes": ["st.shared.b32 [%at + 4], %me;"],
    "reads what another warp has written": [STORE, OTHER_WARP, "ld.shared.b32 %r2, [%r1];"],
    "writes what another warp has read": [STORE, BARRIER, OTHER_WARP, "ld.shared.b32 %r2, [%r1];", STORE],
    "lanes are missing": ["setp.lt.u32 %p1, %me, 9;", "@%p1 shfl.sync.idx.b32 %r1, %me, 0, 31, -1;"],
    "before its asynchronous copies": ["shl.b32 %at, %me, 4;", "setp.lt.u32 %p1, %me, 8;",
                                       "@%p1 cp.async.cg.shared.global [%at], [%rd0], 16;", "cp.async.commit_group;"],
    "does not end": ["$loop:", "bra.uni $loop;"],
}  # fmt: skip


@pytest.mark.parametrize("said", FAULTS)
def test_faults(said, monkeypatch):
    monkeypatch.setattr("ptx.block.MOST_STEPS", 1000)
    with pytest.raises(Fault, match=said):
        run(FAULTS[said], [torch.zeros(32, dtype=torch.int32)], 64, 256)
    fine = [STORE, BARRIER, OTHER_WARP, "ld.shared.b32 %r2, [%r1];", BARRIER, STORE, "ld.global.b32 %r1, [%rd0];"]
    run(fine, [torch.zeros(32, dtype=torch.int32)], 64, 256)


@pytest.mark.parametrize("line", ["lg2.approx.f32 %f1, %f2;", "setp.ltu.f32 %p1, %f1, %f2;", "add.f16x2 %r1, %r2;"])
def test_an_unknown_instruction_is_named(line):
    with pytest.raises(NotImplementedError, match=line.split(" ")[0]):
        run([line])


def test_what_a_kernel_leaves_to_another_is_written_and_the_rest_is_not():
    word, load = "mad.wide.u32 %rd9, %me, 4, %rd0;", "ld.global.b32 %r1, [%rd9];"
    with Gpu(90) as gpu:
        made = torch.empty(64, dtype=torch.int32)
    run([word, "st.global.b32 [%rd9], %me;"], [made], gpu=gpu)
    run([word, load], [made], gpu=gpu)
    with pytest.raises(Fault, match="what nobody wrote, at byte 128"):
        run([word, load], [made], threads=64, gpu=gpu)
    assert made[:32].tolist() == list(range(32))


def test_parameters_lie_where_their_alignment_puts_them():
    program = parse(".entry k(.param .u32 a, .param .align 8 .b8 s[12], .param .u16 b, .param .u64 c)\n{\nret;\n}", "k")
    assert program.parameters == {"a": (0, 4), "s": (8, 12), "b": (20, 2), "c": (24, 8)}
