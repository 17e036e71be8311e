"""Tokenizers in the metadata of GGUF files."""

from typing import Any

import pytest

from tokenwright.errors import CheckpointError
from tokenwright.text import Tokenizer
from tokenwright.text.bpe import SPLITS
from tokenwright.text.metadata import read_metadata

BYTES = [f"<0x{at:02X}>" for at in range(256)]
WORDS = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "<go>"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
KINDS = [2, 3, 3, *[6] * 256, *[1] * 8, 4]
SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -2.0, -4.0, 0.0]
ID = {token: at for at, token in enumerate(TOKENS)}


def sentencepiece(**changes: Any) -> Tokenizer:
    facts: dict[str, Any] = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    facts = {name: value for name, value in (facts | changes).items() if value is not None}
    return Tokenizer(read_metadata({f"tokenizer.ggml.{name}": value for name, value in facts.items()}, "a.gguf"))


def ids(*tokens: str) -> list[int]:
    return [ID[token] for token in tokens]


def test_the_pair_of_the_highest_score_is_joined_first() -> None:
    """bc before abc before ab: so "abc" becomes one token by way of bc, and "ab" alone is joined last."""
    library = sentencepiece()
    assert library.encode("abc", add_special=False) == ids("▁", "abc")  # ▁a would be joined after bc
    assert library.encode("ab", add_special=False) == ids("▁", "ab")
    assert library.encode("a b", add_special=False) == ids("▁a", "▁", "b")
    assert sentencepiece(add_space_prefix=False).encode("abc", add_special=False) == ids("abc")


def test_other_characters_are_bytes_and_come_back() -> None:
    library = sentencepiece()
    assert library.encode("é", add_special=False) == ids("▁", "<0xC3>", "<0xA9>")
    for text in ("a é 漢\n", " ab  c", ""):
        assert library.decode(library.encode(text)) == text


def test_merges_beside_spaces_that_are_written_out() -> None:
    """Gemma 4's: the merges decide, whatever the scores; no space goes before a text, and it begins with BOS."""
    library = sentencepiece(model="gemma4", merges=["a b", "▁ a", "ab c"])
    assert library.encode("abc") == [1, *ids("abc")]  # bc has the higher score
    assert library.encode("bc a", add_special=False) == ids("b", "c", "▁a")
    for text in ("a é 漢\n", " ab  c<go>", ""):
        assert library.decode(library.encode(text)) == text
    with pytest.raises(CheckpointError, match="merges must be a list"):
        sentencepiece(model="gemma4")


def test_special_and_added_tokens_are_the_files() -> None:
    library = sentencepiece(eot_token_id=ID["<go>"])
    assert library.encode("a")[0] == library.bos_id == 1
    assert library.eos_ids == (2, ID["<go>"])
    assert library.special_ids == {0, 1, 2}
    assert library.encode("<go>", add_special=False) == ids("<go>")
    assert 1 not in library.encode("<s>", add_special=False, parse_special=False)
    assert sentencepiece(add_bos_token=False).encode("a") == ids("▁a")
    assert sentencepiece(add_bos_token=False, add_eos_token=True).encode("a") == [*ids("▁a"), 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "tokens must be a list of type str"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "same token twice"),
        ({"scores": SCORES[1:]}, "267 values for 268 tokens"),
        ({"scores": [1] * len(TOKENS)}, "scores must be a list of type float"),
        ({"token_type": [1]}, "token_type has 1 values"),
        ({"tokens": [*TOKENS[:-1], "a" * 20_000]}, "too long"),
        ({"bos_token_id": -1}, "bos_token_id is none of the 268 tokens"),
        ({"eos_token_id": 268}, "eos_token_id is none"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false"),
        ({"model": None}, "model is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a x"]}, "cannot be used"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "merges must be pairs"),
        ({"model": "gpt2", "merges": []}, "pre is missing"),
    ],
)
def test_wrong_values_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        sentencepiece(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", "It's 1234  x", ["It", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("falcon", "It's 1234!", ["It", "'", "s", "Ġ", "123", "4", "!"]),
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("llama-bpe", "IT'S 12345\n\nx", ["IT", "'S", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("qwen2", "IT'S 123", ["IT", "'S", "Ġ", "1", "2", "3"]),
        ("starcoder", "a 12", ["a", "Ġ", "1", "2"]),
        ("dbrx", "IT'S 12345", ["IT", "'S", "Ġ", "123", "45"]),
        ("tekken", "HTTPServer's 12/\n", ["HTTPServer", "'s", "Ġ", "1", "2", "/Ċ"]),
        ("kimi-k2", "x世's 12345/\n/", ["x", "ä¸ĸ", "'s", "Ġ", "123", "45", "/Ċ", "/"]),
        ("gpt-4o", "HelloWorld'LL 1234", ["Hello", "World'LL", "Ġ", "123", "4"]),
        ("deepseek-v3", "IT'S 1234世界x", ["IT", "'S", "Ġ", "123", "4", "ä¸ĸçķĮ", "x"]),
        ("qwen35", "e\u0301a 12", ["eÌģa", "Ġ", "1", "2"]),
        ("bailingmoe2", "a\n \n", ["a", "ĊĠĊ"]),
        ("seed-coder", "a!!\n\nb", ["a", "!!", "ĊĊ", "b"]),
        ("falcon-h1", "IT'S 1234", ["IT", "'S", "Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_as_their_patterns_say(name: str, text: str, parts: list[str]) -> None:
    facts = {"model": "gpt2", "pre": name, "tokens": ["a", "b"], "merges": []}
    library = read_metadata({f"tokenizer.ggml.{key}": value for key, value in facts.items()}, "a.gguf").library
    assert [part for part, _ in library.pre_tokenizer.pre_tokenize_str(text)] == parts
    assert name in SPLITS
