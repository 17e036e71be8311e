"""The environment variables that Tokenwright reads, all here (huggingface_hub reads its own, HF_TOKEN among them)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tokenwright.errors import RequestError

ISAS = ("amx", "avx512", "avxvnni", "avx2", "dotprod", "wasm", "portable")  # of the native kernels, the fastest first


@dataclass(frozen=True, slots=True)
class Environment:
    debug: bool = False  # TOKENWRIGHT_DEBUG=1: show tracebacks on the command line
    cache: Path = Path("~/.cache/tokenwright")  # TOKENWRIGHT_CACHE, else tokenwright in XDG_CACHE_HOME or ~/.cache
    kernels: Literal["native", "reference"] | None = None  # TOKENWRIGHT_KERNELS; None: native if built
    isa: str | None = None  # TOKENWRIGHT_ISA, one of ISAS; None: the CPU's best
    settings: Path = Path("~/.config/tokenwright/settings.toml")  # TOKENWRIGHT_SETTINGS, else in XDG_CONFIG_HOME
    settings_named: bool = False  # whether TOKENWRIGHT_SETTINGS is set
    defaults: Mapping[str, str] = field(default_factory=dict)  # all TOKENWRIGHT_* variables, without the prefix
    threads: int = 0  # OMP_NUM_THREADS; 0: not set

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        value = variables.get("TOKENWRIGHT_DEBUG", "0")
        if value not in ("0", "1"):
            raise RequestError(f"TOKENWRIGHT_DEBUG must be 0 or 1, not {value!r}")
        caches = variables.get("XDG_CACHE_HOME") or "~/.cache"
        cache = variables.get("TOKENWRIGHT_CACHE") or f"{caches}/tokenwright"
        kernels, isa = variables.get("TOKENWRIGHT_KERNELS"), variables.get("TOKENWRIGHT_ISA")
        if kernels not in (None, "native", "reference"):
            raise RequestError(f"TOKENWRIGHT_KERNELS must be native or reference, not {kernels!r}")
        if isa not in (None, *ISAS):
            raise RequestError(f"TOKENWRIGHT_ISA must be {', '.join(ISAS[:-1])} or {ISAS[-1]}, not {isa!r}")
        named = variables.get("TOKENWRIGHT_SETTINGS")
        settings = named or f"{variables.get('XDG_CONFIG_HOME') or '~/.config'}/tokenwright/settings.toml"
        prefix = "TOKENWRIGHT_"
        defaults = {name.removeprefix(prefix): text for name, text in variables.items() if name.startswith(prefix)}
        return cls(
            value == "1",
            Path(cache),
            cast("Any", kernels),
            isa,
            Path(settings),
            bool(named),
            defaults,
            int(threads) if (threads := variables.get("OMP_NUM_THREADS", "")).isdecimal() else 0,
        )

    def cache_folder(self, name: str) -> Path:
        """Raises RequestError if the home directory is unknown."""
        folder = self.cache / name
        try:
            return folder.expanduser()
        except RuntimeError as error:
            raise RequestError(f"there is no home for {folder} ({error}); set TOKENWRIGHT_CACHE to a folder") from error
