"""Each family's layout of a picture, sized as by transformers' PIL processors. The tower normalises the pixels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import ceil, floor, prod, sqrt
from typing import TYPE_CHECKING

import numpy as np

from tokenwright.engine.pictures import PictureSpan, Pixels
from tokenwright.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image


Layout = list[str | PictureSpan]  # texts, and spans that are not in a prompt yet: they start at 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Common(ABC):
    """The base of layouts: `placeholder` is the chat template's text for a picture, `token` stands for one row."""

    placeholder: str
    token: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    resample: int  # a filter of PIL
    settings: bytes = b""
    around: tuple[str, str] = ("", "")  # around a picture for which the template writes no placeholder
    before: str = ""
    after: str = ""

    @abstractmethod
    def layout(self, image: "Image") -> Layout:
        """The tokens and rows of a picture. Raises RequestError for one that the model cannot take."""

    def pixels(self, image: "Image", width: int, height: int) -> Pixels:
        resized = image if image.size == (width, height) else image.resize((width, height), self.resample)
        data = np.asarray(resized, np.uint8).tobytes()
        digest = sha256(self.settings + f" {width} {height} ".encode() + data).digest()
        return Pixels(data, 1, height, width, digest)

    def cut(self, image: "Image", across: int, down: int, side: int) -> Iterator[tuple[int, int, Pixels]]:
        """Resize a picture to across x down squares; yield the row, column and pixels of each."""
        image = image.resize((across * side, down * side), self.resample)
        for row, column in product(range(down), range(across)):
            box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
            yield row, column, self.pixels(image.crop(box), side, side)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Common):
    """Resizes every picture to one size, of `rows` rows between two texts (Gemma 3, LLaVA)."""

    width: int
    height: int
    rows: int
    bidirectional: bool = False
    crop: bool = False  # resize the shorter side and take the middle

    def layout(self, image: "Image") -> Layout:
        if self.crop:
            image = _middle(image, self.width, self.height, self.resample)
        pixels = self.pixels(image, self.width, self.height)
        rows = PictureSpan(0, self.rows, pixels, bidirectional=self.bidirectional)
        return [self.before, rows, self.after]


def _middle(image: "Image", width: int, height: int, resample: int) -> "Image":
    short = min(image.size)
    size = int(image.size[0] * width / short), int(image.size[1] * width / short)
    image = image.resize(size, resample)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True, slots=True, kw_only=True)
