"""The storage formats of K and V and of weight matrices, and how users name them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from tokenwright.checks import check_whole, shown
from tokenwright.errors import RequestError

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


# Our formats for other engines' names, by the first matching pattern.
_MEANT = (
    (r"bf16", "bfloat16"), (r"(f|fp)_?16$|half$", "float16"), (r"(f|fp)_?32$|float$", "float32"),
    (r"(f8|fp8|float8|e4m3)", "fp8"), (r"(q|i|w|int_?)?8", "int8"), (r"(iq|q|i|w|int_?|nf)?[2-6]", "int4"),
)  # fmt: skip
KV_NAMES = ("native", "float32", "bfloat16", "float16", "fp8", "int8", "int4")
_KV_USAGE = (
    "kv must be one format, or k=FORMAT,v=FORMAT, each once; after it there may be first=TOKENS (from the start of a "
    "text, which stay native) and native=LAYERS (which stay native, such as 0+1+-1)"
)


def _unknown(what: str, name: str, names: tuple[str, ...]) -> RequestError:
    meant = next((one for pattern, one in _MEANT if re.match(pattern, name.lower())), None)
    nearest = f" (nearest to yours: {meant})" if meant in names else ""
    return RequestError(f"{what} {name!r} is not known; use {', '.join(names)}{nearest}", what)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The storage format of K and V; native is the dtype that the model computes in. Raises RequestError.

    >>> KVFormat.parse("k=int8,v=int4,first=64,native=0+-1")
    KVFormat(k='int8', v='int4', first=64, native=(0, -1))
    """

    k: str = "native"
    v: str = "native"
    first: int = 0  # tokens from the start of a text that stay native
    native: tuple[int, ...] = ()  # layers that stay native; -1 is the last

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name not in KV_NAMES:
                raise _unknown("kv", name, KV_NAMES)
        check_whole("first of kv", self.first)
        if any(type(layer) is not int for layer in self.native) or len(set(self.native)) < len(self.native):
            raise RequestError(f"native of kv must be numbers of layers, each once, not {self.native!r}", "kv")

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse what `str` writes. Raises RequestError with the allowed forms."""
        if not isinstance(text, str):
            raise RequestError(f"{_KV_USAGE}; not {shown(text)}", "kv")
        found: dict[str, str] = {}
        for part in text.lower().split(","):
            key, given, value = (one.strip() for one in part.partition("="))
            for name, said in {key: value}.items() if given else {"k": key, "v": key}.items():
                if name not in ("k", "v", "first", "native") or name in found:
                    raise RequestError(f"{_KV_USAGE}; not {text!r}", "kv")
                found[name] = said
        try:
            first = int(found.pop("first", "0"))
            native = tuple(int(layer) for layer in found.pop("native").split("+")) if "native" in found else ()
        except ValueError:
            raise RequestError(f"{_KV_USAGE}; not {text!r}", "kv") from None
        return cls(first=first, native=native, **found)

    def __str__(self) -> str:
        parts = [self.k] if self.k == self.v else [f"k={self.k}", f"v={self.v}"]
        parts += [f"first={self.first}"] if self.first else []
        parts += [f"native={'+'.join(map(str, self.native))}"] if self.native else []
        return ",".join(parts)


WEIGHT_NAMES = ("native", "float32", "bfloat16", "float16", "int8", "int4")
_WEIGHTS_USAGE = "weights must be a format, such as int8, or one with its group, such as int8:32"
WEIGHT_GROUPS: Mapping[str, int] = {"int8": 64, "int4": 32}  # inputs per scale, by default
# The numbers that the 16 codes of such a format stand for: 4-bit floats doubled, and those of GGUF's types.
TABLES: Mapping[str, tuple[int, ...]] = {
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "iq3_xxs": (-2, -6, -10, -14, -18, -22, -26, -31, 2, 6, 10, 14, 18, 22, 26, 31),
    "iq3_s": (-1, -3, -5, -7, -9, -11, -13, -15, 1, 3, 5, 7, 9, 11, 13, 15),
    "iq2": (-8, -25, -43, 8, 25, 43, *[0] * 10), "iq1": (-1, -7, -9, 1, 7, 9, *[0] * 10),
}  # fmt: skip
# Packed formats that only files have: name, group, super-block, minima, factors.
FILE_FORMATS = {
    ("int5", 32, 0, False, False), ("int5", 32, 0, True, False), ("int5", 32, 256, True, False),
    ("int6", 16, 256, False, False), ("int6", 16, 256, True, False), ("int1", 64, 128, False, False),
    *(("int4", 32, size, True, False) for size in (64, 128, 256)),
    *(("int2", 64, size, False, False) for size in (64, 128, 256)),
    *(("int2", 64, size, False, True) for size in (64, 256)),
    ("fp4", 32, 0, False, False), ("fp4", 16, 0, False, True), ("iq4", 32, 0, False, False),
    *((name, 16, 256, False, False) for name in TABLES if name != "fp4"),
}  # fmt: skip


def _check_weight_name(name: str) -> None:
    if name not in WEIGHT_NAMES:
        raise _unknown("weights", name, WEIGHT_NAMES)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The storage format of weight matrices; native is the dtype that the model computes in. Raises RequestError.

    >>> WeightFormat.parse("int8").group, str(WeightFormat.parse("int4:64"))
    (64, 'int4:64')
    """

    name: str = "native"
    group: int = 0  # consecutive inputs of an output that share a scale; 0: no scales
    super: int = 0  # inputs whose groups' scales are whole multiples of one float16; 0: float16 scales
    minima: bool = False  # groups have a minimum besides their scale
    factors: bool = False  # each output has a factor in fp32

    def __post_init__(self) -> None:
        if (self.name, self.group, self.super, self.minima, self.factors) in FILE_FORMATS:
            return
        _check_weight_name(self.name)
        if self.super or self.minima or self.factors:
            raise RequestError(f"{self.name} weights have no super-blocks of {self.super} or minima in such groups")
        if self.name in WEIGHT_GROUPS and (type(self.group) is not int or self.group not in (32, 64)):
            raise RequestError(f"{self.name} weights share a scale in groups of 32 or 64, not of {self.group!r}")
        if self.name not in WEIGHT_GROUPS and self.group != 0:
            raise RequestError(f"{self.name} weights have no groups; leave out :{self.group}")

    @classmethod
    def parse(cls, text: object) -> Self:
        """Parse int8, int8:32 and the like. Raises RequestError, also for forms that only files have."""
        if not isinstance(text, str):
            raise RequestError(f"{_WEIGHTS_USAGE}; not {shown(text)}", "weights")
        name, given, group = (part.strip() for part in text.lower().partition(":"))
        _check_weight_name(name)
        if given and not (group.isascii() and group.isdigit()):
            raise RequestError(f"{_WEIGHTS_USAGE}; not {text!r}", "weights")
        return cls(name, int(group) if given else WEIGHT_GROUPS.get(name, 0))

    @property
    def quantised(self) -> bool:
        return self.group > 0

    def resolved(self, native: DType) -> "WeightFormat":
        return WeightFormat(native) if self.name == "native" else self

    def __str__(self) -> str:
        if self.super or self.minima or self.factors:
            more = ("+min" if self.minima else "") + ("+factor" if self.factors else "")
            return f"{self.name}:{self.group}{f'/{self.super}' if self.super else ''}{more}"
        return self.name if self.group == WEIGHT_GROUPS.get(self.name, 0) else f"{self.name}:{self.group}"
