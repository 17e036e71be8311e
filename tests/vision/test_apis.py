"""A picture through every API: the same tokens, and the same text; addresses and files that are no pictures refused."""

import io
import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from tests.serve.live import HANGS, Live
from tests.serve.live import live as running
from tests.vision.models import make_model, picture, question
from tokenwright import LLM
from tokenwright.explorer.explorer import Explorer
from tokenwright.explorer.panels.conversations import conversations
from tokenwright.serve.http.api import MOST_VALUES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    make_model(made, "gemma3")
    return made


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    with running(folder, dtype="float32") as server:
        yield server


def png(seed: int = 1) -> str:
    file = io.BytesIO()
    picture(48, 40, seed).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def ask(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.post(live.url + path, json=body, timeout=HANGS).raise_for_status().json()
    return found


def refusal(live: Live, path: str, body: dict[str, Any]) -> str:
    with pytest.raises(httpx2.HTTPStatusError) as refused:
        ask(live, path, body)
    assert refused.value.response.status_code == 400
    return refused.value.response.text


def test_every_api_reads_the_same_picture(live: Live, folder: Path) -> None:
    url = f"data:image/png;base64,{png()}"
    with LLM(folder, dtype="float32") as llm:
        one = llm.chat(question(picture(48, 40, 1), "what?"), temperature=0, max_tokens=6)
    expected = one.usage.prompt_tokens, one.text
    rest = {"temperature": 0, "max_tokens": 6}
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "text", "text": "what?"}]
    chat = ask(live, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **rest})
    assert (chat["usage"]["prompt_tokens"], chat["choices"][0]["message"]["content"]) == expected
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "what?"}]
    asked = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6}
    made = ask(live, "/v1/responses", asked)
    assert (made["usage"]["input_tokens"], made["output"][-1]["content"][0]["text"]) == expected
    source = {"type": "base64", "media_type": "image/png", "data": png()}
    talk = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}]
    said = ask(live, "/v1/messages", {"model": "", "messages": talk, **rest})
    counts = said["usage"]
    read = counts["input_tokens"] + counts["cache_read_input_tokens"] + counts["cache_creation_input_tokens"]
    assert (read, said["content"][0]["text"]) == expected
    assert ask(live, "/v1/messages/count_tokens", {"model": "", "messages": talk}) == {"input_tokens": expected[0]}
    told = {"options": {"temperature": 0, "num_predict": 6}, "stream": False}
    message = {"role": "user", "content": "what?", "images": [png()]}
    heard = ask(live, "/api/chat", {"model": "", "messages": [message], **told})
    assert heard["message"]["content"] == expected[1]
    assert (
        ask(live, "/api/generate", {"model": "", "prompt": "what?", "images": [png()], **told})["response"]
        == expected[1]
    )


def test_a_screenshot_in_the_result_of_a_tool(live: Live) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": png(2)}
    result = [{"type": "text", "text": "taken"}, {"type": "image", "source": source}]
    talk = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]
    told = [{"type": "tool_result", "tool_use_id": "t1", "content": "taken"}]
    counts = [
        ask(live, "/v1/messages/count_tokens", {"model": "", "messages": [*talk[:2], {"role": "user", "content": one}]})
        for one in (told, talk[2]["content"])
    ]
    rows = counts[1]["input_tokens"] - counts[0]["input_tokens"]
    assert 16 + 2 <= rows <= 16 + 8  # the rows, the tokens around them, and lines
    assert ask(live, "/v1/messages", {"model": "", "messages": talk, "max_tokens": 3})["content"]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://example.com/cat.png", "no address that a client names is fetched"),
        ("file:///etc/passwd", "no address that a client names is fetched"),
        ("/etc/passwd", "base64"),
        ("data:image/png,abc", "must have the form"),
        (f"data:image/png;base64,{b64encode(b'no picture').decode()}", "damaged"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_number(live: Live, url: str, told: str) -> None:
    good = {"type": "image_url", "image_url": f"data:image/png;base64,{png()}"}
    talk = [{"role": "user", "content": [good, {"type": "image_url", "image_url": url}]}]
    found = refusal(live, "/v1/chat/completions", {"messages": talk})
    assert "picture 2" in found
    assert json.loads(found)["error"]["param"] == "messages"
    assert told in found


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}),
        ("/v1/chat/completions", {"type": "file", "file": {"file_data": ""}}),
        ("/v1/responses", {"type": "input_file", "file_data": ""}),
    ],
)
def test_sound_and_files_are_refused_by_what_is_read(live: Live, path: str, part: dict[str, Any]) -> None:
    talk = [{"role": "user", "content": [part]}]
    found = refusal(live, path, {"input" if "responses" in path else "messages": talk, "model": "", "max_tokens": 1})
    assert "models here read text and pictures" in found


def test_a_screenshot_of_three_megabytes_fits(live: Live) -> None:
    rough = np.random.default_rng(1).integers(0, 255, (1000, 1000, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(rough).save(file, "PNG")
    assert len(file.getvalue()) > 3_000_000
    shown = {"type": "image_url", "image_url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}
    talk = [{"role": "user", "content": [shown, {"type": "text", "text": "what?"}]}] * 2
    body = {"messages": [talk[0], {"role": "assistant", "content": "a"}, talk[1]], "max_tokens": 1}
    assert ask(live, "/v1/chat/completions", body)["choices"]
    with pytest.raises(httpx2.HTTPStatusError) as refused:
        ask(live, "/v1/chat/completions", {"messages": [1] * (MOST_VALUES + 1)})
    assert refused.value.response.status_code == 413
    assert "values" in refused.value.response.text


def test_clients_write_no_pictures_field(live: Live) -> None:
    talk = [{"role": "user", "content": "a\ufffcb", "pictures": ["/etc/passwd"]}]
    assert ask(live, "/v1/chat/completions", {"messages": talk, "max_tokens": 1})["choices"]


def test_causes_and_the_panel_know_which_picture_it_was(live: Live) -> None:
    """A changed picture is an edited message, and the panel finds the pages of a text with pictures."""

    def told(seed: int, *more: str) -> Any:
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(seed)}"}}
        parts = [
            {"type": "text", "text": "A picture of the sea, and words. "},
            shown,
            {"type": "text", "text": "what?"},
        ]
        talk = [{"role": "user", "content": parts}]
        talk += [{"role": ("assistant", "user")[at % 2], "content": text} for at, text in enumerate(more)]
        asked = {"messages": talk, "max_tokens": 3, "return_timings": True, "prompt_cache_key": "pictures"}
        return ask(live, "/v1/chat/completions", asked)["timings"]["cache"]

    told(11)
    [card] = [one for one in conversations(Explorer(live.host)).conversations if one.session == "pictures"]
    assert card.in_memory == card.tokens - 1 and not card.on_disk
    changed = told(12, "A boat.", "And what else is in it?")
    places = live.llm.llm_engine.prompts.records("")[0].pictures[0]
    assert (changed["cause"], changed["message"], changed["change"]) == ("message_changed", 0, "edited"), changed
    assert changed["at"] == places.start and places.start < changed["reused"] + 16 <= places.start + 16
    again = told(12, "A boat.", "And what else is in it?", "Fish.", "How many?")
    assert again["message"] == 3, again
