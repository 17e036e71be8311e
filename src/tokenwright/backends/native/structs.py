"""The structs and codes that Python shares with the compiled library, read from their declarations in `cpp/`.

`structs.CNorm` is C++'s `struct Norm`, with addresses for pointers.
"""

import re
from ctypes import Structure, c_double, c_int64, c_void_p, sizeof
from pathlib import Path
from struct import Struct
from typing import Any

from tokenwright.formats import TABLES

_HEADERS = ("api.h", "kernels.h", "step/expert_pool.h", "step/ranks.h", "step/step.h")
_COMMENT = re.compile(r"//[^\n]*")
_CONSTANT = re.compile(r"constexpr int64_t (\w+) = (\d+);")
_ENUM = re.compile(r"enum (\w+) : int64_t \{([^}]*)\}")
_OPS = re.compile(r"#define TW_OPS\(OP\)((?:.*\\\n)*.*)")
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_DECLARATION = re.compile(r"(?:const )?(\w+)\b(.*)", re.DOTALL)  # a type, and declared names
_FIELD = re.compile(r"(?:[*\s]|const\b)*(\w+)(?:\[(\w+)\])?")
_TYPES: dict[str, Any] = {"int64_t": c_int64, "OpKind": c_int64, "double": c_double}
_CODES = {c_int64: "q", c_double: "d", c_void_p: "P"}  # of `struct`


def _text() -> str:
    folder = Path(__file__).parent / "cpp"
    return _COMMENT.sub("", "\n".join((folder / name).read_text(encoding="utf-8") for name in _HEADERS))


def _structs(text: str) -> dict[str, Any]:
    sizes = {name: int(value) for name, value in _CONSTANT.findall(text)}
    found: dict[str, Any] = {}
    for name, body in _STRUCT.findall(text):
        fields = None if "(*" in body else _fields(body, found, sizes)
        if fields:
            found[name] = type(f"C{name}", (Structure,), {"_fields_": fields})
    return found


def _values(text: str) -> dict[str, dict[str, int]]:
    each = ((name, re.findall(r"(\w+) = (\d+)", body)) for name, body in _ENUM.findall(text))
    return {name: {one: int(value) for one, value in pairs} for name, pairs in each}


def _fields(body: str, known: dict[str, Any], sizes: dict[str, int]) -> list[tuple[str, Any]] | None:
    """The fields of a struct; None if one has a type that Python does not use."""
    found = []
    for statement in body.split(";"):
        match = _DECLARATION.fullmatch(statement.strip())
        if match is None or "(" in statement:  # a method
            continue
        plain = _TYPES.get(match[1], known.get(match[1]))
        for declared in match[2].split(","):
            field = _FIELD.fullmatch(declared.strip())
            kind = c_void_p if "*" in declared else plain
            if field is None or kind is None:
                return None
            found.append((field[1], kind * (sizes.get(field[2]) or int(field[2])) if field[2] else kind))
    return found


_HEADER_TEXT = _text()
STRUCTS, _VALUES = _structs(_HEADER_TEXT), _values(_HEADER_TEXT)
OPS: tuple[str, ...] = tuple(re.findall(r"OP\((\w+)\)", _OPS.findall(_HEADER_TEXT)[0]))  # by kind

_NAMES = ("float32", "bfloat16", "float16", "int8", "int4", "fp8", "int5", "int6", "int2", "int1")  # as in the header
FORMATS = dict(zip((*_NAMES, "table"), _VALUES["Format"].values(), strict=True))
FORMATS |= dict.fromkeys(TABLES, FORMATS["table"])
SCORES = {name.lower(): value for name, value in _VALUES["Scores"].items()}
ACTIVATIONS = {name.lower(): value for name, value in _VALUES["Activation"].items()} | {"xielu": -1}
EACH_HEAD, ALL_HEADS, OWN_WEIGHTS = _VALUES["HeadNorms"].values()
OWN_VALUES, KEYS_ALONE, OTHER_LAYER = _VALUES["Sources"].values()


def __getattr__(name: str) -> Any:
    """A C++ struct by its name, with a C before."""
    if name[:1] != "C" or name[1:] not in STRUCTS:
        raise AttributeError(f"no header of the kernels declares {name}")
    return STRUCTS[name[1:]]


def packer(struct: Any) -> Struct:
    """Packs the fields of a struct in order, several times faster than ctypes."""
    fields = "".join(_CODES[kind] for _, kind in struct._fields_)
    found = Struct(f"@{fields}0q")  # padded as by C++
    assert found.size == sizeof(struct), "pointers of both are this platform's"
    return found
