"""holdfast.data.Stream: a dataset over files that are too many or too large to shuffle sample by sample.

Sample n can be read by itself, and the order of an epoch is a function of the run's seed, so that shard v of step s is
the same wherever it is computed, and no worker has to read what came before it. With `pack`, a sample is a sequence of
tokens from documents that follow each other in the epoch's order. Owns the sources and a few decoded documents.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import Dataset

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.arrangement import Arranged, Arrangement, CutArrangement
from holdfast.data.epoch_cut import EpochCut
from holdfast.data.streams.block_order import BlockOrder, Numbers
from holdfast.data.streams.index_files import kept_index, temporary_index
from holdfast.data.streams.packing import DocumentLengths, Packing
from holdfast.data.streams.parquet import KeptRows, Parquet
from holdfast.data.streams.sources import Lines, Source, Tar

_BLOCKS = 64  # of a window, unless it is said otherwise: so many places of the data it has samples from
_AT_ONCE = 1 << 14  # documents whose lengths are written at a time
_DOCUMENTS = 32  # decoded ones that are kept: neighbouring sequences have pieces of one
_INSTEAD = {
    ".npy": "holdfast.data.Tokens(path, length=...)",
    ".bin": 'holdfast.data.Tokens(path, length=..., dtype="uint16")',
    ".gz": "the file without compression, in which a sample can be read by itself (gunzip)",
    ".zst": "the file without compression, in which a sample can be read by itself (unzstd)",
    ".tgz": "the file without compression, in which a sample can be read by itself (gunzip)",
}


class Stream(Dataset[Any], Arranged):
    """`sources`: paths, with * for several, and sources such as holdfast.data.Tokens; or a list of these.

    A path is of a tar or a Parquet file if it ends so, and of a file with a sample a line otherwise. `decode` makes of
    what the source gives what the training needs. Samples are shuffled in windows of at most `shuffle_buffer`, which
    come from blocks of `block` neighbours, and from one where that is larger; 0 leaves them as they are. With `pack`,
    decode gives a document's tokens, and a sample is `pack` of them. `index` is a directory for the indices, which are
    kept beside the data else.
    """

    def __init__(
        self,
        sources: Any,
        *,
        decode: Callable[[Any], Any] | None = None,
        shuffle_buffer: int = 8192,
        block: int | None = None,
        pack: int | None = None,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_number("shuffle_buffer", shuffle_buffer, 0, "samples that are shuffled at a time, 0 for none")
        _check_number("block", 1 if block is None else block, 1, "neighbouring samples that stay in one window")
        _check_number("pack", 1 if pack is None else pack, 1, "tokens of a sequence")
        if decode is not None and not callable(decode):
            raise ConfigError(f"decode is {a_kind(decode)}, not a function", hint="give a function of what was read")
        self._index = None if index is None else Path(index)
        self._sources = list(_opened(sources, self._index))
        self._decode = decode
        self._window = shuffle_buffer
        wanted = max(1, shuffle_buffer // _BLOCKS) if block is None else block
        self._runs = [run for source in self._sources for run in _runs(source, wanted)]
        self._block = max([wanted, *(_read_at_once(source, block) for source in self._sources)])
        kept = KeptRows(shuffle_buffer)
        for source in self._sources:
            if isinstance(source, Parquet):
                source.keep_in(kept)
        self._ends = list(accumulate(len(source) for source in self._sources))
        self._pack = pack
        self._lengths = None if pack is None else DocumentLengths([self._measured(one) for one in self._sources])
        self._documents: dict[int, Any] = {}
        self._in_line = None if pack is None else self._packing(self._order(0, shuffle=False))

    def __len__(self) -> int:
        if self._pack is not None and self._lengths is not None:
            return -(-self._lengths.total // self._pack)
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Any:
        """Sample `number` in the order of the sources; with `pack`, the sequence there if nothing is shuffled."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.read(number) if self._in_line is None else self.packed(self._in_line, 0, number)

    def arranged(self, seed: int, *, shuffle: bool) -> Arrangement:
        order = self._order(seed, shuffle=shuffle and self._window > 1)
        identity = repr(([one.identity for one in self._sources], self._block, self._window, self._pack, len(self)))
        digest = xxhash.xxh3_128_hexdigest(identity.encode())
        return _InOrder(self, order, digest) if self._pack is None else _Packed(self, self._packing(order), digest)

    def read(self, number: int) -> Any:
        """What decode makes of a sample, or a document, by its number in the order of the sources."""
        source = bisect_right(self._ends, number)
        found = self._sources[source].read(number - (self._ends[source - 1] if source else 0))
        return found if self._decode is None else self._decode(found)

    def packed(self, packing: Packing, epoch: int, sequence: int) -> torch.Tensor:
        """The tokens of a sequence."""
        pieces = [self._document(number)[start:stop] for number, start, stop in packing.pieces(epoch, sequence)]
        return torch.from_numpy(numpy.concatenate(pieces))

    def _document(self, number: int) -> Numbers:
        found = self._documents.get(number)
        if found is None:
            assert self._lengths is not None
            found = numpy.asarray(self.read(number), dtype=numpy.int64)
            known = int(self._lengths.of(numpy.array([number]))[0])
            if found.shape != (known,):
                raise ConfigError(
                    f"decode makes tokens of shape {found.shape} of document {number}, which had {known} when the "
                    "stream's lengths were measured",
                    hint="delete the files *.holdfast-lengths if decode has changed; it must do the same every time",
                )
            while len(self._documents) >= _DOCUMENTS:
                self._documents.pop(next(iter(self._documents)))
            self._documents[number] = found
        return found

    def _order(self, seed: int, *, shuffle: bool) -> BlockOrder:
        return BlockOrder(self._runs, block=self._block, window=self._window, seed=seed, shuffle=shuffle)

    def _packing(self, order: BlockOrder) -> Packing:
        assert self._lengths is not None and self._pack is not None
        if not self._lengths.total:
            raise ConfigError("the stream's documents have no tokens", hint="decode gives a document's tokens")
        return Packing(self._lengths, self._pack, order)

    def _measured(self, source: Source) -> Numbers:
        """How many tokens each document of a source has: all are decoded once, and the result is kept."""

        def measure() -> Iterator[Numbers]:
            for first in range(0, len(source), _AT_ONCE):
                texts = (source.read(number) for number in range(first, min(first + _AT_ONCE, len(source))))
                yield numpy.array([len(text if self._decode is None else self._decode(text)) for text in texts])

        path = getattr(source, "path", None)
        return temporary_index(measure) if path is None else kept_index(path, "lengths", self._index, measure)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_documents": {}}


