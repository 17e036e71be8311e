"""Fill-in-the-middle: prompts for the gap between two texts, in the form for which a vocabulary has tokens.

Qwen2.5-Coder, CodeGemma, Granite 4   <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|>
StarCoder 2, Granite code             <fim_prefix> prefix <fim_suffix> suffix <fim_middle>
DeepSeek-Coder                        <｜fim▁begin｜> prefix <｜fim▁hole｜> suffix <｜fim▁end｜>
CodeLlama                             ▁<PRE> prefix ▁<SUF> suffix ▁<MID>
Codestral                             [SUFFIX] suffix [PREFIX] prefix
Seed-Coder                            <[fim-suffix]> suffix <[fim-prefix]> prefix <[fim-middle]>
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenwright.errors import RequestError
from tokenwright.text.tokenizer import Tokenizer, check_text

REPOSITORY = "repository"
SNIPPET = "\n\n--- snippet ---\n\n"  # before each file, for a vocabulary without a token for files
_ANCHOR = "\u263a"  # no vocabulary joins it with the text after it


@dataclass(frozen=True, slots=True)
class InfillForm:
    """The tokens of a form, "" where it has none. `ends` are further tokens that end the gap."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()


FORMS = (
    InfillForm("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False, "<|repo_name|>", "<|file_sep|>",
               ("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>")),
    InfillForm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", False, "<repo_name>", "<file_sep>",
               ("<fim_pad>", "<|endoftext|>", "<filename>", "<reponame>")),
    InfillForm("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    InfillForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<｜end▁of▁sentence｜>", "<|EOT|>")),
    InfillForm("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    InfillForm("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    InfillForm("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),
    InfillForm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    InfillForm("[PREFIX]", "[SUFFIX]", "", True),
)  # fmt: skip


class Infill:
    """Makes the prompts of one vocabulary. `form` is None if it has no tokens for a gap."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.control.ids
        fitting = (one for one in FORMS if {one.prefix, one.suffix, one.middle or one.prefix} <= known.keys())
        self.form = next(fitting, None)
        form = self.form
        marks = () if form is None else (form.prefix, form.suffix, form.middle, form.repository, form.file, *form.ends)
        self.ends = tuple(sorted(known[name] for name in marks if name in known))

    def ids(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = (), begun: str = "") -> list[int]:
        """The prompt. files: (name, text) of others. begun: how the gap's text begins. Raises RequestError."""
        if self.form is None:
            raise RequestError(
                "suffix: the vocabulary of this model has no tokens to fill a gap with, such as <|fim_prefix|>; use a "
                "model that was trained for it (Qwen2.5-Coder, StarCoder 2, CodeLlama, DeepSeek-Coder, Codestral)"
            )
        for text in (prefix, suffix, begun, *(part for file in files for part in file)):
            check_text(text)
        prefix, begun = (prefix, begun) if self.form.middle else (prefix + begun, "")
        parts = [*self._others(self.form, files), *self._parts(self.form, prefix, suffix), begun]
        bos = self._tokenizer.bos_id
        first = [bos] if bos is not None and self._tokenizer.encode("a")[:1] == [bos] else []
        return [*first, *self._encoded([part for part in parts if part != ""])]

    def _parts(self, form: InfillForm, prefix: str, suffix: str) -> list[str | int]:
        known = self._tokenizer.control.ids
        before: list[str | int] = [known[form.prefix], prefix]
        after: list[str | int] = [known[form.suffix], suffix]
        middle: list[str | int] = [known[form.middle]] if form.middle else []
        return [*after, *before, *middle] if form.suffix_first else [*before, *after, *middle]

    def _others(self, form: InfillForm, files: Sequence[tuple[str, str]]) -> list[str | int]:
        known = self._tokenizer.control.ids
        if not files:
            return []
        if form.file not in known:
            return ["".join(f"{SNIPPET}{text}" for _, text in files)]
        parts: list[str | int] = [known[form.repository], REPOSITORY] if form.repository in known else []
        for name, text in files:
            parts += [known[form.file], f"{name}\n{text}"]
        return [*parts, known[form.file]]

    def _encoded(self, parts: Sequence[str | int]) -> list[int]:
        if not self._spaced:
            return self._tokenizer.encode_parts(parts)
        found: list[int] = []
        for at, part in enumerate(parts):
            if isinstance(part, int):
                found.append(part)
            else:
                joined = at > 0 and parts[at - 1] not in self._opening
                found += self._unspaced(part) if joined else self._plain(part)
        return found

    @property
    def _opening(self) -> tuple[int, ...]:
        """The tokens before a text, to which belongs the space at its start."""
        assert self.form is not None, "it was checked"
        known = self._tokenizer.control.ids
        return tuple(known[name] for name in (self.form.prefix, self.form.file, self.form.repository) if name in known)

    @property
    def _spaced(self) -> bool:
        [first, *_] = self._plain("a")
        return (self._tokenizer.token_bytes(first) or b"").startswith(b" ")

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)

    def _unspaced(self, text: str) -> list[int]:
        anchor, whole = self._plain(_ANCHOR), self._plain(_ANCHOR + text)
        assert whole[: len(anchor)] == anchor, "the anchor is joined with nothing"
        return whole[len(anchor) :]
