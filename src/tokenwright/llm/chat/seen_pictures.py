"""Pictures in conversations: a message's text has PICTURE for each one in its field `pictures`."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tokenwright.engine.pictures import PictureSpan
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.pictures.opening import MOST_PICTURES, MOST_PIXELS, ImageSource, Url, opened
from tokenwright.text import PictureTexts, Rendered
from tokenwright.text.messages import PICTURE, PICTURES, text_of

if TYPE_CHECKING:
    from tokenwright.llm.model import PreparedModel
    from tokenwright.pictures.processors import Layout

Message = Mapping[str, Any]
_KEPT, _BYTES = 32, 256 << 20  # the most layouts that are kept: agents send a picture again with each turn


def with_pictures(message: Message) -> Message:
    """A message with PICTURE in place of each part that is a picture. Raises RequestError for one without bytes.

    Parts: {"type": "image", "image": a path, bytes, a PIL image or an array}, or OpenAI's image_url and input_image.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    found: list[ImageSource] = []
    texts: list[str] = []
    for part in content:
        picture = _picture(part) if isinstance(part, Mapping) else None
        if picture is None:
            texts.append(text_of([part]) if isinstance(part, Mapping) else str(part))
        else:
            found.append(picture)
            texts.append(PICTURE)
    return {**message, "content": "\n".join(texts), PICTURES: tuple(found)} if found else message


def _picture(part: Message) -> ImageSource | None:
    kind = part.get("type")
    if kind == "image" and part.get("image") is not None:
        of = part["image"]
        is_url = isinstance(of, str) and (of.startswith("data:") or "://" in of[:16])
        return of if isinstance(of, ImageSource) else ImageSource(Url(of) if is_url else of)
    if kind in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if not isinstance(url, str):
            raise RequestError(f"a part of the type {kind} needs image_url, a data: URL")
        return ImageSource(Url(url))
    return None


@dataclass(frozen=True, slots=True)
class Seen:
    """A conversation's pictures. messages: without them. texts: for the template. rows: in the prompt's order."""

    messages: list[dict[str, Any]]
    texts: PictureTexts
    rows: list[PictureSpan]
    token: int


class Eyes:
    def __init__(self, loaded: "PreparedModel") -> None:
        self._loaded = loaded
        self._known: OrderedDict[bytes, Layout] = OrderedDict()  # by the bytes that clients sent, the oldest use first

    def look(self, messages: Sequence[Message]) -> Seen | None:
        """The pictures of a conversation; None without any. Raises RequestError for one that cannot be read."""
        lists = [message.get(PICTURES) for message in messages]
        pictures = [one for given in lists if isinstance(given, tuple) for one in given]  # JSON makes no tuples
        if not pictures:
            return None
        if len(pictures) > MOST_PICTURES:
            raise RequestError(f"messages have {len(pictures)} pictures, and a request takes {MOST_PICTURES}")
        try:
            processor = self._loaded.vision.processor
        except CheckpointError as error:
            raise RequestError(f"messages have pictures, which this model cannot read: {error}") from error
        layouts = [self._layout(one, number) for number, one in enumerate(pictures, 1)]
        rows = [one for layout in layouts for one in layout if not isinstance(one, str)]
        if sum(one.pixels.width * one.pixels.height for one in rows) > 4 * MOST_PIXELS:
            raise RequestError(f"messages have pictures of more than {4 * MOST_PIXELS:,} pixels together; send fewer")
        [token] = self._loaded.facts.tokenizer.encode(processor.token, add_special=False)
        texts = tuple(
            "".join(one if isinstance(one, str) else one.stop * processor.token for one in layout) for layout in layouts
        )
        plain = [{name: value for name, value in one.items() if name != PICTURES} for one in messages]
        return Seen(plain, PictureTexts(processor.placeholder, texts, processor.around), rows, token)

    def _layout(self, picture: ImageSource, number: int) -> "Layout":
        key = picture.key
        found = None if key is None else self._known.get(key)
        if found is None:
            image = opened(picture, number)
            try:
                found = self._loaded.vision.processor.layout(image)
            except RequestError as error:
                raise RequestError(f"picture {number}: {error}") from None
        if key is not None:
            self._known[key] = found
            while len(self._known) > _KEPT or sum(map(_nbytes, list(self._known.values()))) > _BYTES:
                self._known.popitem(last=False)
        return found


def _nbytes(layout: "Layout") -> int:
    return sum(len(one.pixels.data) for one in layout if not isinstance(one, str))


def laid_out(rendered: Rendered, seen: Seen) -> Rendered:
    """A prompt with the spans of its pictures. Raises RequestError if its placeholders do not match them."""
    if sum(token == seen.token for token in rendered.ids) != sum(one.stop for one in seen.rows):
        raise RequestError(f"messages write the token of a picture's rows, {seen.texts.placeholder!r}; leave it out")
    return replace(rendered, pictures=_placed(seen.rows, rendered.ids, seen.token))


def moved(rendered: Rendered, before: Rendered) -> Rendered:
    if not before.pictures:
        return rendered
    token = before.ids[before.pictures[0].start]
    if sum(one == token for one in rendered.ids) != sum(one == token for one in before.ids):
        return before
    return replace(rendered, pictures=_placed(before.pictures, rendered.ids, token))


def _placed(spans: Sequence[PictureSpan], ids: Sequence[int], token: int) -> tuple[PictureSpan, ...]:
    places = [at for at, one in enumerate(ids) if one == token]
    found, done = [], 0
    for span in spans:
        count = span.stop - span.start
        found.append(replace(span, start=places[done], stop=places[done] + count))
        done += count
    return tuple(found)
