"""What cannot be served is refused: exit code 2, a message that says why, no traceback, nothing on stdout."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from tests.cli.conftest import Run
from tests.models.fixtures import make_checkpoint
from tokenwright.cli import app
from tokenwright.cli.options.foreign import options_of, spoken
from tokenwright.errors import RequestError

Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("-n", "-1"), "-n must be a whole number from 0"),
        (("--temperature", "-1"), "--temperature must be a number from 0"),
        (("--temperature", "nan"), "not nan"),
        (("--temperature", "inf"), "not inf"),
        (("--top-p", "0"), "--top-p must be above 0 (it keeps that share of the probability); use --temperature 0"),
        (("--top-p", "2"), "--top-p must be a number from 0 to 1, not 2.0"),
        (("--top-k", "-1"), "--top-k must be a whole number from 0"),
        (("--seed", "-1"), "--seed must be a whole number from 0"),
        (("--stop", ""), "--stop has an empty string; leave it out"),
        (("--stop", "\udcff"), "--stop is not UTF-8 text"),
        (("--page-size", "0"), "--page-size must be a whole number from 1 to 2,147,483,648, not 0"),
        (("--token-budget", "0"), "--token-budget must be a whole number from 1 to 2,147,483,648, not 0"),
        (("--device", "toaster"), "toaster"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_values_of_options(refused: Refused, model: Path, options: tuple[str, ...], told: str) -> None:
    engine = options[0] in ("--page-size", "--token-budget", "--device", "--dtype")
    assert told in refused("generate", "x", "--model", model if engine else "/is/not/looked/at", *options)


def test_a_prompt_over_the_context_is_told_by_how_much(refused: Refused, model: Path) -> None:
    message = refused("generate", "q" * 600, "--model", model)
    assert "the prompt has 600 tokens, 88 more than the model's context of 512; shorten it by 88 tokens" in message


def test_bytes_that_are_not_text(refused: Refused, model: Path) -> None:
    """Python hands such a byte of an argument on as half of a surrogate pair."""
    told = refused("generate", "a \udcff b", "--model", model)
    assert "the prompt on the command line is not UTF-8 text (byte 2 is wrong)" in told


def test_an_empty_prompt_without_bos(refused: Refused, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "gpt2", "gpt2").path
    assert "the prompt has no tokens" in refused("generate", "", "--model", folder)


def test_two_prompts_or_none(refused: Refused, tmp_path: Path) -> None:
    assert "standard input is empty" in refused("generate")
    assert "two prompts are given" in refused("generate", "text", "--file", tmp_path)


@pytest.mark.parametrize("command", [("generate", "x", "--model"), ("inspect",), ("race", "x", "--model")])
def test_a_folder_that_is_not_there(refused: Refused, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert f"there is no folder {tmp_path / 'nothing'}" in refused(*command, tmp_path / "nothing")


@pytest.mark.parametrize(
    "command",
    [
        *(("generate", "x", "-m"), ("chat", "x", "-m"), ("race", "x", "-m"), ("bench", "-m"), ("quantize", "-m")),
        *(("inspect",), ("plan",), ("serve", "--port", "0"), ("explore", "--no-browser", "--port", "0")),
    ],
)
def test_a_name_that_is_nearly_known_is_hinted_at(refused: Refused, tmp_path: Path, command: tuple[str, ...]) -> None:
    """In every command, before torch is imported or a port is opened; a name from the hub as well."""
    target = [tmp_path / "new"] if command[0] == "quantize" else []
    assert refused(*command, "storis", *target).endswith("; did you mean stories?\n")
    assert refused(*command, "qwen3-0.6", *target).endswith("; did you mean Qwen/Qwen3-0.6B?\n")


@pytest.mark.parametrize(
    ("error", "command", "said"),
    [
        (RequestError("no pages (pages or kv_memory)"), "generate", "no pages (--kv-memory)"),
        (RequestError("no pages (pages or kv_memory)"), "bench", "no pages"),
        (RequestError("smaller pages (page_size)"), "race", "smaller pages (--page-size)"),
        (RequestError("keep it beside (adapters)"), "generate", "keep it beside (serve --adapter)"),
        (RequestError("keep it beside (adapters)"), "serve", "keep it beside (--adapter)"),
        (RequestError("fewer (token_budget)"), "quantize", "fewer"),
        (RequestError("lower max_tokens"), "race", "lower --max-tokens"),
        (RequestError("int8 weights: leave weights out", "weights"), "chat", "int8 --weights: leave --weights out"),
        (RequestError("the folder my/weights.bin", "weights"), "chat", "the folder my/weights.bin"),
    ],
)
def test_errors_name_options_of_the_command(error: RequestError, command: str, said: str) -> None:
    assert spoken(error, options_of(get_command(app).commands[command].params)) == said  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [("generate", "x", "--model"), ("inspect",)])
def test_a_truncated_model(refused: Refused, model: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """A damaged model is refused by whatever opens it."""
    folder = shutil.copytree(model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = refused(*command, folder)
    assert "model.safetensors" in message and "download it again" in message


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("generate", "--temperature", "hot", "x"),
            "invalid value for '--temperature': it must be a number; ",
        ),
        (("generate", "--new-tokens", "many", "x"), "it must be a whole number; "),
        (
            ("generate", "--wings", "x"),
            "no such option: --wings; did you mean --sinks, --weights, --window? tokenwright generate",
        ),
        (("generate", "Once", "upon", "a"), "unexpected: upon a; a text with spaces needs quotes; "),
        (("genrate", "x"), "no such command 'genrate'; did you mean generate? tokenwright --help"),
        (("sing",), "no such command 'sing'"),
    ],
)
def test_words_that_are_no_options_are_told_plainly(run: Run, words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and "Traceback" not in result.stderr, result.stderr
