"""The forms of the families of models, as data. If several fit a template equally well, the first is taken."""

from typing import Any

from tokenwright.llm.chat.tool_forms.form import ToolForm
from tokenwright.llm.chat.tool_forms.json_calls import JsonCall, NamedCall
from tokenwright.llm.chat.tool_forms.python_calls import PythonCall
from tokenwright.llm.chat.tool_forms.tagged_calls import TaggedCall

_LIST: dict[str, Any] = {"lead": "[", "sep": ", ", "trail": "]", "many": True}

HERMES = ToolForm("hermes", "<tool_call>\n", JsonCall(), "\n</tool_call>")  # Qwen, SmolLM3, Granite 4, Ernie and others
LLAMA = ToolForm("llama", "", JsonCall(arguments="parameters"), tag="<|python_tag|>", sep="; ")
LLAMA_ARGUMENTS = ToolForm("llama-arguments", "", JsonCall(), tag="<|python_tag|>", sep="; ")
PYTHONIC = ToolForm("pythonic", "", PythonCall(), close="<|python_end|>", tag="<|python_start|>", **_LIST)
XLAM = ToolForm("xlam", "", JsonCall(), **_LIST)
MISTRAL = ToolForm("mistral", "[TOOL_CALLS]", JsonCall(), id_length=9, **_LIST)
MISTRAL_ARGS = ToolForm("mistral-args", "[TOOL_CALLS]", NamedCall("[ARGS]", aside="[CALL_ID]"), id_length=9)
QWEN_CODER = ToolForm(
    "qwen-coder",
    "<tool_call>\n",
    TaggedCall("<parameter=", ">", "</parameter>", "<function=", ">", "</function>", pad="\n"),
    "\n</tool_call>",
)
SEED = ToolForm(
    "seed",
    "<seed:tool_call>\n",
    TaggedCall("<parameter=", ">", "</parameter>", "<function=", ">", "</function>"),
    "\n</seed:tool_call>",
)
GLM = ToolForm(
    "glm",
    "<tool_call>",
    TaggedCall("<arg_key>", "</arg_key>", "</arg_value>", value_open="<arg_value>"),
    "\n</tool_call>",
)
MINIMAX = ToolForm(
    "minimax",
    "<minimax:tool_call>\n",
    TaggedCall('<parameter name="', '">', "</parameter>", '<invoke name="', '">', "</invoke>"),
    "\n</minimax:tool_call>",
    sep="\n",
    many=True,
)
_D = "｜DSML｜"
DEEPSEEK_DSML = ToolForm(
    "deepseek-dsml",
    f"<{_D}function_calls>\n",
    TaggedCall(
        f'<{_D}parameter name="',
        '"',
        f"</{_D}parameter>",
        f'<{_D}invoke name="',
        '">',
        f"</{_D}invoke>",
        text_open=' string="true">',
        json_open=' string="false">',
    ),
    f"\n</{_D}function_calls>",
    sep="\n",
    many=True,
)
DEEPSEEK_FENCED = ToolForm(  # V3 and R1
    "deepseek-fenced",
    "<｜tool▁calls▁begin｜>",
    NamedCall("\n```json\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
    sep="\n",
    many=True,
)
DEEPSEEK = ToolForm(  # V3.1
    "deepseek",
    "<｜tool▁calls▁begin｜>",
    NamedCall("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
    many=True,
)
KIMI = ToolForm(
    "kimi",
    "<|tool_calls_section_begin|>",
    NamedCall(
        "<|tool_call_argument_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", prefix="functions.", counted=True
    ),
    "<|tool_calls_section_end|>",
    many=True,
)
COMMAND = ToolForm(  # R7B and A
    "command",
    "<|START_ACTION|>",
    JsonCall("tool_name", "parameters", '"tool_call_id": "{index}", '),
    "<|END_ACTION|>",
    lead="[\n",
    sep=",\n",
    trail="\n]",
    many=True,
)
COMMAND_FENCED = ToolForm(  # Command R and R+
    "command-fenced", "Action:\n```json\n", JsonCall("tool_name", "parameters"), "\n```", **_LIST
)
PHI = ToolForm("phi", "<|tool_call|>", JsonCall(), "<|/tool_call|>", **_LIST)
GRANITE = ToolForm("granite", "<|tool_call|>", JsonCall(), **_LIST)
NEMOTRON = ToolForm("nemotron", "<TOOLCALL>", JsonCall(), "</TOOLCALL>", **_LIST)
LISTED = ToolForm("listed", "<tool_calls>", JsonCall(), "</tool_calls>", **_LIST)  # Apriel, Hunyuan A13B, Jamba
LINES = ToolForm("lines", "<tool_calls>\n", JsonCall(), "\n</tool_calls>", sep="\n", many=True)  # MiniMax M1
HUNYUAN = ToolForm(
    "hunyuan",
    "<tool_calls>\n",
    NamedCall("\n```json\n", "<tool_call>function<tool_sep>", "\n```\n</tool_call>"),
    "\n</tool_calls>",
    sep="\n",
    many=True,
)
LFM = ToolForm("lfm", "<|tool_call_start|>", PythonCall(), "<|tool_call_end|>", **_LIST)
LFM_JSON = ToolForm("lfm-json", "<|tool_call_start|>", JsonCall(), "<|tool_call_end|>", **_LIST)
OLMO = ToolForm("olmo", "<function_calls>\n", PythonCall(), "\n</function_calls>", sep="\n", many=True)
FUNCTIONARY = ToolForm("functionary", "<function=", NamedCall(">"), "</function>")
FUNCTIONARY_TO = ToolForm("functionary-to", ">>>", NamedCall("\n"), spoken="all")
FUNCTOOLS = ToolForm("functools", "functools", JsonCall(), **_LIST)  # Firefunction
INTERN = ToolForm("intern", "<|action_start|><|plugin|>\n", JsonCall(arguments="parameters"), "<|action_end|>")
LONGCAT = ToolForm("longcat", "<longcat_tool_call>\n", JsonCall(), "\n</longcat_tool_call>")
TAGGED_NAME = ToolForm(  # HY 3
    "tagged-name", "<tool_call>", NamedCall("<tool_sep>", after=""), "</tool_call>"
)
GEMMA = ToolForm("gemma", "<|tool_call>", PythonCall("call:", "{", ":", "}", '<|"|>', ","), "<tool_call|>")  # 4
FUNCTION_GEMMA = ToolForm(
    "function-gemma",
    "<start_function_call>",
    PythonCall("call:", "{", ":", "}", "<escape>", ","),
    "<end_function_call>",
)

FORMS = (
    HERMES, QWEN_CODER, GLM, MISTRAL, MISTRAL_ARGS, DEEPSEEK_FENCED, DEEPSEEK, DEEPSEEK_DSML, KIMI, MINIMAX, SEED,
    COMMAND, COMMAND_FENCED, PHI, GRANITE, NEMOTRON, LISTED, LINES, HUNYUAN, LFM, LFM_JSON, OLMO, FUNCTIONARY,
    FUNCTIONARY_TO, FUNCTOOLS, INTERN, LONGCAT, TAGGED_NAME, GEMMA, FUNCTION_GEMMA, LLAMA,
    LLAMA_ARGUMENTS, PYTHONIC, XLAM,
)  # fmt: skip
