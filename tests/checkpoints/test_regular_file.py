"""Pipes, devices and folders in the place of files: every reader refuses them by name, and none waits for a writer."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.models.fixtures import make_checkpoint
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.cli.chat.conversation import load as load_conversation
from tokenwright.cli.options.defaults import of_serve
from tokenwright.environment import Environment
from tokenwright.errors import TokenwrightError
from tokenwright.planner.find import find
from tokenwright.regular_file import open_regular, read_regular, read_regular_text
from tokenwright.serve.settings import read_settings

MODEL = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "merges.txt",
    "vocab.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@contextmanager
def piped(path: Path) -> Iterator[Path]:
    """A pipe at `path`. Whoever waits for its writer finds it at its end, and so goes on, and is found out."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    over = threading.Event()

    def let_go() -> None:
        while not over.wait(0.01):
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:  # nobody waits
                continue

    other = threading.Thread(target=let_go)
    other.start()
    try:
        yield path
    finally:
        over.set()
        other.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder of a model, as often as it is asked."""

    def made() -> Path:
        folder = tmp_path_factory.mktemp("model")
        make_checkpoint(folder, "qwen2")
        return folder

    return made


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(TokenwrightError, match="it is a device or a pipe, not a file"):
        call()


@pytest.mark.parametrize("name", MODEL + TOKENIZER)
def test_a_pipe_in_the_place_of_a_models_file_is_refused(name: str, model: Callable[[], Path]) -> None:
    folder = model()
    if name in ("tokenizer.model", "merges.txt", "vocab.json"):  # read where there is no tokenizer.json
        (folder / "tokenizer.json").unlink()
    if name in ("merges.txt", "vocab.json"):
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
        (folder / "merges.txt").write_text("#version: 0.2\n")
        (folder / "vocab.json").write_text("{}")
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    with piped(folder / name):
        refused(lambda: Checkpoint.open(folder).tokenizer())


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_in_the_place_of_an_adapters_file_is_refused(
    name: str, model: Callable[[], Path], tmp_path: Path
) -> None:
    folder, settings = model(), {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with piped(tmp_path / name):
        refused(lambda: Checkpoint.open(folder).merged([tmp_path]))


def test_a_pipe_with_the_name_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with piped(tmp_path / "model.gguf") as pipe:
        refused(lambda: Checkpoint.open(pipe))
        refused(lambda: find(str(pipe)))


def test_a_pipe_in_the_place_of_settings_or_of_a_conversation_is_refused(tmp_path: Path) -> None:
    with piped(tmp_path / "settings.toml") as pipe:
        refused(lambda: of_serve(Environment.read({"TOKENWRIGHT_SETTINGS": str(pipe)})))
        refused(lambda: read_settings(pipe, {}, {}))
        refused(lambda: load_conversation(pipe))


def test_a_link_to_a_file_is_read_where_links_may_be(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes("ö\r\n".encode())
    link.symlink_to(file)
    assert read_regular(link) == "ö\r\n".encode()
    assert read_regular_text(link) == "ö\n"
    with pytest.raises(OSError, match="symbolic"):
        open_regular(link, links=False)


def test_what_is_no_file_is_refused_and_its_descriptor_closed(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path, words in ((tmp_path, "a folder"), (Path("/dev/zero"), "a device or a pipe")):
        with pytest.raises(OSError, match=f"it is {words}, not a file"):
            read_regular(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
