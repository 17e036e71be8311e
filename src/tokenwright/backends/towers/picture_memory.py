"""The most recent embeddings of a tower's pictures, kept by content within a limit of bytes."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tokenwright.arrays import Floats
from tokenwright.engine import Batch
from tokenwright.engine.pictures import Pixels

if TYPE_CHECKING:
    from tokenwright.backends.towers.tower_runner import Slices, TowerRunner

PICTURE_MEMORY = 256 << 20  # bytes


class PictureMemory:
    """A `PictureSource` for one thread. It keeps at most `most` bytes, and always the last picture."""

    def __init__(self, tower: Callable[[], "TowerRunner"], most: int = PICTURE_MEMORY) -> None:
        self._tower, self._most = tower, most
        self._loading: Future[TowerRunner] | None = None
        self._work: tuple[bytes, Slices[Floats]] | None = None  # on a picture, by its digest
        self._kept: OrderedDict[bytes, Floats] = OrderedDict()
        self._used = 0
        self.computed = 0

    def ready(self, pixels: Pixels) -> bool:
        if found := pixels.digest in self._kept:
            self._kept.move_to_end(pixels.digest)
        return found

    def compute(self, pixels: Pixels) -> bool:
        """Raises errors of reading and running a tower. True while a thread reads the tower: there is no work yet."""
        digest, work = self._work or (b"", None)
        if work is None or digest != pixels.digest:
            loading = self._loading or ThreadPoolExecutor(1).submit(self._tower)
            there = wait([loading], 0.001).done
            self._loading = None if there and loading.exception() else loading  # after an error it is read again
            if not there:
                return True
            work = loading.result().slices(pixels)
        self._work = None  # an error ends it
        try:
            next(work)
        except StopIteration as done:
            self._keep(pixels.digest, done.value)
            return True
        self._work = pixels.digest, work
        return False

    def _keep(self, digest: bytes, rows: Floats) -> None:
        self._kept[digest] = rows
        self.computed += 1
        self._used += rows.nbytes
        while self._used > self._most and len(self._kept) > 1:
            self._used -= self._kept.popitem(last=False)[1].nbytes

    def stop(self, wanted: Container[bytes]) -> None:
        if self._work is not None and self._work[0] not in wanted:
            self._work = None

    def rows(self, pixels: Pixels) -> Floats:
        """[1 + deepstacks, n, width] of a picture, in fp32."""
        while not self.ready(pixels):
            self.compute(pixels)
        return self._kept[pixels.digest]

    def insert(self, batch: Batch) -> None:
        for row, span, its in batch.pictures:
            rows = self.rows(span.pixels)
            batch.tokens[row : row + len(its)] = array("q", bytes(8 * len(its)))  # inputs of layers are the padding's
            batch.inserted.append((row, rows[:, span.first + its.start : span.first + its.stop]))
