"""Open a client's picture as RGB, within limits that are checked before it is decompressed. Needs Pillow."""

import io
import warnings
from base64 import b64decode
from binascii import Error as BadBase64
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenwright.errors import RequestError
from tokenwright.regular_file import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 32 << 20
MOST_PIXELS = 64 << 20  # of a picture, width times height: 192 MiB as RGB
MOST_PICTURES = 64
_BAND = 256  # rows of a picture that are converted at once
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


@dataclass(frozen=True, slots=True, eq=False)
class ImageSource:
    """A picture in a message, not opened yet: a file's bytes, a Url, a path, a PIL image or an array."""

    of: Any

    @property
    def key(self) -> bytes | None:
        """A hash of the bytes or the Url; None for other kinds, whose contents can change."""
        given = self.of.text.encode() if isinstance(self.of, Url) else self.of
        return sha256(given).digest() if isinstance(given, bytes) else None

    def __repr__(self) -> str:
        return f"ImageSource({type(self.of).__name__})"


@dataclass(frozen=True, slots=True)
class Url:
    """A data: URL, or bare base64."""

    text: str = field(repr=False)

    def decoded(self) -> bytes:
        """The bytes. Raises RequestError for any other address, which is never fetched, and for other texts."""
        url = self.text
        head, comma, body = url.partition(",") if url.startswith("data:") else ("", ",", url)
        if not head and "://" in url[:64]:
            raise RequestError(
                "it is an address, and no address that a client names is fetched; send its bytes as a data: URL"
            )
        if not comma or (head and not head.endswith(";base64")):
            raise RequestError("its data: URL must have the form data:image/png;base64,...")
        if len(body) > MOST_BYTES * 4 // 3 + 4:
            raise RequestError(f"its file has more than {MOST_BYTES >> 20} MiB; send a smaller one")
        try:
            return b64decode(body, validate=True)
        except (BadBase64, ValueError):
            raise RequestError("its bytes are not valid base64") from None


def opened(picture: ImageSource, number: int) -> "Image":
    """The picture as RGB, turned upright by its EXIF data, on white where transparent. Raises RequestError."""
    if find_spec("PIL") is None:
        raise RequestError("pictures need Pillow, which is not installed; run: pip install pillow")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures, which MOST_PIXELS allows
            return _rgb(_loaded(picture.of))
    except RequestError as error:
        raise RequestError(f"picture {number}: {error}") from None
    except (OSError, ValueError, SyntaxError, TypeError, MemoryError, EOFError, KeyError, IndexError, AttributeError):
        raise RequestError(f"picture {number}: its file is damaged, or not one of {', '.join(FORMATS)}") from None
    except Exception as error:  # Pillow's decoders raise errors of their own modules
        most = f"it has more than {MOST_PIXELS:,} pixels; send a smaller one"
        why = most if "Bomb" in type(error).__name__ else f"its file is damaged ({type(error).__name__})"
        raise RequestError(f"picture {number}: {why}") from None


def _loaded(of: Any) -> "Image":
    from PIL import Image

    if isinstance(of, Image.Image):
        return _checked(of)
    if isinstance(of, Url):
        of = of.decoded()
    if isinstance(of, str | Path):
        with open_regular(Path(of)) as file:
            of = file.read(MOST_BYTES + 1)
    if isinstance(of, bytes | bytearray | memoryview):
        if len(of) > MOST_BYTES:
            raise RequestError(f"its file has more than {MOST_BYTES >> 20} MiB; send a smaller one")
        return _checked(Image.open(io.BytesIO(of), formats=FORMATS))
    return _checked(Image.fromarray(of))


def _checked(image: "Image") -> "Image":
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        raise RequestError(
            f"it has {width:,} x {height:,} pixels, and the limit is {MOST_PIXELS:,} in all; send a smaller one"
        )
    return image


def _rgb(image: "Image") -> "Image":
    from PIL import ExifTags, Image, ImageOps

    image.load()
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    wide = image.mode.startswith("I") or image.mode == "F"  # 16 bits or more
    by = 257 if wide and np.asarray(image).max() > 255 else 1
    if not wide and image.mode not in ("RGBA", "LA", "PA", "La", "RGBa") and "transparency" not in image.info:
        return image.convert("RGB")
    found = Image.new("RGB", image.size)
    for top in range(0, image.height, _BAND):  # all rows at once would take a gigabyte
        part = image.crop((0, top, image.width, min(top + _BAND, image.height)))
        if wide:
            part = Image.fromarray(np.clip(np.asarray(part).astype(np.float64) / by, 0, 255).astype(np.uint8))
        else:
            below = Image.new("RGBA", part.size, (255, 255, 255, 255))
            part = Image.alpha_composite(below, part.convert("RGBA"))
        found.paste(part.convert("RGB"), (0, top))
    return found