class _InOrder(Arrangement):
    """A stream's samples; their numbers are those of the stream. Without the stream, the order alone."""

    def __init__(self, stream: Stream | None, order: BlockOrder, digest: str) -> None:
        self._stream, self._order, self.digest = stream, order, digest

    def __len__(self) -> int:
        return self._order.length

    def __getitem__(self, number: int) -> Any:
        assert self._stream is not None
        return self._stream.read(number)

    def numbers(self, epoch: int, start: int, stop: int) -> list[int]:
        found: list[int] = self._order.numbers(epoch, start, stop).tolist()
        return found

    def words(self) -> dict[str, Any] | None:
        order = self._order
        return {"sizes": list(order.sizes), "block": order.block, "window": order.window, "shuffle": order.shuffle}


def order_alone(words: Mapping[str, Any], seed: int) -> Arrangement:
    """The order of a stream whose arrangement has said these words, for somebody who has not its data."""
    cut = words.get("cut")
    order = {name: value for name, value in words.items() if name != "cut"}
    alone = _InOrder(None, BlockOrder(seed=seed, **order), "")
    return alone if cut is None else CutArrangement(alone, EpochCut.from_words(cut))


class _Packed(Arrangement):
    """A stream's sequences. The number of sequence k in epoch e is e * len + k."""

    def __init__(self, stream: Stream, packing: Packing, digest: str) -> None:
        self._stream, self._packing, self.digest = stream, packing, digest

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, number: int) -> Any:
        return self._stream.packed(self._packing, *divmod(number, len(self)))

    def numbers(self, epoch: int, start: int, stop: int) -> list[int]:
        return list(range(epoch * len(self) + start, epoch * len(self) + stop))


def _runs(source: Source, block: int) -> Iterator[int]:
    """How many samples each piece of a source has that no block reaches out of: row groups, small ones together."""
    if not isinstance(source, Parquet):
        yield len(source)
        return
    run = 0
    for group in source.groups:
        if run and run + group > block:
            yield run
            run = 0
        run += group
    yield run


def _read_at_once(source: Source, block: int | None) -> int:
    """Samples of a block at least. What a class of one's own says yields to what was asked for; a file cannot."""
    if isinstance(source, Parquet):
        return max(source.groups, default=1)
    return int(getattr(source, "block", 1)) if block is None else 1


def _opened(given: Any, index: Path | None) -> Iterator[Source]:
    if isinstance(given, str | os.PathLike):
        for path in _paths(Path(given)):
            if path.suffix in _INSTEAD:
                raise ConfigError(
                    f"{path} is not a file of lines or a tar file", hint=f"give Stream {_INSTEAD[path.suffix]}"
                )
            if path.suffix == ".parquet":
                yield Parquet(path)
            else:
                yield (Tar if path.suffix == ".tar" else Lines)(path, index=index)
    elif hasattr(given, "read") and hasattr(given, "identity") and hasattr(given, "__len__"):
        yield given
    elif isinstance(given, Sequence | Iterator) and not isinstance(given, bytes):
        for one in given:
            yield from _opened(one, index)
    else:
        raise ConfigError(
            f"a stream's source is {a_kind(given)}",
            hint='give paths, as in Stream("data/*.jsonl"), or sources such as holdfast.data.Tokens(path, length=256)',
        )


def _paths(given: Path) -> list[Path]:
    if not any(letter in str(given) for letter in "*?["):
        return [given]
    anchor = Path(given.anchor)
    found = sorted(anchor.glob(str(given.relative_to(anchor))))
    found = [path for path in found if ".holdfast-" not in path.name]
    if not found:
        raise ConfigError(f"no file is named {given}", hint="look at the path that Stream is given")
    return found


def _check_number(name: str, value: Any, least: int, meaning: str) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r:.40}", hint=f"{name} counts {meaning}")
