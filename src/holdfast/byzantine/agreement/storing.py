"""What a server has on disk: its votes, the chain of rounds, and the bytes of updates and models.

    DIR/votes/         the ballot, as the note of a log (log/segments.py). Its lock keeps a second process of the same
                       server out: two processes with one key could vote twice.
    DIR/rounds.chain   chain_file.py
    DIR/blobs/         one file for each digest; DIR/claims/: which of them are clients' updates of the round under way

Every method returns when what it was given is on disk. Belongs to one thread.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.byzantine.agreement.canonical import decode, digest_of, encode
from holdfast.byzantine.agreement.chain_file import ChainFile
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.messages import Ballot, Stored
from holdfast.byzantine.agreement.statements import Claim, Record
from holdfast.core.errors import IntegrityError, ProtocolError, StorageError
from holdfast.log.files import sync_directory, write_all
from holdfast.log.segments import Segments

VOTES_BYTES_MAX = 1024 * 1024


class Store:
    def __init__(self, directory: Path, federation: Federation) -> None:
        self._blobs, self._claims = directory / "blobs", directory / "claims"
        for place in (self._blobs, self._claims):
            place.mkdir(parents=True, exist_ok=True)
        self._votes = Segments.open(directory / "votes", segment_bytes_max=VOTES_BYTES_MAX)
        self.chain = ChainFile(directory, federation)

    def found(self) -> Stored:
        """What an earlier process left. Bytes that are not what their name says do not count."""
        try:
            ballot = decode(self._votes.note, {"Ballot": Ballot}) if self._votes.note else None
        except ProtocolError as error:
            raise IntegrityError(
                f"the votes in {self._votes} cannot be read: {error}",
                hint="start the server under a new name and key: without its votes it could vote twice",
            ) from error
        blobs = frozenset(
            bytes.fromhex(path.name)
            for path in self._blobs.iterdir()
            if digest_of(path.read_bytes()).hex() == path.name
        )
        claims = [decode(path.read_bytes(), {"Claim": Claim}) for path in self._claims.iterdir() if not path.suffix]
        return Stored(self.chain.last, ballot, tuple(claims), blobs)

    def persist(self, ballot: Ballot) -> None:
        self._votes.keep_note(encode(ballot))
        self._votes.commit()
        self._votes.drop_through(0)

    def keep_blob(self, content: bytes) -> bytes:
        digest = digest_of(content)
        _write(self._blobs / digest.hex(), content)
        return digest

    def keep_update(self, claim: Claim, content: bytes) -> None:
        self.keep_blob(content)  # first: a claim stands for bytes that are there
        _write(self._claims / claim.digest.hex(), encode(claim))

    def read_blob(self, digest: bytes) -> bytes | None:
        try:
            return (self._blobs / digest.hex()).read_bytes()
        except FileNotFoundError:
            return None

    def append(self, record: Record) -> None:
        self.chain.append(record)
        for path in self._claims.iterdir():
            path.unlink(missing_ok=True)

    def forget(self, digests: tuple[bytes, ...]) -> None:
        for digest in digests:
            (self._blobs / digest.hex()).unlink(missing_ok=True)

    def close(self) -> None:
        self._votes.close()
        self.chain.close()


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".new")
    try:
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        partial.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}", hint="look at the disk") from error