class Smart(Common):
    """Resizes sides to multiples of `cell`, within limits of the area (Qwen-VL). grid: positions have three axes."""

    cell: int
    least: int
    most: int
    grid: bool = True
    bidirectional: bool = False
    shortest: int = 0

    def layout(self, image: "Image") -> Layout:
        width, height = self.size(*image.size)
        rows, columns = height // self.cell, width // self.cell
        grid = (1, rows, columns) if self.grid else None
        pixels = self.pixels(image, width, height)
        return [self.before, PictureSpan(0, rows * columns, pixels, 0, grid, self.bidirectional), self.after]

    def size(self, width: int, height: int) -> tuple[int, int]:
        if max(width, height) > 200 * min(width, height):
            raise RequestError(f"its sides, {width} and {height} pixels, differ more than 200 times; crop it")
        cell = self.cell
        across, down = (max(self.shortest, round(side / cell) * cell) for side in (width, height))
        if across * down > self.most:
            by = sqrt(width * height / self.most)
            return max(cell, floor(width / by / cell) * cell), max(cell, floor(height / by / cell) * cell)
        if across * down < self.least:
            by = sqrt(self.least / (width * height))
            return ceil(width * by / cell) * cell, ceil(height * by / cell) * cell
        return across, down


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling(Smart):
    """As many cells as `most` pixels have room for, also if that enlarges a picture (Gemma 4)."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        by, cells = sqrt(self.most / (width * height)), self.most // self.cell**2
        across, down = (floor(by * side / self.cell) for side in (width, height))
        if not (across and down):
            across, down = min(width // height, cells) or 1, min(height // width, cells) or 1
        return across * self.cell, down * self.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedTiles(Smart):
    """Cuts a picture of more than `large` pixels into squares of `side`, each after a mark of its place (LFM2-VL).

    tiles: the fewest and the most. thumbnail: the whole picture follows them.
    """

    side: int
    large: float
    tiles: tuple[int, int]
    whole_mark: str
    thumbnail: bool = True

    def layout(self, image: "Image") -> Layout:
        before, whole, after = Smart.layout(self, image)
        area = prod(round(side / self.cell) * self.cell for side in image.size)
        if area <= self.large or self.tiles[1] == 1:
            return [before, whole, after]
        across, down = nearest_grid(*image.size, self.side, *self.tiles)
        rows, found = (self.side // self.cell) ** 2, [before]
        for row, column, tile in self.cut(image, across, down, self.side):
            found += [f"<|img_row_{row + 1}_col_{column + 1}|>", PictureSpan(0, rows, tile)]
        return [*found, *([self.whole_mark, whole] if self.thumbnail else []), after]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineByLine(Common):
    """Fits a picture into a square of `longest` pixels, in whole cells; a token ends each line (Pixtral)."""

    cell: int
    longest: int
    line_end: str

    def layout(self, image: "Image") -> Layout:
        width, height = image.size
        by = max(width / self.longest, height / self.longest)
        if by > 1:
            width, height = floor(width / by), floor(height / by)
        width, height = (max(1, -(-side // self.cell)) * self.cell for side in (width, height))
        rows, columns = height // self.cell, width // self.cell
        pixels = self.pixels(image, width, height)
        found: Layout = []
        for row in range(rows):
            end = self.line_end if row < rows - 1 else self.after
            found += [PictureSpan(0, columns, pixels, row * columns), end]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled(Common):
    """Cuts a picture into squares of `side` pixels, each after a mark of its place, and adds the whole (Idefics 3)."""

    side: int
    longest: int  # pixels of the longer side before it is cut
    rows: int
    fake: str
    whole: str
    split: bool = True

    def layout(self, image: "Image") -> Layout:
        image = image.resize(_longest(*image.size, self.longest), self.resample)
        side, found = self.side, list[str | PictureSpan]()
        across, down = self._tiles(*image.size) if self.split else (1, 1)
        if (across, down) != (1, 1):
            image = image.resize((across * side, down * side), self.resample)  # the small picture is made of this one
            for row, column, tile in self.cut(image, across, down, side):
                found += [f"{self.fake}<row_{row + 1}_col_{column + 1}>", PictureSpan(0, self.rows, tile)]
                found += ["\n"] * (column + 1 == across)
            found.append("\n")
        last = PictureSpan(0, self.rows, self.pixels(image, side, side))
        return [*found, f"{self.fake}{self.whole}", last, self.fake]

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        side, ratio = self.side, width / height
        if width >= height:
            across = ceil(width / side)
            return across, ceil(int(across * side / ratio) / side)
        down = ceil(height / side)
        return ceil(int(down * side * ratio) / side), down


def _longest(width: int, height: int, longest: int) -> tuple[int, int]:
    wide, ratio, most = width >= height, width / height, min(longest, 4096)
    other = int(longest / ratio if wide else longest * ratio)
    other += other % 2
    if longest > most:
        other, longest = int(most / (longest / other) if wide else most * (other / longest)), most
    return (longest, max(1, other)) if wide else (max(1, other), longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Common):
    """Cuts a picture into the grid of squares nearest to its shape, then the whole in one square (InternVL)."""

    side: int
    rows: int
    least: int
    most: int

    def layout(self, image: "Image") -> Layout:
        across, down = nearest_grid(*image.size, self.side, self.least, self.most)
        found = [PictureSpan(0, self.rows, tile) for _, _, tile in self.cut(image, across, down, self.side)]
        if across * down > 1:
            found.append(PictureSpan(0, self.rows, self.pixels(image, self.side, self.side)))
        return [self.before, *found, self.after]


def largest(of: Common) -> int:
    """The most pixels that a tower reads at once: of a picture or a tile."""
    if isinstance(of, Fixed):
        return of.width * of.height
    if isinstance(of, LineByLine):
        return (ceil(of.longest / of.cell) * of.cell) ** 2
    return max(getattr(of, "side", 0) ** 2, of.most if isinstance(of, Smart) else 0)


def nearest_grid(width: int, height: int, side: int, least: int, most: int) -> tuple[int, int]:
    """The columns and rows of `least` to `most` squares whose shape is nearest to a picture's."""
    shapes = [one for one in product(range(1, most + 1), repeat=2) if least <= prod(one) <= most]
    best, nearest, area = (1, 1), float("inf"), width * height
    for across, down in sorted(shapes, key=prod):
        off = abs(width / height - across / down)
        if off < nearest:
            best, nearest = (across, down), off
        elif off == nearest and area > 0.5 * side**2 * across * down:
            best = across, down
    return best
