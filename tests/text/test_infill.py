"""Fill-in-the-middle: each form's order and special cases, by its definition."""

from pathlib import Path

import pytest
import sentencepiece

from tests.models.fixtures import make_checkpoint
from tests.vocabulary import add_tokens
from tokenwright.errors import RequestError
from tokenwright.text import Tokenizer
from tokenwright.text.fill_in_middle import FORMS, REPOSITORY, SNIPPET, Infill

PREFIX, SUFFIX = "def f(a", "):\n    return a <|fim_middle|>"
FILES = (("a.py", "x = 1\n"), ("b.py", "y"))
ORDERS = {  # as the models' cards say; p and s stand for the texts
    "qwen": ["<|fim_prefix|>", "p", "<|fim_suffix|>", "s", "<|fim_middle|>"],
    "starcoder2": ["<fim_prefix>", "p", "<fim_suffix>", "s", "<fim_middle>"],
    "santacoder": ["<fim-prefix>", "p", "<fim-suffix>", "s", "<fim-middle>"],
    "deepseek": ["<｜fim▁begin｜>", "p", "<｜fim▁hole｜>", "s", "<｜fim▁end｜>"],
    "codellama": ["▁<PRE>", "p", "▁<SUF>", "s", "▁<MID>"],
    "codestral": ["[SUFFIX]", "s", "[PREFIX]", "p"],
    "seed-coder": ["<[fim-suffix]>", "s", "<[fim-prefix]>", "p", "<[fim-middle]>"],
    "glm": ["<|code_prefix|>", "p", "<|code_suffix|>", "s", "<|code_middle|>"],
}


def byte_level(folder: Path, *names: str) -> Tokenizer:
    path, _ = make_checkpoint(folder / "model", "qwen2")
    add_tokens(path, *names)
    return Tokenizer.load(path, vocab_size=320)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize("name", ORDERS)
def test_each_form_has_its_order(name: str, tmp_path: Path) -> None:
    marks = [part for part in ORDERS[name] if len(part) > 1]
    tokenizer = byte_level(tmp_path, *reversed(marks), "<|file_sep|>")
    known = tokenizer.control.ids
    texts = {"p": plain(tokenizer, PREFIX), "s": plain(tokenizer, SUFFIX)}
    expected = [token for part in ORDERS[name] for token in texts.get(part, [known.get(part, -1)])]
    infill = Infill(tokenizer)
    assert infill.ids(PREFIX, SUFFIX) == expected
    assert infill.ids(PREFIX, SUFFIX, begun=" and") == [*expected, *plain(tokenizer, " and")]
    empty = [token for part in ORDERS[name] if part not in texts for token in [known[part]]]
    assert infill.ids("", "") == empty
    assert {known[mark] for mark in marks} <= set(infill.ends)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_the_ends_are_those_that_the_vocabulary_has(form: object, tmp_path: Path) -> None:
    assert isinstance(form, type(FORMS[0]))
    marks = [mark for mark in (form.prefix, form.suffix, form.middle) if mark]
    tokenizer = byte_level(tmp_path, *marks, *form.ends)
    infill = Infill(tokenizer)
    assert infill.form is form
    assert set(infill.ends) == {tokenizer.control.ids[name] for name in (*marks, *form.ends)}


def test_other_files_come_before(tmp_path: Path) -> None:
    marks = [part for part in ORDERS["qwen"] if len(part) > 1]
    tokenizer = byte_level(tmp_path, *marks, "<|repo_name|>", "<|file_sep|>")
    known = tokenizer.control.ids
    alone = Infill(tokenizer).ids(PREFIX, SUFFIX)
    expected: list[int] = [known["<|repo_name|>"], *plain(tokenizer, REPOSITORY)]
    for name, text in FILES:
        expected += [known["<|file_sep|>"], *plain(tokenizer, f"{name}\n{text}")]
    assert Infill(tokenizer).ids(PREFIX, SUFFIX, FILES) == [*expected, known["<|file_sep|>"], *alone]


def test_other_files_without_a_token_for_them(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, *(part for part in ORDERS["deepseek"] if len(part) > 1))
    expected = plain(tokenizer, "".join(SNIPPET + text for _, text in FILES))
    infill = Infill(tokenizer)
    assert infill.ids(PREFIX, SUFFIX, FILES) == [*expected, *infill.ids(PREFIX, SUFFIX)]


def test_a_vocabulary_without_the_tokens_is_refused(tmp_path: Path) -> None:
    infill = Infill(byte_level(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>"))
    assert infill.form is None and infill.ends == ()
    with pytest.raises(RequestError, match="vocabulary of this model has no tokens to fill a gap"):
        infill.ids("a", "b")


@pytest.mark.parametrize("name", ["codellama", "codestral"])
def test_sentencepiece_puts_no_space_before_a_suffix(name: str, tmp_path: Path) -> None:
    """As the models' own code does: a suffix is what follows an anchor, and the text begins with BOS."""
    marks = [part for part in ORDERS[name] if len(part) > 1]
    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=tmp_path / "text", model_prefix=tmp_path / "tokenizer", vocab_size=420, minloglevel=2, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", control_symbols=marks, remove_extra_whitespaces=False,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path)
    anchor = theirs.encode("\u263a")
    for prefix, suffix in ((PREFIX, SUFFIX), ("a", " b"), (" a", ""), ("", "b")):
        texts = {"p": theirs.encode(prefix), "s": theirs.encode("\u263a" + suffix)[len(anchor) :]}
        expected = [token for part in ORDERS[name] for token in texts.get(part, [theirs.piece_to_id(part)])]
        assert Infill(tokenizer).ids(prefix, suffix) == [theirs.bos_id(), *expected]
