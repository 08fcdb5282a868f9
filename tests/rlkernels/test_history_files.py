"""A rollout history in files and tensors, and what of them is refused."""

import math
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import take_backend

import rlkernels


@pytest.fixture(params=["cpu", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Every test runs on the compiled index and on its model in Python."""
    return take_backend(request.param, monkeypatch)


def test_save_and_load(tmp_path):
    history = rlkernels.RolloutHistory(max_tokens=5000, token_cost=0.03, depth=16)
    for i in range(30):
        prompt = [i % 4, 1]
        history.add(prompt, torch.randint(20, (i,)).tolist(), reward=i / 7, epoch=i // 10)
    history.save(tmp_path / "h.bin")
    again = rlkernels.RolloutHistory.load(tmp_path / "h.bin")
    again.save(tmp_path / "again.bin")
    assert (tmp_path / "h.bin").read_bytes() == (tmp_path / "again.bin").read_bytes()
    data = history.to_bytes()
    assert bytes(data.tolist()) == (tmp_path / "h.bin").read_bytes()
    assert torch.equal(rlkernels.RolloutHistory.from_bytes(data).to_bytes(), data)
    data[-1] ^= 1
    with pytest.raises(ValueError, match="the tensor is damaged"):
        rlkernels.RolloutHistory.from_bytes(data)
    for i in range(100):
        prompt, generated = [i % 4, 1], torch.randint(20, (i % 9,)).tolist()
        assert history.draft([prompt], [generated], max_tokens=8) == again.draft([prompt], [generated], max_tokens=8)
    assert list(tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2  # no temporary file left


def test_savers_of_one_path_do_not_meet(tmp_path):
    path = tmp_path / "h.bin"
    rlkernels.RolloutHistory().save(path)

    def save(seed):
        history = rlkernels.RolloutHistory()
        for i in range(12):
            history.add([seed], range(300 * (i % 3), 500))
            history.save(path)

    before = os.umask(0o002)
    try:
        with ThreadPoolExecutor(6) as pool:
            savers = [pool.submit(save, seed) for seed in range(6)]
            while not all(saver.done() for saver in savers):
                rlkernels.RolloutHistory.load(path)
    finally:
        os.umask(before)
    assert not any(saver.exception() for saver in savers)
    assert rlkernels.RolloutHistory.load(path).stats["rollouts"] > 0
    assert path.stat().st_mode & 0o777 == 0o664  # as any new file
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        rlkernels.RolloutHistory().save(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "h.bin"]  # no temporary file left


def test_paths_are_taken_as_the_system_takes_them(tmp_path):
    history = rlkernels.RolloutHistory()
    history.add([1], [2, 3])
    for path in (tmp_path / "\udcff", os.fsencode(tmp_path / "bytes")):
        history.save(path)
        assert rlkernels.RolloutHistory.load(path).stats["tokens"] == 2
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="null byte"):
        history.save(f"{tmp_path}/bytes\0more")  # would be another file
    with pytest.raises(ValueError, match="null byte"):
        rlkernels.RolloutHistory.load(f"{tmp_path}/bytes\0more")
    assert sorted(os.listdir(tmp_path)) == before


def test_an_emptied_history_forgets_the_epoch_as_its_file_does():
    history = rlkernels.RolloutHistory()
    history.add([1], range(5), epoch=9)
    history.resize(3)
    assert history.stats["rollouts"] == 0
    again = rlkernels.RolloutHistory.from_bytes(history.to_bytes())
    assert torch.equal(history.to_bytes(), again.to_bytes())
    assert torch.equal(history.to_bytes(), rlkernels.RolloutHistory(max_tokens=3).to_bytes())


def test_records_that_make_no_sense():
    """A file with a right checksum that was not written by us."""
    history = rlkernels.RolloutHistory(max_tokens=20)
    history.add([1], [2, 3], reward=0.5, epoch=4)
    payload = bytes(history.to_bytes().tolist())[24:]

    def load(data):
        whole = b"RLKHIST\0" + struct.pack("<IIQ", 1, zlib.crc32(data), len(data)) + data
        return rlkernels.RolloutHistory.from_bytes(torch.tensor(list(whole), dtype=torch.uint8))

    assert load(payload).stats["tokens"] == 2
    # bound, cost, depth, epoch, prompts, rollouts; of a prompt length, ids; of a rollout prompt, length, reward, epoch
    for at, kind, value in [(0, "q", 1), (8, "d", math.nan), (16, "q", 4), (24, "q", 3), (32, "Q", 2**60), (40, "Q", 2),
                            (48, "I", 2**31), (52, "i", -1), (56, "I", 1), (60, "I", 0), (64, "d", math.inf),
                            (80, "i", -5)]:  # fmt: skip
        data = bytearray(payload)
        struct.pack_into(f"<{kind}", data, at, value)
        with pytest.raises(ValueError, match="the tensor is damaged: a record does not make sense"):
            load(bytes(data))
    with pytest.raises(ValueError, match="a record does not make sense"):
        load(payload + b"1234")


@pytest.mark.parametrize("damage", ["empty", "magic", "version", "cut", "longer", "flip"])
def test_damaged_file(tmp_path, damage):
    history = rlkernels.RolloutHistory()
    history.add([1], list(range(50)))
    path = tmp_path / "h.bin"
    history.save(path)
    data = path.read_bytes()
    broken, message = {
        "empty": (b"", "not a rollout history"),
        "magic": (b"X" + data[1:], "not a rollout history"),
        "version": (data[:8] + b"\x09" + data[9:], "version 9"),
        "cut": (data[:-5], "damaged"),
        "longer": (data + b"12345", "damaged"),
        "flip": (data[:60] + bytes([data[60] ^ 4]) + data[61:], "damaged"),
    }[damage]
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=message):
        rlkernels.RolloutHistory.load(path)
    with pytest.raises(FileNotFoundError):
        rlkernels.RolloutHistory.load(tmp_path / "none")
