"""Damaged and hostile files: a clear error each, no crash, and memory within the limit, before anything is unpacked."""

import io
import random
import resource
import struct
import zlib
from base64 import b64encode

import numpy as np
import pytest
from PIL import Image

from tests.vision.models import picture
from tokenwright import RequestError
from tokenwright.pictures.opening import MOST_BYTES, MOST_PIXELS, ImageSource, Url, opened


def file_of(form: str, image: Image.Image | None = None, **options: object) -> bytes:
    file = io.BytesIO()
    (image or picture(40, 30)).save(file, form, **options)
    return file.getvalue()


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG file whose header says another size than its data have."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_damaged_files_give_an_error_or_a_picture() -> None:
    """2,000 files with flipped, missing and repeated bytes."""
    draw, files = random.Random(56), [file_of(form) for form in ("PNG", "JPEG", "WEBP", "GIF")]
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(2000):
        data = bytearray(files[number % 4])
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at : at + draw.randint(1, 40)]
                case _:
                    data[at:at] = data[: draw.randint(1, 40)]
            data = data or bytearray(b"x")
        try:
            assert opened(ImageSource(bytes(data)), 1).mode == "RGB"
        except RequestError as error:
            refused += str(error).startswith("picture 1: ")
    assert 500 < refused < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700 << 10  # KiB: one picture at the limit


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (png_of(50_000, 50_000, zlib.compress(bytes(1 << 20))), "more than 67,108,864 pixels"),
        (png_of(9_000, 9_000, b""), "9,000 x 9,000 pixels"),
        (png_of(1 << 30, 1 << 30, b""), "pixels|damaged"),
        (png_of(0, 5, b""), "pixels|damaged"),
        (b"", "damaged"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "damaged"),
        (file_of("TIFF"), "damaged"),
        (bytes(MOST_BYTES + 1), "more than 32 MiB"),
    ],
)
def test_bombs_and_other_formats_are_refused_without_unpacking(data: bytes, told: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError, match=f"picture 3: .*({told})"):
        opened(ImageSource(data), 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * MOST_PIXELS >> 10


def test_orientation_transparency_palettes_and_wide_numbers() -> None:
    plain = picture(24, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    assert opened(ImageSource(file_of("JPEG", plain, exif=exif)), 1).size == (16, 24)
    glass = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert opened(ImageSource(file_of("PNG", glass)), 1).getpixel((3, 3)) == (255, 255, 255)
    for mode in ("L", "P", "1", "CMYK", "LA"):
        form = "TIFF" if mode == "CMYK" else "PNG"
        image = plain.convert(mode)
        found = opened(ImageSource(image if form == "TIFF" else file_of("PNG", image)), 1)
        assert (found.mode, found.size) == ("RGB", (24, 16))
    wide = Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16))
    assert opened(ImageSource(file_of("PNG", wide)), 1).getpixel((15, 15)) == (255, 255, 255)
    assert opened(ImageSource(np.zeros((4, 4, 3), np.uint8)), 1).size == (4, 4)


def test_without_pillow_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenwright.pictures.opening.find_spec", lambda _: None)
    with pytest.raises(RequestError, match="pip install pillow"):
        opened(ImageSource(Url(b64encode(file_of("PNG")).decode())), 1)
