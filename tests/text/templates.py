"""Chat templates in the manner of the well-known families, and tokenizers of every kind that know their tokens."""

from collections.abc import Callable

from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from tests.text import kinds

CHATML = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
Answer in one sentence.<|im_end|>
{% endif -%}
{%- for turn in messages -%}
{{ '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
LLAMA2 = """\
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}
{%- for turn in (messages[1:] if first is not none else messages) -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns, and the user begins') }}
    {%- endif -%}
    {%- if turn['role'] == 'user' -%}
        {%- set head = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' if loop.first and first is not none else '' -%}
        {{ bos_token + '[INST] ' + head + turn['content'].strip() + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + turn['content'].strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA3 = """\
{{- bos_token }}
{%- for turn in messages %}
    {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\\n\\n' + turn['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for turn in messages %}
    {%- if turn.role == 'user' %}{{ '[INST] ' + turn.content + '[/INST]' }}
    {%- elif turn.role == 'assistant' %}{{ turn.content + eos_token }}
    {%- else %}{{ raise_exception('only user and assistant, not ' + turn.role) }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}
{%- for turn in messages %}
{%- set who = 'model' if turn['role'] == 'assistant' else turn['role'] %}
{{- '<start_of_turn>' + who + '\\n' + turn['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
PHI = """\
{% for turn in messages %}{{ '<|' + turn['role'] + '|>' + '\\n' + turn['content'] + '<|end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""
ZEPHYR = """\
{% for turn in messages %}
  {% if turn.role == 'user' %}
{{ '<|user|>\\n' + turn.content + eos_token }}
{% elif turn.role == 'assistant' %}
{{ '<|assistant|>\\n'  + turn.content + eos_token }}
{% else %}
{{ '<|system|>\\n' + turn.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
THINKING = """\
{%- set last = namespace(question=-1) %}
{%- for turn in messages %}
    {%- if turn.role == 'user' and not turn.content.startswith('<tool_response>') %}
        {%- set last.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set content = turn.content %}
    {%- if turn.role == 'assistant' and '</think>' in content and loop.index0 < last.question %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + turn.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TRAINED = """\
{%- for turn in messages -%}
{%- if turn.role == 'assistant' -%}
<|im_start|>assistant
{% generation %}{{ turn.content }}<|im_end|>{% endgeneration %}

{% else -%}
<|im_start|>{{ turn.role }}
{{ turn.content }}<|im_end|>
{% endif -%}
{%- if loop.index > 1000 %}{% break %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
DEEP = """\
{{- bos_token }}{%- set ns = namespace(system='') -%}
{%- for turn in messages if turn.role == 'system' -%}{%- set ns.system = ns.system ~ turn.content -%}{%- endfor -%}
{{- ns.system }}
{%- for turn in messages if turn.role != 'system' -%}
{%- if turn.role == 'user' -%}{{ '<｜User｜>' ~ turn.content }}{%- else -%}
{{ '<｜Assistant｜>' ~ turn.content ~ '<｜end▁of▁sentence｜>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}
"""
JSON = """\
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif -%}
{%- for turn in messages -%}
<|im_start|>{{ turn | tojson }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>{% endif -%}
"""
PLAIN = """\
{%- for turn in messages %}{{ '### ' ~ turn.role | title ~ ': ' ~ turn.content ~ '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '### Assistant:' }}{% endif -%}
"""

# The template, and the token with which it ends an answer.
TEMPLATES: dict[str, tuple[str, str | None]] = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama2": (LLAMA2, "</s>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "phi": (PHI, "<|end|>"),
    "zephyr": (ZEPHYR, "</s>"),
    "thinking": (THINKING, "<|im_end|>"),
    "trained": (TRAINED, "<|im_end|>"),
    "deep": (DEEP, "<｜end▁of▁sentence｜>"),
    "json": (JSON, None),
    "plain": (PLAIN, None),
}
SYSTEMLESS = ("mistral",)

SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
TAGS = ("<think>", "</think>", "<tool_response>", "[INST]", "[/INST]")  # not flagged special, as in many a checkpoint
SPACES = ("    ", "\n\n")  # added too, and text

_CHARACTERS = sorted(set("".join((*SPECIAL, *TAGS, "abcdefghijklmnopqrstuvwxyz", "0123456789.:,#'\"{}\n\t !?é猫🙂"))))


def _with_tokens(library: Library) -> Library:
    library.add_special_tokens(list(SPECIAL))
    library.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*TAGS, *SPACES)])
    return library


def byte_level() -> Library:
    """GPT-2, Llama 3, Qwen."""
    return _with_tokens(kinds.letters())


def byte_fallback() -> Library:
    """Llama 2: a space is put before every stretch of text; characters outside the vocabulary are bytes."""
    tokens = ["<unk>", *SPECIAL[:2], *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh<>|/", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    vocab = {token: at for at, token in enumerate(tokens)}
    library = Library(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = kinds.byte_fallback()
    library.add_special_tokens(["<unk>"])
    return _with_tokens(library)


def unstripped() -> Library:
    """Gemma: as Llama 2, but no space is put before."""
    library = byte_fallback()
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = kinds.unstripped()
    return library


def unigram() -> Library:
    """T5: the vocabulary lists the special tokens as entries too, which a text would be cut into."""
    characters = [(char, -3.0) for char in ("▁", *_CHARACTERS)]
    vocab = [("<unk>", 0.0), *((token, -0.1) for token in SPECIAL), *characters, ("▁a", -2.0)]
    library = Library(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = kinds.metaspace()
    library.add_special_tokens(["<unk>"])
    return _with_tokens(library)


def wordpiece() -> Library:
    """BERT: lower case, and a space between any two tokens."""
    letters = [char for char in _CHARACTERS if not char.isspace()]
    tokens = ["[UNK]", "[CLS]", *letters, *(f"##{char}" for char in letters), "end", "##end"]
    library = Library(models.WordPiece({token: at for at, token in enumerate(tokens)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = kinds.wordpiece()
    library.add_special_tokens(["[UNK]", "[CLS]"])
    return _with_tokens(library)


KINDS: dict[str, Callable[[], Library]] = {
    make.__name__: make for make in (byte_level, byte_fallback, unstripped, unigram, wordpiece)
}
