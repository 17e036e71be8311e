"""Short chat templates in the forms of well-known families, for tests; each prints tools, calls and results."""

from __future__ import annotations

from dataclasses import dataclass

_TOOLS = "{% if tools %}<|system|>You can call: {{ tools | tojson }}{% endif %}"
_LOOP = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content or '' }}CALLS<|end|>{% endfor %}"
_TAIL = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
_NAME, _ARGS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_JSON = f'{{"name": "{_NAME}", "arguments": {_ARGS}}}'
_PARAMETERS = f'{{"name": "{_NAME}", "parameters": {_ARGS}}}'
_EACH, _END = "{% for c in m.tool_calls %}", "{% endfor %}"
_COMMA = "{% if not loop.last %}, {% endif %}"
_LINE = "{% if not loop.last %}\n{% endif %}"
_ITEMS = "{% for k, v in c.function.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_PYTHON = (
    "{% macro py(v) %}{% if v is mapping %}{{ '{' }}{% for a, b in v.items() %}{{ a | tojson }}: {{ py(b) }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}{{ '}' }}{% elif v is string %}{{ v | tojson }}"
    "{% elif v is sequence %}[{% for a in v %}{{ py(a) }}{% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_CALLED = f"{_NAME}({_ITEMS}{{{{ k }}}}={{{{ py(v) }}}}{_COMMA}{_END})"
_QUOTED = (
    "{% macro quoted(v) %}{% if v is string %}{{ 'Q' + v + 'Q' }}{% elif v is boolean %}{{ v | lower }}"
    "{% elif v is mapping %}{{ '{' }}{% for a, b in v | dictsort %}{{ a }}:{{ quoted(b) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for a in v %}{{ quoted(a) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_BARE = (
    "{{ '{' }}{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ quoted(v) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
)


@dataclass(frozen=True, slots=True)
class Family:
    """calls: what the template prints for the calls of a message; form: the name of the form that is to be found.

    tools: how it declares them. before: macros. One that takes a single call has `single`.
    """

    name: str
    form: str
    calls: str
    tools: str = _TOOLS
    before: str = ""
    single: bool = False

    @property
    def template(self) -> str:
        calls = f"{{% if m.tool_calls %}}{self.calls}{{% endif %}}"
        return self.before + self.tools + _LOOP.replace("CALLS", calls) + _TAIL


def _listed(start: str, end: str, call: str = _JSON, gap: str = _COMMA) -> str:
    return f"{start}{_EACH}{call}{gap}{_END}{end}"


def _each(call: str, gap: str = _LINE) -> str:
    return f"{_EACH}{call}{gap}{_END}"


