"""Store: files that two sides share, in a folder or at an fsspec URL; each is written once by one writer.

    path ─ put ─> temporary name, renamed (folder) or one upload (object store) ─ get, names ─> the other side
    message = length, SHA-256, MAC of the token ─ header as JSON ─ body

A message that is not whole yet, or damaged, reads as missing. No clock of another machine is compared.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from rillflow.errors import StreamError
from rillflow_links.remote.transport import Unreachable

_FRAME = struct.Struct("<4sQQ32s32s")
_MAGIC = b"RLM1"
_LASTING = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
"""Errors that waiting does not cure."""


class SharedStore(Protocol):
    """Files by relative path."""

    def put(self, path: str, data: bytes) -> None:
        """Write a file; a reader finds all of it or none.

        Raises:
            Unreachable: it failed in a way that may pass, as when the store is full.
            StreamError: the store cannot be written at all.
        """

    def get(self, path: str) -> bytes | None:
        """Return a file's bytes; None if there is none."""

    def names(self, folder: str) -> list[str]:
        """Return the relative paths of all files below a folder, sorted."""

    def remove(self, path: str) -> None:
        """Delete a file, if it is there."""


class FolderStore:
    """A folder, such as one on a network file system.

    Args:
        root: the folder; made if it does not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, path: str, data: bytes) -> None:
        """See SharedStore."""
        target = self._root / path
        draft = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            draft.replace(target)
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be written", error) from None

    def get(self, path: str) -> bytes | None:
        """See SharedStore."""
        try:
            return (self._root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be read", error) from None

    def names(self, folder: str) -> list[str]:
        """See SharedStore."""
        try:
            return sorted(
                str(PurePosixPath(each.relative_to(self._root)))
                for each in (self._root / folder).rglob("*")
                if not each.name.startswith(".") and each.is_file()
            )
        except OSError as error:
            raise _failed(f"{self._root}/{folder} cannot be listed", error) from None

    def remove(self, path: str) -> None:
        """See SharedStore."""
        try:
            (self._root / path).unlink(missing_ok=True)
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be removed", error) from None


class FsspecStore:
    """A place that fsspec knows, such as ``s3://bucket/folder`` or ``memory://folder``.

    Args:
        url: its URL.

    Raises:
        StreamError: fsspec lacks the protocol's package.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        try:
            self._files, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StreamError(
                f"the store {url} cannot be opened", why=str(error), fix="install the package of its protocol"
            ) from error

    def put(self, path: str, data: bytes) -> None:
        """See SharedStore."""
        try:
            target = f"{self._root}/{path}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(target, data)
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be written", error) from None

    def get(self, path: str) -> bytes | None:
        """See SharedStore."""
        try:
            found: bytes = self._files.cat_file(f"{self._root}/{path}")
            return found
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be read", error) from None

    def names(self, folder: str) -> list[str]:
        """See SharedStore."""
        root = self._root.strip("/")
        try:
            self._files.invalidate_cache()
            found = self._files.find(f"{self._root}/{folder}")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _failed(f"{self._root}/{folder} cannot be listed", error) from None
        return sorted(str(each).strip("/").removeprefix(root).strip("/") for each in found)

    def remove(self, path: str) -> None:
        """See SharedStore."""
        try:
            self._files.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise _failed(f"{self._root}/{path} cannot be removed", error) from None


def store_at(place: str) -> SharedStore:
    """Return the store of a folder's path or of an fsspec URL."""
    return FsspecStore(place) if "://" in place else FolderStore(Path(place))


@dataclass(frozen=True, kw_only=True)
class StoreMessage:
    """A request or an answer."""

    says: Mapping[str, Any]
    """Header of the message, a JSON object."""
    body: bytes = b""
    """Bytes after the header."""
    is_genuine: bool = True
    """Whether the message's MAC was made with the token."""


def packed(says: Mapping[str, Any], body: bytes, token: str) -> bytes:
    """Return the bytes of a message."""
    header = json.dumps(says).encode()
    data = header + body
    mac = hmac.digest(token.encode(), data, "sha256")
    return _FRAME.pack(_MAGIC, len(header), len(data), hashlib.sha256(data).digest(), mac) + data


def unpacked(data: bytes | None, token: str) -> StoreMessage | None:
    """Return a message; None if its bytes are missing, incomplete or damaged."""
    if data is None or len(data) < _FRAME.size:
        return None
    magic, header_bytes, length, digest, mac = _FRAME.unpack_from(data)
    rest = data[_FRAME.size :]
    if magic != _MAGIC or len(rest) != length or hashlib.sha256(rest).digest() != digest:
        return None
    is_genuine = hmac.compare_digest(mac, hmac.digest(token.encode(), rest, "sha256"))
    try:
        says = json.loads(rest[:header_bytes])
    except ValueError:
        return None
    if not isinstance(says, dict):
        return None
    return StoreMessage(says=says, body=rest[header_bytes:], is_genuine=is_genuine)


def _failed(what: str, error: OSError) -> StreamError:
    """Return the error of a store's operation: Unreachable if it may pass."""
    if error.errno in _LASTING:
        fix = "give this user the right to read and write there"
        return StreamError(what, why=str(error), fix=fix)
    return Unreachable(what, why=str(error), fix="free space in the store, or check its connection")
