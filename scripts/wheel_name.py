"""The name of a wheel that lacks kernels: py3-none-any. Only the standard library."""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from pathlib import Path

LIBRARY = "tokenwright/backends/native/_native.so"


def named_rightly(wheel: Path) -> Path:
    """Replace a wheel that lacks kernels by one for any platform: another name, and other lines in WHEEL and RECORD."""
    with zipfile.ZipFile(wheel) as packed:
        if LIBRARY in packed.namelist():
            return wheel
    renamed = wheel.with_name(re.sub(r"-[^-]+\.whl$", "-any.whl", wheel.name))
    made = wheel.with_suffix(".made")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        [tags] = [name for name in old.namelist() if name.endswith(".dist-info/WHEEL")]
        before = old.read(tags)
        after = _for_any(before)
        for entry in old.infolist():
            content = after if entry.filename == tags else old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = content.replace(_recorded(tags, before), _recorded(tags, after))
            new.writestr(entry, content)
    made.replace(renamed)
    if renamed != wheel:
        wheel.unlink()
    return renamed


def _for_any(text: bytes) -> bytes:
    """The content of WHEEL for any platform."""
    text = re.sub(rb"(?m)^(Tag: .+)-[^-\n]+$", rb"\1-any", text)
    return text.replace(b"Root-Is-Purelib: false", b"Root-Is-Purelib: true")


def _recorded(name: str, content: bytes) -> bytes:
    """A file's line in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}".encode()
