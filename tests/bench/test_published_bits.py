"""The bits of the logits on every instruction set of this processor, and `tokenwright verify`.

`python -m tests.bench.test_published_bits` prints the hashes.
"""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.backends.native import KERNELS, each_isa, needs_native
from tokenwright.backends.native.native_kernels import arithmetic, find_kernels
from tokenwright.bench import published_bits as bits
from tokenwright.cli import app


@pytest.fixture(autouse=True)
def _own_kernels() -> Iterator[None]:
    find_kernels.cache_clear()  # they are found once in a process
    yield
    find_kernels.cache_clear()


@each_isa
@pytest.mark.parametrize("form", bits.FORMATS)
def test_the_logits_have_the_published_bits(form: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_ISA", isa)
    assert bits.logits_hash(form) == bits.published()[arithmetic(isa)][form]


@needs_native
def test_verify_says_whether_the_bits_are_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = bits.verified_kernels()
    known, says = bits.published()[arithmetic(isa)], f"({isa} kernels, {arithmetic(isa)} arithmetic)\n"
    monkeypatch.setattr(bits, "logits_hash", known.__getitem__)
    assert CliRunner().invoke(app, ["verify"]).stdout.endswith(f"this machine computes the published bits {says}")
    monkeypatch.setattr(bits, "logits_hash", lambda form: "0" * 64 if form == "int8" else known[form])
    ended = CliRunner().invoke(app, ["verify", "--json"])
    told = json.loads(ended.stdout)
    assert (ended.exit_code, told["same"], told["formats"]["int8"]["sha256"]) == (1, False, "0" * 64)


def test_without_native_kernels_there_is_nothing_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWRIGHT_KERNELS", "reference")
    ended = CliRunner().invoke(app, ["verify"])
    assert ended.exit_code == 2
    assert "needs the native kernels" in ended.stderr


if __name__ == "__main__":
    patch, hashes = pytest.MonkeyPatch(), bits.published()
    for isa in KERNELS:
        patch.setenv("TOKENWRIGHT_ISA", isa)
        find_kernels.cache_clear()
        hashes[arithmetic(isa)] = {form: bits.logits_hash(form) for form in bits.FORMATS}
    print(json.dumps(hashes, indent=2))
