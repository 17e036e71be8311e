"""The tokenizer of a checkpoint: its files, its ids, and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from tests.profiles import examples
from tests.text import kinds
from tokenwright.checkpoints.files.local import STORIES
from tokenwright.errors import CheckpointError, RequestError
from tokenwright.text import Tokenizer, files

END = "<|endoftext|>"


def gpt2_files(folder: Path) -> Path:
    """vocab.json and merges.txt as GPT-2 has them: bytes in its order, merges, the special token."""
    letters = [kinds.LETTER[byte] for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [kinds.LETTER[byte] for byte in [*range(33), *range(127, 161), 173]]
    merges = ["Ġ t", "h e", "Ġt he", "b r"]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges), END]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


def test_the_class_in_the_config_says_how_vocab_and_merges_cut(tmp_path: Path) -> None:
    """Qwen2's tokenizer takes digits one by one and composes characters; GPT-2's does neither."""
    gpt2_files(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"12": len(vocab)}))
    with (tmp_path / "merges.txt").open("a") as merges:
        merges.write("1 2\n")
    plain = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    qwen = Tokenizer.load(tmp_path)
    assert (len(plain.encode("12")), len(qwen.encode("12"))) == (1, 2)
    assert (len(plain.encode("e\u0301")), qwen.encode("e\u0301")) == (3, qwen.encode("\u00e9"))


def llama(*, bos: bool = True) -> Library:
    """Llama 2's kind: BPE with byte tokens, a space before the text, <s> by the post-processor."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab/<>s", "▁a"]
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Library(
        models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = kinds.byte_fallback()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return library


def unigram() -> Library:
    """T5's kind; its vocabulary holds the special token as a plain entry too."""
    vocab = [("<unk>", 0.0), ("</s>", 0.0), *((c, -3.0) for c in "▁ab</s>"), ("▁a", -2.0)]
    library = Library(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["</s>"])
    return library


def save(folder: Path, library: Library, **config: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json."""
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_gpt2_is_built_from_its_two_files(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(gpt2_files(tmp_path), vocab_size=261)
    ids = tokenizer.encode(f"the the bright{END}")
    assert [tokenizer.token_text(token) for token in ids] == [
        *("t", "he", " the", " ", "br", "i", "g", "h", "t"),
        END,
    ]
    assert ids[-1] == 260 == tokenizer.bos_id
    assert tokenizer.eos_ids == (260,)
    assert tokenizer.special_ids == {260}
    assert tokenizer.vocab_size == 261
    assert tokenizer.chat_template is None
    assert tokenizer.decode(ids) == "the the bright"
    assert tokenizer.decode(ids, skip_special=False) == f"the the bright{END}"
    assert tokenizer.encode("") == []


def test_gpt2_files_without_the_special_token(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.encode("aa"), tokenizer.bos_id, tokenizer.eos_ids) == ([0, 0], None, ())


def test_gpt2_with_a_prefix_space(tmp_path: Path) -> None:
    gpt2_files(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the")) == " the"


@examples(150)
@given(kinds.texts)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = kinds.wrap(kinds.letters())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False), skip_special=False) == text


def test_bos_comes_from_the_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, llama(), bos_token="<s>", eos_token={"content": "</s>", "special": True}))
    plain = tokenizer.encode("a b", add_special=False)
    assert tokenizer.encode("a b") == [1, *plain]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("<s>a b") == [1, *tokenizer.encode("a b", add_special=False)]
    assert tokenizer.encode("<s><s>a")[:3] == [1, 1, tokenizer.encode("a")[1]]
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


@pytest.mark.parametrize("by_processor", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_add_bos_token_decides_where_it_is_given(tmp_path: Path, by_processor: bool, wanted: bool) -> None:
    folder = save(tmp_path, llama(bos=by_processor), bos_token="<s>", eos_token="</s>", add_bos_token=wanted)
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("a b", add_special=False)
    assert tokenizer.encode("a b") == [1] * wanted + plain
    assert tokenizer.encode("<s>a b") == tokenizer.encode("<s>a b", add_special=False)
    assert tokenizer.encode("<s>a", parse_special=False).count(1) == wanted


def test_an_eos_of_the_post_processor_is_no_bos(tmp_path: Path) -> None:
    library = llama(bos=False)
    library.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = Tokenizer.load(save(tmp_path, library, bos_token="<s>", eos_token="</s>"))
    assert tokenizer.encode("<s><s>") == [1, 1, 2]


@pytest.mark.parametrize("make", [kinds.letters, llama, unigram])
def test_special_tokens_in_text_stay_text_unless_parsed(make: Callable[[], Library]) -> None:
    tokenizer = kinds.wrap(make())
    special = {"letters": END, "llama": "</s>", "unigram": "</s>"}[make.__name__]
    at = tokenizer._library.token_to_id(special)
    assert at in tokenizer.encode(f"a{special}b", add_special=False)
    ids = tokenizer.encode(f"a{special}b", add_special=False, parse_special=False)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.decode(ids, skip_special=False) == f"a{special}b"


def test_merges_do_not_make_special_tokens_of_text() -> None:
    vocab = {token: i for i, token in enumerate(["<", "s", ">", "<s", "<s>"])}
    library = Library(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    library.decoder = decoders.Fuse()
    library.add_special_tokens(["<s>"])
    tokenizer = kinds.wrap(library)
    assert tokenizer.encode("<s>") == [4]
    assert tokenizer.encode("<s>", parse_special=False) == [3, 2]


def test_unknown_characters_are_unknown_with_and_without_specials() -> None:
    library = Library(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    library.add_special_tokens(["<unk>"])
    tokenizer = kinds.wrap(library)
    assert tokenizer.encode("b") == tokenizer.encode("b", parse_special=False) == [0]


def test_added_tokens_keep_their_ids_without_specials() -> None:
    library = kinds.letters()
    library.add_tokens([AddedToken("<think>", special=False), AddedToken("éà", normalized=False)])
    library.add_special_tokens(["<|im_end|>"])
    tokenizer = kinds.wrap(library)
    assert tokenizer.encode("<think>éà", parse_special=False) == [257, 258] == tokenizer.encode("<think>éà")
    assert tokenizer.decode([257, 258]) == "<think>éà"
    assert 259 not in tokenizer.encode("<|im_end|>", parse_special=False)


def test_configs_add_tokens_that_tokenizer_json_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "257": {"content": "<|im_end|>", "special": True},
        "258": {"content": "<tool>", "special": False},
    }
    save(
        tmp_path,
        kinds.letters(),
        added_tokens_decoder=extra,
        eos_token=["<|im_end|>", {"content": END}, "<gone>"],
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({END: 256, "<more>": 259}))
    with caplog.at_level("WARNING"):
        tokenizer = Tokenizer.load(tmp_path)
    assert "eos_token '<gone>'" in caplog.text
    assert tokenizer.encode("<|im_end|><tool><more>") == [257, 258, 259]
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.eos_ids == (257, 256)
    assert tokenizer.bos_id is None


def test_many_added_tokens_are_added_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same tokenizer as one by one; each call takes time that grows with all tokens added before it."""
    library = kinds.letters()
    there = [AddedToken(f"<there {i}>", special=i % 3 == 0) for i in range(60)]
    for token in there:
        (library.add_special_tokens if token.special else library.add_tokens)([token])
    first = library.get_vocab_size()
    spec = {i: {"content": f"<there {i}>", "special": i % 2 == 0, "rstrip": i % 5 == 0} for i in range(60)}
    extra = {str(first - 60 + i): one for i, one in spec.items()}
    extra |= {str(first + i): {"content": f"<new {i}>", "special": i > 30, "normalized": i % 2 == 0} for i in range(60)}
    save(tmp_path, library, added_tokens_decoder=extra)
    calls: list[int] = []
    added = files._add
    monkeypatch.setattr(files, "_add", lambda library, tokens: (calls.append(len(tokens)), added(library, tokens)))
    together = files.read_folder(tmp_path).library
    assert calls == [120]
    one_by_one = Library.from_file(str(tmp_path / "tokenizer.json"))
    for one in extra.values():
        flags = {name: one[name] for name in ("rstrip", "normalized") if name in one}
        token = AddedToken(one["content"], special=one["special"], **flags)
        (one_by_one.add_special_tokens if token.special else one_by_one.add_tokens)([token])
    assert json.loads(together.to_str())["added_tokens"] == json.loads(one_by_one.to_str())["added_tokens"]

    class Counted:
        calls = 0

        def add_tokens(self, tokens: list[AddedToken]) -> None:
            self.calls += 1

        add_special_tokens = add_tokens

    counted: Any = Counted()
    added(counted, [AddedToken(str(i), special=i >= 2000) for i in range(4000)])
    assert counted.calls == 2


def test_of_tokens_that_both_files_list_the_config_decides(tmp_path: Path) -> None:
    library = kinds.letters()
    library.add_tokens(["<tool>"])
    extra = {"256": {"content": END, "special": True}, "257": {"content": "<tool>", "special": True}}
    tokenizer = Tokenizer.load(save(tmp_path, library, added_tokens_decoder=extra))
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.encode("<tool>") == [257]
    assert 257 not in tokenizer.encode("<tool>", parse_special=False)


def test_a_byte_level_entry_outside_the_alphabet_is_itself() -> None:
    tokenizer, ids = kinds.of_tokens(["日", kinds.byte_token(b"a b")], kinds.byte_level())
    assert tokenizer.decode(ids) == "日a b" == tokenizer._library.decode(ids)


def test_special_tokens_map_stands_behind_the_config(tmp_path: Path) -> None:
    save(tmp_path, llama(), eos_token="</s>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<unk>"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


def test_an_eos_that_is_a_plain_entry_becomes_special(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"a": 0, "<end>": 1, "?": 2}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer.load(save(tmp_path, library, eos_token="<end>"))
    assert tokenizer.encode("a<end>") == [0, 1]
    assert tokenizer.decode([0, 1]) == "a"


@pytest.mark.parametrize("value", [5, True, {"text": "</s>"}, ["</s>", 2], {"content": None}])
def test_an_eos_that_is_no_text_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="eos_token must be the text of a token"):
        Tokenizer.load(save(tmp_path, llama(), eos_token=value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("one", "one"),
        ([{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (
            [{"name": "default", "template": "d\n"}, {"name": "tool_use", "template": "t\n"}],
            "d\n",
        ),
        ([{"name": "tool", "template": "t"}], "t"),
        ([], None),
        (None, None),
    ],
)
def test_chat_template(tmp_path: Path, value: Any, expected: str | None) -> None:
    save(tmp_path, kinds.letters(), chat_template=value)
    found = Tokenizer.load(tmp_path)
    assert found.chat_template == expected
    assert (found.tool_template is not None) == ("tool_use" in str(value))
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).chat_template == "file"


def test_truncation_and_padding_of_the_file_are_not_followed(tmp_path: Path) -> None:
    library = kinds.letters()
    library.enable_truncation(4)
    library.enable_padding(length=8)
    assert len(Tokenizer.load(save(tmp_path, library)).encode("123456")) == 6


def test_token_text_shows_the_bytes_of_cut_characters() -> None:
    library = kinds.letters()
    tokenizer = kinds.wrap(library)
    assert [tokenizer.token_text(token) for token in [*"€ ".encode(), 256]] == [
        "<0xE2>",
        "<0x82>",
        "<0xAC>",
        " ",
        END,
    ]
    both, ids = kinds.of_tokens([kinds.byte_token("é€".encode()[:-1])], kinds.byte_level())
    assert both.token_text(ids[0]) == "é<0xE2><0x82>"
    spaced, ids = kinds.of_tokens(["▁the"], kinds.byte_fallback())
    assert spaced.token_text(ids[0]) == " the"


def test_ids_beyond_the_tokenizer_but_not_the_model_have_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, kinds.letters()), vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([97, 299, 98]) == "ab"
    assert tokenizer.token_text(299) == "<unused 299>"


def test_tokens_that_the_model_has_no_rows_for_are_refused_when_used(tmp_path: Path) -> None:
    """A tokenizer that grew beyond the embedding opens; BOS and EOS count only where they have rows."""
    library = kinds.letters()
    library.add_special_tokens([f"<{i}>" for i in range(100)])
    tokenizer = Tokenizer.load(save(tmp_path, library, bos_token="<90>", eos_token="<1>"), vocab_size=300)
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (300, None)
    assert tokenizer.eos_ids == (library.token_to_id("<1>"),)
    assert max(tokenizer.special_ids) == 299
    assert tokenizer.encode("ab<2>") == [97, 98, library.token_to_id("<2>")]
    for call in (lambda: tokenizer.encode("ab<77>"), lambda: tokenizer.encode_parts(["ab", 334])):
        with pytest.raises(RequestError, match="'<77>' has the id 334, and the model has rows for 300"):
            call()
    assert tokenizer.encode("<77>", parse_special=False) == [*b"<77>"]


@pytest.mark.parametrize("token", [-1, 257, 1 << 70])
def test_ids_out_of_range_are_refused(token: int) -> None:
    tokenizer = kinds.wrap(kinds.letters())
    for call in (lambda: tokenizer.decode([token]), lambda: tokenizer.token_text(token)):
        with pytest.raises(RequestError, match="ids are 0 to 256"):
            call()


def test_nul_is_text_and_surrogates_are_not() -> None:
    tokenizer = kinds.wrap(kinds.letters())
    assert tokenizer.encode("a\0b") == [97, 0, 98]
    with pytest.raises(RequestError, match="character 2 "):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(RequestError, match="must be text, not bytes"):
        tokenizer.encode(b"ab")  # type: ignore[arg-type]


def test_a_pattern_that_backtracks_for_ever_is_an_error_not_a_crash(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The regex engine gives up, and panics; the request fails, the tokenizer lives."""
    library = kinds.letters()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("(a+)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer = kinds.wrap(library)
    with pytest.raises(RequestError, match="failed on this text"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("b") == [98]
    capfd.readouterr()


def test_threads_share_a_tokenizer() -> None:
    tokenizer = kinds.wrap(kinds.letters())
    text = f"the € {END} 日本"
    parsed, plain = tokenizer.encode(text), kinds.wrap(kinds.letters()).encode(text, parse_special=False)

    def work(i: int) -> list[int]:
        return tokenizer.encode(text, parse_special=i % 2 == 0)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(400)))
    assert all(ids == (plain if i % 2 else parsed) for i, ids in enumerate(results))
    assert tokenizer.decode(plain, skip_special=False) == text


def test_no_warning_after_a_fork(tmp_path: Path) -> None:
    save(tmp_path, kinds.letters())
    script = (
        "import os, sys; from pathlib import Path; from tokenwright.text import Tokenizer\n"
        "t = Tokenizer.load(Path(sys.argv[1])); t.encode('a b'); t.encode('a', parse_special=False)\n"
        "pid = os.fork(); t.encode('a b'); t.decode([1]); pid and os.waitpid(pid, 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""


CTC = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
OTHER_ID = '{"added_tokens_decoder": {"300": {"content": "<x>", "special": true}}}'
ROBERTA = '{"tokenizer_class": "RobertaTokenizer"}'
DAMAGES: list[tuple[str, Callable[[str], str] | str, str]] = [  # the file, what becomes of its text, the reason
    ("tokenizer.json", lambda text: text[:-40], "cannot be used"),
    ("tokenizer.json", "\udcff\udcfe{}", "cannot be read"),
    ("tokenizer.json", POINTER, "git lfs pull"),
    ("tokenizer.json", lambda text: json.dumps(json.loads(text) | {"decoder": CTC}), "CTC"),
    ("tokenizer_config.json", '{"bos_token": ', "tokenizer_config.json is not JSON"),
    ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json is not JSON"),
    ("tokenizer_config.json", "[]", "holds a list"),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "cannot be used"),
    ("tokenizer_config.json", OTHER_ID, "do not belong together"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "cannot be used"),
    ("merges.txt", "#version: 0.2\nh e\nt h e\n", "merge 2 of merges.txt"),
    ("merges.txt", "q q\n", "cannot be used"),
    ("vocab.json", lambda text: text[:-9], "vocab.json is not JSON"),
    ("tokenizer_config.json", ROBERTA, "add its tokenizer.json"),
    ("", "", "no tokenizer.json"),
]


@pytest.mark.parametrize(("name", "change", "reason"), DAMAGES)
def test_damaged_folders_are_refused_with_the_reason(tmp_path: Path, name: str, change: Any, reason: str) -> None:
    save(tmp_path, kinds.letters())
    if name in ("merges.txt", "vocab.json", "") or change == ROBERTA:
        (tmp_path / "tokenizer.json").unlink()
    if name:
        file = gpt2_files(tmp_path) / name
        text = change(file.read_text()) if callable(change) else change
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path, vocab_size=300)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "a")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "a"), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    ],
)
def test_decoders_that_look_beyond_a_token_are_refused(decoder: Any) -> None:
    with pytest.raises(CheckpointError, match="token by token"):
        kinds.of_tokens(["a"], decoder)


def test_an_interrupt_is_not_taken_for_a_bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenwright.text.files._read_library", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.load(tmp_path)


COMPOSED = st.lists(
    st.sampled_from(["\u1f82", "\u03b1\u0313\u0300\u0345", "e\u0301", "  ", "\0", "ab", "\u0344"]), max_size=40
)


@examples(100)
@given(st.one_of(kinds.texts, COMPOSED.map("".join)), st.integers(1, 50), st.sampled_from(["letters", "stories"]))
def test_a_text_has_at_least_the_tokens_that_its_length_says(text: str, times: int, kind: str) -> None:
    tokenizer = kinds.wrap(kinds.letters()) if kind == "letters" else Tokenizer.load(STORIES)
    assert tokenizer.least_tokens(text * times) <= len(tokenizer.encode(text * times))


def test_a_long_text_has_many_tokens() -> None:
    assert Tokenizer.load(STORIES).least_tokens("\0" * 1_000_000) > 10_000


@pytest.mark.parametrize("part", [normalizers.Strip(), normalizers.Replace("aaaa", ""), normalizers.StripAccents()])
def test_a_tokenizer_that_drops_text_says_nothing_about_its_length(part: normalizers.Normalizer) -> None:
    library = kinds.letters()
    assert kinds.wrap(library).least_tokens("a" * 100_000) > 0
    library.normalizer = part
    assert kinds.wrap(library).least_tokens("a" * 100_000) == 0
