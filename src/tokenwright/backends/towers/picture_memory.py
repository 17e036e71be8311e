"""The most recent embeddings of a tower's pictures, kept by content within a limit of bytes."""

from collections import OrderedDict
from collections.abc import Callable

from tokenwright.arrays import Floats
from tokenwright.engine.pictures import Pixels

PICTURE_MEMORY = 256 << 20  # bytes


class PictureMemory:
    """For one thread. tower: opens the tower for the first picture. most: bytes; the last picture stays anyway."""

    def __init__(self, tower: Callable[[], Callable[[Pixels], Floats]], most: int = PICTURE_MEMORY) -> None:
        self._open, self._most = tower, most
        self._tower: Callable[[Pixels], Floats] | None = None
        self._kept: OrderedDict[bytes, Floats] = OrderedDict()
        self._used = 0
        self.computed = 0

    def rows(self, pixels: Pixels) -> Floats:
        """[1 + deepstacks, n, width] of a picture, in fp32. Raises errors of reading and running a tower."""
        found = self._kept.get(pixels.digest)
        if found is None:
            if self._tower is None:
                self._tower = self._open()
            found = self._kept[pixels.digest] = self._tower(pixels)
            self.computed += 1
            self._used += found.nbytes
            while self._used > self._most and len(self._kept) > 1:
                self._used -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(pixels.digest)
        return found
