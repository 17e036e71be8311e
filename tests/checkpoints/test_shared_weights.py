"""Weights in a file in memory: the first process writes them, others map them, and a killed writer leaves no half."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.models.fixtures import make_checkpoint
from tokenwright import LLM
from tokenwright.arrays import address, place_of
from tokenwright.checkpoints.folder import Checkpoint
from tokenwright.checkpoints.packed_file import named_tensors
from tokenwright.checkpoints.packing.packer import load_packed
from tokenwright.checkpoints.packing.shared_weights import is_shared, load_shared, new_shared_file
from tokenwright.formats import WeightFormat
from tokenwright.llm.model import LoadedModel, PreparedModel


@pytest.fixture
def shared():
    descriptor = new_shared_file()
    yield descriptor
    os.close(descriptor)


def never():
    raise AssertionError("they are there")


@pytest.mark.parametrize("form", ["native", "float32", "int8", "int4"])
def test_mapped_weights_are_the_written_ones(tmp_path, shared, form):
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "qwen2").path)
    own = load_packed(checkpoint, WeightFormat.parse(form), "bfloat16")
    assert not is_shared(shared)
    first, second = load_shared(shared, lambda: own), load_shared(shared, never)
    assert is_shared(shared)
    assert list(own) == list(first) == list(second)
    expected = dict(named_tensors(own))
    for found in (first, second):
        tensors = dict(named_tensors(found))
        assert tensors.keys() == expected.keys()
        for name, one in tensors.items():
            assert np.array_equal(one, expected[name]) and one.dtype == expected[name].dtype
            assert address(one) is None or place_of(one) % 64 == 0
        assert all(found[name].form == own[name].form for name in own if not isinstance(own[name], np.ndarray))


def test_models_over_one_file_write_the_same(shared):
    with LLM("stories", kv_memory="16MB") as llm:
        expected = llm.generate("Once upon a time", max_tokens=20, temperature=0)[0]
    for _ in range(2):
        with LLM(LoadedModel("stories", shared=shared), kv_memory="16MB") as llm:
            found = llm.generate("Once upon a time", max_tokens=20, temperature=0)[0]
        assert (found.text, found.logprobs) == (expected.text, expected.logprobs)


def test_a_mapped_weight_cannot_be_written(shared):
    """In a process of its own, which the system ends."""
    load_shared(shared, lambda: {"w": np.ones(4, np.float32)})
    code = f"""
import ctypes
from tokenwright.arrays import place_of
from tokenwright.checkpoints.packing.shared_weights import load_shared
weights = load_shared({shared}, lambda: None)
assert weights["w"].tolist() == [1.0] * 4
print("read", flush=True)
ctypes.memset(place_of(weights["w"]), 0, 4)
"""
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=[shared], capture_output=True, text=True)
    assert ended.stdout == "read\n" and ended.returncode == -11, ended.stderr


def test_another_process_writes_what_a_killed_one_had_begun(shared):
    code = f"""
import os, signal
from tokenwright.checkpoints.packing.shared_weights import load_shared
def load():
    os.ftruncate({shared}, 5000)
    os.pwrite({shared}, b"half", 100)
    os.kill(os.getpid(), signal.SIGKILL)
load_shared({shared}, load)
"""
    ended = subprocess.run([sys.executable, "-c", code], pass_fds=[shared], capture_output=True)
    assert ended.returncode == -9
    assert load_shared(shared, lambda: {"w": np.arange(3, dtype=np.float32)})["w"].tolist() == [0, 1, 2]


def test_a_model_without_weights_prepares_requests_only():
    loaded = PreparedModel("stories")
    assert loaded.facts.tokenizer.encode("Once") and not hasattr(loaded, "decoder")
