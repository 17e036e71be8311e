"""Pictures in request bodies, which another thread decodes."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tokenwright.pictures.opening import MOST_BYTES, ImageSource, Url
from tokenwright.serve.http.fields import Body, Refused, Text
from tokenwright.serve.http.request_parts import BreakpointBody, BreakpointPart
from tokenwright.text.messages import PICTURE, PICTURES

PictureText = Annotated[str, Field(max_length=MOST_BYTES * 4 // 3 + 100)]  # a data: URL, or base64
_DETAIL = {"detail": "pictures are resized as the model's files say"}
_STORED = Refused("no files are stored here; send the picture as a data: URL")


class PictureBody(BreakpointBody):
    @property
    @abstractmethod
    def encoded(self) -> str: ...


class ImageUrl(Body):
    harmless: ClassVar = _DETAIL

    url: PictureText


class ImageUrlPart(PictureBody, BreakpointPart):
    """OpenAI's picture in chats."""

    type: Literal["image_url"]
    image_url: ImageUrl | PictureText

    @property
    def encoded(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class InputImage(PictureBody, BreakpointPart):
    """OpenAI's picture in the Responses API."""

    refused: ClassVar = {"file_id": _STORED}
    harmless: ClassVar = _DETAIL

    type: Literal["input_image"]
    image_url: PictureText

    @property
    def encoded(self) -> str:
        return self.image_url


class Base64Source(Body):
    harmless: ClassVar = {"media_type": "the bytes say what they are"}

    type: Literal["base64"]
    data: PictureText


class UrlSource(Body):
    type: Literal["url"]
    url: Text


class ImageBlock(PictureBody):
    """Anthropic's picture in messages and tool results."""

    refused: ClassVar = {
        "file_id": _STORED,
        "transformations": Refused("pictures are resized", ({"oversized_image": "downsize"},)),
    }

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    @property
    def encoded(self) -> str:
        return self.source.data if isinstance(self.source, Base64Source) else self.source.url


def seen_in(parts: object) -> dict[str, Any]:
    each = parts if isinstance(parts, list) else ()
    return pictures_field(part.encoded for part in each if isinstance(part, PictureBody))


def pictures_field(encoded: Iterable[str]) -> dict[str, Any]:
    found = tuple(ImageSource(Url(one)) for one in encoded)
    return {PICTURES: found} if found else {}


def mark_of(part: object) -> str | None:
    """PICTURE, the placeholder in a message's text, for a picture; else None."""
    return PICTURE if isinstance(part, PictureBody) else None
