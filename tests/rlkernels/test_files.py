"""Files and folders that are replaced as a whole."""

import os
import threading

import pytest

from rlkernels._files import draft_of, remove_folder, replace_file, replace_folder


def mode(path):
    return path.stat().st_mode & 0o777


def write(folder, text):
    draft = draft_of(folder)
    (draft / "inner").mkdir(parents=True)
    (draft / "inner" / "file").write_text(text)
    replace_folder(folder)


def test_what_is_no_file_is_written_to(tmp_path):
    """A pipe, as a device: in its place a file would appear, and nobody would read it."""
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    replace_file(tmp_path / "pipe", b"through")
    reader.join()
    assert received == [b"through"] and (tmp_path / "pipe").is_fifo()


def test_a_file_that_cannot_be_written_is_named_and_unchanged(tmp_path):
    for path, error in ((tmp_path / "none" / "file", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error) as raised:
            replace_file(path, b"")
        assert raised.value.filename == str(path)
    file = tmp_path / "file"
    file.write_bytes(b"old")
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(OSError, match="loop"):
        replace_file(tmp_path / "loop" / "file", b"new")
    assert file.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_folder_keeps_its_link_and_permissions(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "model"
    folder = tmp_path / "disk" / "here"
    link.symlink_to(folder)
    for text in "123":
        write(link, text)
        assert link.is_symlink() and (folder / "inner" / "file").read_text() == text
        if text == "1":
            (folder / "inner" / "file").chmod(0o640)
            folder.chmod(0o770)
    assert (mode(folder), mode(folder / "inner" / "file")) == (0o770, 0o640)
    assert os.listdir(tmp_path / "disk") == ["here"]  # no drafts are left, and nothing that was replaced


def test_removing_a_link_leaves_what_it_leads_to(tmp_path):
    write(tmp_path / "there", "1")
    (tmp_path / "link").symlink_to("there")
    (tmp_path / ".old-there").mkdir()  # of a kill
    remove_folder(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "there" / "inner" / "file").read_text() == "1"
    for _ in range(2):
        remove_folder(tmp_path / "there")
        assert not os.listdir(tmp_path)
