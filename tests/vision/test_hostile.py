"""Damaged and hostile files: a clear error each, no crash, and memory within the limit, before anything is unpacked."""

import io
import random
import resource
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from tests.profiles import some
from tests.vision.models import picture
from tokenwright import RequestError
from tokenwright.engine.pictures import PictureSpan, Pixels
from tokenwright.llm.chat import seen_pictures
from tokenwright.llm.chat.seen_pictures import Eyes
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


def sources() -> list[bytes]:
    """Files of all forms: modes, 16 bits, interlaced and progressive, large EXIF data and profiles, animations."""
    plain, more = picture(40, 30), [picture(40, 30, seed) for seed in range(1, 12)]
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x9286] = 6, "x" * 20_000, b"y" * 20_000
    wide = Image.fromarray((np.arange(1200, dtype=np.uint16) * 50).reshape(30, 40))
    glass = plain.convert("RGBA")
    glass.putalpha(plain.convert("L"))
    moving = {"save_all": True, "append_images": more, "duration": 20, "loop": 0}
    found = [file_of("PNG", plain.convert(mode)) for mode in ("1", "L", "P", "LA", "RGB")]
    found += [file_of("PNG", wide), file_of("PNG", glass), file_of("PNG", plain, exif=exif, icc_profile=b"z" * 5000)]
    found += [file_of("PNG", plain.convert("P"), transparency=3), file_of("PNG", plain, **moving)]
    found += [file_of("JPEG", plain.convert(mode)) for mode in ("L", "RGB", "CMYK")]
    found += [file_of("JPEG", plain, progressive=True, exif=exif), file_of("JPEG", plain, icc_profile=b"z" * 70_000)]
    found += [
        file_of("WEBP", glass, lossless=True),
        file_of("WEBP", plain, exif=exif),
        file_of("WEBP", plain, **moving),
    ]
    return [*found, file_of("GIF", plain), file_of("GIF", plain, **moving)]


def resized(data: bytearray, draw: random.Random) -> bytearray:
    """A file whose header says another size, with the checksum that it then needs."""
    size = [draw.choice((0, 1, 7, 4_000, 8_000, 60_000, (1 << 31) - 1)) for _ in range(2)]
    if data[:4] == b"\x89PNG":
        data[16:24] = struct.pack(">II", *size)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    elif data[:3] == b"GIF":
        data[6:10] = struct.pack("<HH", *(one & 0xFFFF for one in size))
    elif data[:2] == b"\xff\xd8":
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        data[at + 5 : at + 9] = struct.pack(">HH", *(one & 0xFFFF for one in size))
    elif data[12:16] == b"VP8X":
        data[24:30] = b"".join(struct.pack("<I", one)[:3] for one in size)
    return data


def test_damaged_files_give_an_error_or_a_picture() -> None:
    """2,000 files of all forms, cut, with flipped, missing and repeated bytes, and with other sizes in headers."""
    draw, files = random.Random(56), sources()
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(2000):
        data = bytearray(files[number % len(files)])
        if number % 5 == 0:
            data = resized(data, draw)
        if number % 7 == 0:
            del data[draw.randrange(1, len(data)) :]
        for _ in range(draw.randint(0 if number % 5 == 0 else 1, 8)):
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


@pytest.mark.parametrize("mode", some(["RGBA", "L", "P", "LA", "turned", "RGB", "I;16"]))
def test_the_largest_picture_of_each_mode_takes_less_than_the_limit(mode: str) -> None:
    """In a process of its own, whose most memory is that of one picture. CI has the two that take the most."""
    code = f"""
import io, re
from pathlib import Path
from PIL import Image
from tokenwright.pictures.opening import MOST_PIXELS, ImageSource, opened
mode, file = {mode!r}, io.BytesIO()
image = Image.new("RGB" if mode == "turned" else mode, (8192, MOST_PIXELS // 8192))
exif = Image.Exif()
exif[0x0112] = 6 if mode == "turned" else 1
image.save(file, "PNG", compress_level=1, exif=exif, **({{"transparency": 0}} if mode == "P" else {{}}))
del image
assert opened(ImageSource(file.getvalue()), 1).mode == "RGB"
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])  # ru_maxrss may be the parent's
"""
    used = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert used < 700 << 10, f"{used >> 10} MiB"


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


def test_opened_pictures_are_kept_within_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 pictures at Qwen2-VL's limit have 1.2 GB of pixels."""
    pixels = Pixels(bytes(1000), 1, 1, 1, b"")
    processor = SimpleNamespace(layout=lambda _: ["", PictureSpan(0, 1, pixels)])
    eyes = Eyes(cast("Any", SimpleNamespace(vision=SimpleNamespace(processor=processor))))
    monkeypatch.setattr(seen_pictures, "opened", lambda *_: None)
    monkeypatch.setattr(seen_pictures, "_BYTES", 4500)
    for at in range(9):
        assert eyes._layout(ImageSource(bytes([at])), 1) is eyes._layout(ImageSource(bytes([at])), 1)
    assert len(eyes._known) == 4
    monkeypatch.setattr(seen_pictures, "_BYTES", 10)
    assert len(eyes._layout(ImageSource(b"other"), 1)) == 2 and not eyes._known
