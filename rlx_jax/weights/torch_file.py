"""Read the tensors of a small file that `torch.save` wrote, without calling anything that its pickle names."""

from __future__ import annotations

import io
import math
import operator
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax.errors import CheckpointFormatError, LimitError, UnsupportedError, quote

MAX_PICKLE_BYTES = 2**16
_DTYPES = {"FloatStorage": "<f4", "HalfStorage": "<f2", "DoubleStorage": "<f8", "BFloat16Storage": ml_dtypes.bfloat16}


class _Memo(dict[int, Any]):
    """The memo of a pickle without containers: one that occurs twice in another, at each level, hashes forever."""

    def __setitem__(self, index: int, value: Any) -> None:
        if not isinstance(value, tuple | list | dict):
            super().__setitem__(index, value)


class _TensorUnpickler(pickle._Unpickler):  # the one in Python, as that in C allocates what an opcode declares
    """An unpickler for a dictionary of tensors; `archive` has the bytes of each in `folder`/data."""

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.DUP[0]}

    def __init__(self, archive: zipfile.ZipFile, folder: str, where: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        self.archive, self.folder, self.where = archive, folder, where
        self.memo, self.storages = _Memo(), dict[str, bytes]()

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name in the pickle; every other name is refused."""
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        functions = {("collections", "OrderedDict"): OrderedDict, ("torch._utils", "_rebuild_tensor_v2"): self.tensor}
        if (module, name) not in functions:
            raise UnsupportedError(f"{self.where}: the pickle names {quote(f'{module}.{name}')}, which is not loaded")
        return functions[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Return the elements of a tensor's storage."""
        _, dtype, key, _, count = pid
        if key not in self.storages:
            self.storages[key] = self.archive.read(f"{self.folder}/data/{key}")
        return np.frombuffer(self.storages[key], dtype, count)

    def tensor(self, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> Any:
        """Return a tensor, which must be contiguous."""
        shape = tuple(map(operator.index, shape))
        if strides != tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))):
            raise UnsupportedError(f"{self.where}: a tensor of shape {shape} has the strides {strides}")
        return storage[offset : offset + math.prod(shape)].reshape(shape)


def read_torch_file(raw: bytes, where: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a state dictionary by name. `raw` is the content of the file at `where`.

    Raises:
        UnsupportedError: the file has something else, or the format before torch 1.6. CheckpointFormatError: it is
            malformed. LimitError: its pickle is too large.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or any(info.compress_type for info in archive.infolist()):
                raise UnsupportedError(f"{where}: expected an uncompressed archive of torch.save with one data.pkl")
            if pickles[0].file_size > MAX_PICKLE_BYTES:
                raise LimitError(f"{where}: data.pkl has {pickles[0].file_size} bytes; limit: {MAX_PICKLE_BYTES}")
            tensors = _TensorUnpickler(archive, pickles[0].filename.removesuffix("/data.pkl"), where).load()
    except (UnsupportedError, LimitError):
        raise
    except Exception as error:  # zipfile and pickle raise many kinds for malformed bytes
        raise CheckpointFormatError(f"{where}: not a file of torch.save: {quote(error)}; save it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, np.ndarray) for value in tensors.values()):
        raise UnsupportedError(f"{where}: expected a dictionary of tensors")
    return tensors
