"""An engine's page tier on a disk (`cache/disk_pages.py`): how it is opened, and how it learns the model's speed."""

import json
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenwright.backends.native.library import find
from tokenwright.cache import KVStore
from tokenwright.cache.disk_pages import DiskPages
from tokenwright.config import EngineConfig
from tokenwright.engine import Output, Runner, Step
from tokenwright.engine.loop import EndStep


def open_disk(folder: str, options: EngineConfig, store: KVStore, about: Mapping[str, str]) -> DiskPages:
    """The tier of an engine. about: everything that its pages depend on but the program and the tokens.

    Raises RequestError for a folder or a size that cannot be used.
    """
    like = [store.read(group, [0]) for group in range(len(store.groups))]
    model = sha256(json.dumps(dict(about) | _program(about["kernels"]), sort_keys=True).encode()).digest()
    return DiskPages(Path(folder).expanduser(), options.kv_disk_size, model, like, options.page_size)


def _program(kernels: str) -> dict[str, str]:
    """What computes K and V: another build may round otherwise, so it does not read the pages of this one."""
    if kernels == "reference":
        return {"torch": version("torch")}
    library = find()
    assert library is not None, "native kernels come from a library"
    return {"library": sha256(library.read_bytes()).hexdigest()}


class StepTimes:
    """A runner that notes the tokens of each step, and reports them to a tier with the seconds that the step took.

    end_step: called with a step's times as well, if it is given.
    """

    def __init__(self, runner: Runner[Any], disk: DiskPages, end_step: EndStep | None) -> None:
        self._runner = runner
        self._disk = disk
        self._next = end_step
        self._tokens = 0

    def forward(self, step: Step) -> Output[Any]:
        self._tokens = step.size
        return self._runner.forward(step)

    def end_step(self, began: float, ended: float) -> None:
        self._disk.computed(self._tokens, ended - began)
        self._tokens = 0
        if self._next is not None:
            self._next(began, ended)
