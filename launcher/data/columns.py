"""Append-only ``.npy`` files: what a pack writes, cut back to the last noted length after a kill.

Bytes go out through one unbuffered write per batch of rows, so that what was appended before the journal
was renamed is in the page cache when the process is killed. The header has a fixed length and gets the
final shape on ``finish``; until then it says zero rows.
"""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from models.errors import DataError

HEADER_BYTES = 128
_BLOCK_BYTES = 1 << 22


class Column:
    """One array on disk that grows along axis 0; ``rows`` more than zero reopens it at that length.

    ``hashing`` is a pool of one thread, which columns may share.
    """

    def __init__(
        self,
        path: Path,
        dtype: str,
        row_shape: tuple[int, ...] = (),
        rows: int = 0,
        *,
        hashing: ThreadPoolExecutor,
    ) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.row_bytes = self.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        self.rows = rows
        self.hasher = hashlib.sha256()
        self.hashing = hashing
        self.hashed: Future[None] | None = None
        self.file = path.open("r+b" if rows else "w+b", buffering=0)
        if rows:
            self._cut()
        else:
            _write_all(self.file.fileno(), header(self.dtype, (0, *row_shape)))

    def append(self, array: np.ndarray) -> None:
        """Add rows of this column's dtype and row shape."""
        data = np.ascontiguousarray(array, dtype=self.dtype)
        assert data.shape[1:] == self.row_shape, (self.path, data.shape)
        if data.size:
            view = data.reshape(-1).view(np.uint8).data
            _write_all(self.file.fileno(), view)
            # In another thread, which needs no GIL; one thread, so in order.
            self.hashed = self.hashing.submit(self.hasher.update, view)
            self.rows += len(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the array's bytes so far, without the header."""
        if self.hashed is not None:
            self.hashed.result()
        return self.hasher.hexdigest()

    def finish(self) -> dict[str, object]:
        """Write the final header, bring the file to disk, close it; gives its entry in the manifest."""
        shape = (self.rows, *self.row_shape)
        os.pwrite(self.file.fileno(), header(self.dtype, shape), 0)
        os.fsync(self.file.fileno())
        self.file.close()
        return {
            "dtype": self.dtype.str,
            "shape": shape,
            "bytes": HEADER_BYTES + self.rows * self.row_bytes,
            "sha256": self.sha256,
        }

    def close(self) -> None:
        """Close the file as it is, unfinished."""
        self.file.close()

    def _cut(self) -> None:
        length = HEADER_BYTES + self.rows * self.row_bytes
        if os.fstat(self.file.fileno()).st_size < length:
            raise DataError(
                f"{self.path}: shorter than the journal of the pack says; remove the folder and pack again"
            )
        self.file.truncate(length)
        self.file.seek(HEADER_BYTES)
        while block := self.file.read(_BLOCK_BYTES):
            self.hasher.update(block)


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Give an NPY 1.0 header of HEADER_BYTES (NumPy pads to 64 and leaves room for axis 0 to grow)."""
    buffer = BytesIO()
    fields = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, fields)
    data = buffer.getvalue()
    assert len(data) == HEADER_BYTES, len(data)
    return data


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """``os.write`` may write less than it is given (2 GiB at most on Linux)."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