_DSML = "｜DSML｜"
_ONE = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
_GLM = f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n"
_GLM_TIGHT = f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{_VALUE}</arg_value>"
_INVOKED = f'<parameter name="{{{{ k }}}}">{_VALUE}</parameter>\n'
_TEXT_ARGS = "{{ '' + c.function.arguments }}"
_FENCED = f"{_NAME}\n```json\n{_TEXT_ARGS}\n```"
_NEXT = "{% if not loop.last %},\n{% endif %}"
_QWEN_CALL = (
    f"<tool_call>\n<function={_NAME}>\n{_ITEMS}<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{_END}"
    "</function>\n</tool_call>"
)
FAMILIES = (
    Family("Hermes 2 and 3, Qwen 2.5 and 3", "hermes", _each(f"<tool_call>\n{_JSON}\n</tool_call>")),
    Family("SmolLM3", "hermes", _each(f"<tool_call>{_JSON}</tool_call>")),
    Family("Granite 4", "hermes", _each(f"\n<tool_call>\n{_JSON}\n</tool_call>", "")),
    Family("Ernie 4.5 thinking", "hermes", _each(f"<tool_call>\n{_JSON}\n</tool_call>\n", "")),
    Family("Llama 3.1 to 3.3", "llama", _ONE + _EACH + _PARAMETERS + _END, single=True),
    Family("Llama 3.2 and 4, pythonic", "pythonic", _listed("[", "]", _CALLED), before=_PYTHON),
    Family("xLAM", "xlam", _listed("[", "]")),
    Family(
        "Mistral 7B v0.3, Nemo",
        "mistral",
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{% endfor %}"
        + _listed("[TOOL_CALLS][", "]", f'{_JSON[:-1]}, "id": "{{{{ c.id }}}}"}}'),
    ),
    Family(
        "Mistral Small 3.2, Devstral",
        "mistral-args",
        _each(f"[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGS}", ""),
    ),
    Family("Magistral 2509, Ministral 3", "mistral-args", _each(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGS}", "")),
    Family("Qwen3-Coder", "qwen-coder", _each(_QWEN_CALL)),
    Family("Nemotron 3 Nano", "qwen-coder", _each(f"{_QWEN_CALL}\n", "")),
    Family(
        "Seed-OSS",
        "seed",
        _each(
            f"<seed:tool_call>\n<function={_NAME}>\n{_ITEMS}<parameter={{{{ k }}}}>{_VALUE}</parameter>\n{_END}"
            "</function>\n</seed:tool_call>"
        ),
    ),
    Family(
        "GLM-4.5 and 4.6",
        "glm",
        _each(f"\n<tool_call>{_NAME}\n{_ITEMS}{_GLM}{_END}</tool_call>", ""),
    ),
    Family(
        "GLM-4.7",
        "glm",
        _each(f"<tool_call>{_NAME}{_ITEMS}{_GLM_TIGHT}{_END}</tool_call>", ""),
    ),
    Family(
        "MiniMax-M2",
        "minimax",
        "<minimax:tool_call>\n"
        + _each(f'<invoke name="{_NAME}">\n{_ITEMS}{_INVOKED}{_END}</invoke>\n', "")
        + "</minimax:tool_call>",
    ),
    Family("MiniMax-M1", "lines", "<tool_calls>\n" + _each(_JSON) + "\n</tool_calls>"),
    Family(
        "DeepSeek V3 and R1",
        "deepseek-fenced",
        "<｜tool▁calls▁begin｜>"
        + _each(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_FENCED}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>",
        tools="",
    ),
    Family(
        "DeepSeek V3.1",
        "deepseek",
        "<｜tool▁calls▁begin｜>"
        + _each(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_TEXT_ARGS}<｜tool▁call▁end｜>", "")
        + "<｜tool▁calls▁end｜>",
        tools="",
    ),
    Family(
        "DeepSeek V3.2",
        "deepseek-dsml",
        f"<{_DSML}function_calls>\n"
        + _each(
            f'<{_DSML}invoke name="{_NAME}">\n{_ITEMS}<{_DSML}parameter name="{{{{ k }}}}" '
            "string=\"{{ 'true' if v is string else 'false' }}\">"
            f"{_VALUE}</{_DSML}parameter>\n{_END}</{_DSML}invoke>\n",
            "",
        )
        + f"</{_DSML}function_calls>",
    ),
    Family(
        "Kimi-K2",
        "kimi",
        "<|tool_calls_section_begin|>"
        + _each(f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{_ARGS}<|tool_call_end|>", "")
        + "<|tool_calls_section_end|>",
    ),
    Family(
        "Command R7B and A",
        "command",
        _listed(
            "<|START_ACTION|>[\n",
            "\n]<|END_ACTION|>",
            f'    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{_NAME}", "parameters": {_ARGS}}}',
            _NEXT,
        ),
    ),
    Family(
        "Command R and R+",
        "command-fenced",
        _listed("Action:\n```json\n[\n", "\n]```", f'{{"tool_name": "{_NAME}", "parameters": {_ARGS}}}'),
    ),
    Family("Granite 3", "granite", _listed("<|tool_call|>[", "]")),
    Family("Phi-4-mini", "phi", _listed("<|tool_call|>[", "]<|/tool_call|>")),
    Family("Nemotron Nano 2, Super 49B", "nemotron", _listed("<TOOLCALL>[", "]</TOOLCALL>")),
    Family("Apriel", "listed", _listed("\n<tool_calls>[", "]</tool_calls>", f'{_JSON[:-1]}, "id": "{{{{ c.id }}}}"}}')),
    Family("Jamba, Hunyuan A13B", "listed", _listed("<tool_calls>[\n", "\n]</tool_calls>", _JSON, _NEXT)),
    Family(
        "Hunyuan 7B",
        "hunyuan",
        "<tool_calls>\n"
        + _each(f"<tool_call>function<tool_sep>{_NAME}\n```json\n{_ARGS}\n```\n</tool_call>")
        + "\n</tool_calls>",
    ),
    Family("LFM2", "lfm", _listed("<|tool_call_start|>[", "]<|tool_call_end|>", _CALLED), before=_PYTHON),
    Family("LFM2, JSON", "lfm-json", _listed("<|tool_call_start|>[", "]<|tool_call_end|>")),
    Family("Olmo 3", "olmo", "<function_calls>\n" + _each(_CALLED) + "\n</function_calls>", before=_PYTHON),
    Family("Functionary 3.1", "functionary", _each(f"<function={_NAME}>{_ARGS}</function>", "")),
    Family("Functionary 3.2", "functionary-to", _each(f">>>{_NAME}\n{_ARGS}", "")),
    Family("Firefunction", "functools", _listed("functools[", "]")),
    Family("InternLM 2.5", "intern", _each(f"<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", "")),
    Family(
        "Gemma 4",
        "gemma",
        _each(f"<|tool_call>call:{_NAME}{_BARE}<tool_call|>", ""),
        before=_QUOTED.replace("Q", '<|"|>'),
    ),
    Family(
        "FunctionGemma",
        "function-gemma",
        _each(f"<start_function_call>call:{_NAME}{_BARE}<end_function_call>", ""),
        before=_QUOTED.replace("Q", "<escape>"),
    ),
    Family("LongCat", "longcat", _each(f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>")),
)  # fmt: skip
PLAIN = Family("a template without tools", "hermes", "", tools="")
SAYS_ONLY = Family(  # Phi-4-mini's own prints no calls
    "a template that declares tools and prints no calls",
    "phi",
    "",
    tools=_TOOLS + " Answer with <|tool_call|>[calls]<|/tool_call|>.",
)

# Templates of other kinds: what they read, whole.
_TURN = "{% for m in messages %}<|{{ m.role }}|>CONTENT<|end|>{% endfor %}"
_CALL = "{% if m.tool_calls %}BEFORE{% for c in m.tool_calls %}CALL{% endfor %}{% else %}{{ m.content }}{% endif %}"
_TYPED = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
OTHERS = {
    "text or parts": _TURN.replace(
        "CONTENT", f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{_TYPED}{{% endif %}}"
    ),
    "parts": _TURN.replace("CONTENT", _TYPED),
    "languages": "{% set names = {'cs': 'Czech', 'en': 'English'} %}{% for m in messages %}"
    "{% if m.content is string or m.content | length != 1 %}{{ raise_exception('one item') }}{% endif %}"
    "{{ names[m.content[0].source_lang_code] }} to {{ names[m.content[0]['target_lang_code']] }}: "
    "{{ m.content[0].text }}<|end|>{% endfor %}",
    "a plan": _TURN.replace(
        "CONTENT", _CALL.replace("BEFORE", "{{ m.tool_plan }}").replace("CALL", f"<call>{_NAME}({_ARGS})</call>")
    ),
    "descriptions of parameters": "{% for t in tools %}{% for n, p in t.function.parameters.properties.items() %}"
    "{{ t.function.name + '(' + n + ': ' + p.description + ')' }}{% endfor %}{% endfor %}"
    + _TURN.replace("CONTENT", "{{ m.content }}"),
    "calls beside null": _TURN.replace(
        "CONTENT",
        "{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ '<call>' + c.function.name + '(' + c.function.arguments + ')</call>' }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}",
    ),
    "arguments as text": "{% for t in tools or [] %}{{ t.function.name }} -> {{ t.function.return.type }}{% endfor %}"
    + _TURN.replace(
        "CONTENT",
        _CALL.replace("BEFORE", "").replace(
            "CALL", "{{ '<c>' + c.function.name + ' with ' + c.function.arguments + '</c>' }}"
        ),
    ),
}
