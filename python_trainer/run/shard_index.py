"""Reads the index of torch.distributed.checkpoint, which is a pickle, without running what it names."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata

from python_trainer.errors import first_line

# what an index of tensors consists of, beside dtypes; none of it does more than hold values
NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # of Python 3.13
}  # fmt: skip


class IndexUnpickler(pickle.Unpickler):
    """Refuse every name that an index of tensors does not need."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names; ValueError if an index does not need it."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in NAMES.get(module, ()):
            raise ValueError(f"the index of shards names {module}.{name}, which no index of tensors has")
        return super().find_class(module, name)


class ShardReader(FileSystemReader):
    """Read shards, whose index may come from anyone."""

    def read_metadata(self) -> Metadata:  # type: ignore[override]
        """Read the index of the shards of all ranks.

        Raises:
            OSError: it cannot be read.
            ValueError: it is damaged, or names something else.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                index = IndexUnpickler(file).load()
                index.storage_meta.load_id = self.load_id
                tensors = [(entry.size, entry.properties.dtype) for entry in index.state_dict_metadata.values()]
            except (pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"the index of shards is damaged: {first_line(error)}") from error
        if not all(isinstance(size, torch.Size) and isinstance(dtype, torch.dtype) for size, dtype in tensors):
            raise ValueError("the index of shards is damaged: an entry is no tensor")
        return index
