"""Pictures in a prompt: ranges of positions whose embeddings come from pixels.

Their token ids are equal placeholders, so code that compares texts, like a page's hash, compares spans too.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture, or a tile of one, resized."""

    data: bytes = field(repr=False)  # RGB [frames, height, width, 3]
    frames: int
    height: int
    width: int
    digest: bytes  # sha256 over data, shape and the processor's settings: equal ones mean equal embeddings


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Positions [start, stop) of a prompt, whose embeddings are rows of the tower's output from `first` on."""

    start: int
    stop: int
    pixels: Pixels
    first: int = 0
    grid: tuple[int, int, int] | None = None  # frames, rows and columns, for models with positions on three axes
    bidirectional: bool = False  # its rows attend to each other, so one chunk computes all that are missing


Spans = tuple[PictureSpan, ...]  # of one prompt, in order


class PictureSource(Protocol):
    """Computes the embeddings of pictures in slices, between an engine's steps, and keeps them."""

    def ready(self, pixels: Pixels) -> bool:
        """Whether a picture's embeddings are computed. They stay until others are."""

    def compute(self, pixels: Pixels) -> bool:
        """Compute the next slice of a picture; True: it was the last. Unfinished work on another picture is lost."""

    def stop(self, wanted: Container[bytes]) -> None:
        """Drop unfinished work on a picture whose digest is not in `wanted`."""


class AwaitedPictures:
    """The pictures that texts wait for: `first` is the first one of a step that is not ready."""

    def __init__(self, source: PictureSource | None) -> None:
        self.source = source
        self.first: Pixels | None = None

    def ready_stop(self, spans: Spans, start: int, stop: int) -> int:
        """Where a chunk [start, stop) must end because of a picture that is not ready, which may become `first`."""
        if self.source is None:
            return stop
        for one in spans:
            if one.start < stop and one.stop > start and not self.source.ready(one.pixels):
                self.first = self.first or one.pixels
                return max(one.start, start)
        return stop

    def compute(self) -> bool:
        """Compute the next slice of the first picture; True: nothing is left of it."""
        return self.source is None or self.first is None or self.source.compute(self.first)

    def stop_unless(self, needed: Iterable[Spans]) -> None:
        """Drop unfinished work on a picture that no text needs."""
        if self.source is not None:
            self.source.stop({one.pixels.digest for spans in needed for one in spans})


def content(spans: Spans, start: int, stop: int) -> bytes:
    """The bytes that the hash of positions [start, stop) covers besides their tokens."""
    found = b""
    for one in spans:
        if one.start < stop and one.stop > start:
            found += pack("<3q", one.start, one.stop, one.first) + one.pixels.digest
    return found


def common(one: Spans, other: Spans, stop: int) -> bool:
    return one is other or content(one, 0, stop) == content(other, 0, stop)


def first_difference(one: Spans, other: Spans) -> int | None:
    """The first position at which two texts' pictures differ; None: they are equal."""
    for at in range(max(len(one), len(other))):
        pair = one[at : at + 1], other[at : at + 1]
        if (stop := max(span.stop for spans in pair for span in spans)) and not common(*pair, stop):
            return min(span.start for spans in pair for span in spans)
    return None


def uncut(spans: Spans, start: int, stop: int) -> int:
    """The last place up to `stop` where a chunk from `start` on may end without cutting a bidirectional span."""
    for one in spans:
        if one.bidirectional and one.start < stop < one.stop:
            return max(one.start, start)
    return stop


def longest(spans: Spans) -> int:
    """The rows of the longest span that no chunk may cut; 0: none."""
    return max((one.stop - one.start for one in spans if one.bidirectional), default=0)


def read_ends(spans: Spans, start: int, stop: int) -> list[int] | None:
    """For each row of [start, stop) the end of the positions that it reads; None: each reads up to its own."""
    if not any(one.bidirectional and one.start < stop and one.stop > start for one in spans):
        return None
    ends = list(range(start + 1, stop + 1))
    for one in spans:
        if one.bidirectional:
            for position in range(max(one.start, start), min(one.stop, stop)):
                ends[position - start] = one.stop
    return ends


def axes(spans: Spans, start: int, stop: int) -> list[Sequence[int]] | None:
    """The positions of [start, stop) in time, height and width; None: they are the tokens' indices.

    The text after a picture goes on from the largest of its positions, on all axes (Qwen2-VL, arXiv 2409.12191).
    """
    if not any(one.grid for one in spans if one.start < stop):
        return None
    found: list[list[int]] = [[], [], []]
    at = done = 0  # the next position of text, and the tokens before it

    def text(until: int) -> None:
        for place in range(max(done, start), min(until, stop)):
            for axis in found:
                axis.append(at + place - done)

    for one in spans:
        if one.grid is None or one.start >= stop:
            continue
        text(one.start)
        at += one.start - done
        _, rows, columns = one.grid
        for place in range(max(one.start, start), min(one.stop, stop)):
            frame, within = divmod(place - one.start, rows * columns)
            for axis, offset in zip(found, (frame, within // columns, within % columns), strict=True):
                axis.append(at + offset)
        at, done = at + max(one.grid), one.stop
    text(stop)
    return list(found)
