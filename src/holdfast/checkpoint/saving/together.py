"""A save of a state that does not change any more: every worker has everything, and writes what it does not find."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.format.manifest import directory_of
from holdfast.checkpoint.format.parts import Part, fill, seal, view_of
from holdfast.checkpoint.saving.share import Share
from holdfast.checkpoint.saving.side_by_side import Images, for_each_part
from holdfast.checkpoint.storage.port import Storage


def write_together(storage: Storage, save: Share, *, distrusted: bool, superseded: Callable[[], bool]) -> bool:
    """Each begins somewhere else, and leaves out what it finds. Until all is there; False: it is superseded.

    `distrusted`: what is there has the right names, and not the right bytes.
    """
    directory = directory_of(save.step)
    images = Images(max(part.size for part in save.layout))

    def write(part: Part) -> None:
        with images.one() as image:
            fill(part, image, save.snapshot.tensors)
            name = seal(part, image)
            assert name == save.files[part.number], "the state changed while it was saved"
            storage.write(f"{directory}/{name}", view_of(image)[: part.size])
            save.written.add(part.number)

    first = save.rank * len(save.layout) // max(1, save.count)
    while not superseded():
        missing = {save.files[part.number] for part in save.missing(storage.list(f"{directory}/"))}
        if distrusted:
            missing.update(save.files[part.number] for part in save.layout if part.number not in save.written)
        todo = [part for part in save.layout if save.files[part.number] in missing]
        if not todo:
            return True
        todo.sort(key=lambda part: (part.number - first) % len(save.layout))
        for_each_part(write, todo[: storage.writers], storage.writers)
    return False
