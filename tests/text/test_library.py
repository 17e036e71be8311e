"""The tokenizers in plain Python against the `tokenizers` library: the same words, ids and texts."""

import random
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import tokenwright
from tests.text import kinds
from tests.text.scripts import strings
from tokenwright.errors import CheckpointError
from tokenwright.text.bpe import SPLITS, byte_level, spaced
from web.python.tokenizers import parts
from web.python.tokenizers.bpe_tokenizer import BPETokenizer as Plain
from web.python.tokenizers.unicode_patterns import compiled

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = sorted({pattern for patterns in SPLITS.values() for pattern in patterns})
ENGLISH = (ROOT / "README.md").read_text() + "\n It's 12345 o'CLOCK, I'LL  see\t\r\n\r\n  x\x1c\x85\u00a0y\u3000z  "
TEXTS = [ENGLISH, "", " ", "  a", "a" * 300, "ab" * 2000, *strings(60)]


def trained(merges: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary whose pairs are drawn: merges that overlap in every way."""
    dice = random.Random(merges)
    vocab = {char: at for at, char in enumerate(sorted(kinds.LETTER.values()))}
    pairs: list[tuple[str, str]] = []
    common = [kinds.byte_token(text.encode()) for text in (" ", "e", "t", "a", "th", "in", "er", "б", "中", "\n")]
    while len(pairs) < merges:
        known = [*[*vocab][-400:], *list("".join(common)) * 10]
        pair = (dice.choice(known), dice.choice(known))
        if "".join(pair) not in vocab:
            pairs.append(pair)
            vocab["".join(pair)] = len(vocab)
    return vocab, pairs


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_cut_alike(pattern: str) -> None:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    for text in TEXTS:
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert parts._cut(compiled(pattern), text, "Isolated") == words


@pytest.mark.parametrize("behavior", ["isolated", "removed", "merged_with_previous", "merged_with_next"])
def test_every_way_to_cut(behavior: str) -> None:
    split = pre_tokenizers.Split(Regex(r"\s|\d+"), behavior)
    name = "".join(word.title() for word in behavior.split("_"))
    for text in TEXTS:
        words = [word for word, _ in split.pre_tokenize_str(text)]
        assert parts._cut(compiled(r"\s|\d+"), text, name) == words


def test_a_pattern_that_is_not_understood_is_refused() -> None:
    for pattern in (r"\p{Nonsense}", r"[\p{L}", r"(a", r"\p", r"[a-\q]"):
        with pytest.raises(CheckpointError, match="is not understood"):
            compiled(pattern)
    assert compiled(r"[\p{L}&&[^a-wж]]").findall("axyzж1 ") == ["x", "y", "z"]


def libraries() -> dict[str, Tokenizer]:
    """Tokenizers with every part that is done in Python."""
    vocab, merges = trained(900)
    found = {name: byte_level(name, vocab, merges) for name in ("gpt-2", "llama3", "qwen2", "deepseek-v3", "tekken")}
    found["prefix"] = byte_level("gpt-2", vocab, merges, prefix=True)
    ends = [("<s>", 7), ("</s>", 9)]
    found["gpt-2"].post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    pairs = [tuple(pair.split()) for pair in ("▁ t", "h e", "▁t he", "a n", "▁ ▁", "▁▁ ▁▁", "l l", "▁ a", "an d")]
    joined = [a + b for a, b in pairs]
    few = {token: at for at, token in enumerate(["<unk>", "▁", *" abcdehlnorst,.\néб中", *joined])}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = {token: at for at, token in enumerate([*few, *byte_tokens])}
    for prefix in (False, True):
        found[f"spaced {prefix}"] = spaced(pieces, pairs, 0, prefix=prefix)
    fused = Tokenizer(models.BPE(vocab=few, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fused.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    squeezed = normalizers.Replace(Regex(" {2,}"), " ")
    fused.normalizer = normalizers.Sequence([normalizers.NFKC(), squeezed])
    fused.decoder = decoders.Metaspace(prepend_scheme="first")
    each = Tokenizer(models.BPE(vocab=few, merges=pairs, unk_token="<unk>"))
    each.normalizer = normalizers.Strip()
    digits, spaces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(split=False)
    each.pre_tokenizer = pre_tokenizers.Sequence([digits, spaces])
    for one in (found["llama3"], found["spaced True"]):  # the library panics where texts are stripped, too
        one.add_special_tokens(["<|end|>", AddedToken("<|pad|>", rstrip=True, special=True)])
        whole, left = AddedToken("the", single_word=True), AddedToken(" \n", lstrip=True, normalized=False)
        one.add_tokens(["and", whole, left, "ée", "   "])
    return found | {"fused": fused, "each": each}


@pytest.mark.parametrize("name", libraries())
def test_ids_and_texts_are_the_library_s(name: str) -> None:
    library = libraries()[name]
    plain = Plain.from_str(library.to_str())
    assert Plain.from_str(plain.to_str()).to_str() == plain.to_str()
    assert plain.get_vocab() == library.get_vocab()
    assert [*plain.get_added_tokens_decoder()] == [*library.get_added_tokens_decoder()]
    marks = ["x<|end|>y <|pad|>  z", "and the bathe the, the  \n and", "ée e\u0301e", "the</s>   <|end|><|end|>"]
    for text in (*TEXTS, *marks):
        theirs, ours = library.encode(text, add_special_tokens=False), plain.encode(text)
        assert ours.ids == theirs.ids, text
        assert plain.post_process(ours).ids == library.post_process(theirs).ids
        if library.decoder is not None:
            tokens = [library.id_to_token(at) for at in ours.ids]
            assert plain.decoder.decode(tokens) == library.decoder.decode(tokens)


def test_the_small_model_s_tokenizer() -> None:
    text = (Path(tokenwright.__file__).parent / "stories" / "tokenizer.json").read_text()
    library, plain = Tokenizer.from_str(text), Plain.from_str(text)
    counts = Counter(one for text in TEXTS for one in library.encode(text, add_special_tokens=False).ids)
    assert counts == Counter(one for text in TEXTS for one in plain.encode(text).ids)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder", "post_processor", "model"])
def test_a_part_that_is_not_done_in_python_names_the_package(part: str) -> None:
    vocab, merges = trained(10)
    plain = Plain.from_str(byte_level("gpt-2", vocab, merges).to_str())
    setattr(plain, part, parts.TokenizerPart(type="Novel"))
    use = {
        "model": lambda: Plain(parts.models.Unigram([], 0, False)),
        "decoder": lambda: plain.decoder.decode(["a"]),
        "post_processor": lambda: plain.post_process(plain.encode("a")),
    }
    with pytest.raises(CheckpointError, match="pip install tokenizers"):
        use.get(part, lambda: plain.encode("a"))()
