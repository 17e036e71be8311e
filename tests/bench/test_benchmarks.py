"""The benchmarks' own arithmetic: a kernel's case, intervals, ratios of engines, and the first token of a stream."""

import asyncio
import socket
from math import comb
from threading import Thread

import numpy as np
import pytest
import torch

from benchmarks.kernels import kernels, pairs
from benchmarks.peers import peers
from benchmarks.peers.peers import Turn
from benchmarks.serving.http_client import ask
from tests.backends.native import needs_native
from tokenwright.backends.native.native_kernels import NativeKernels, find_kernels
from tokenwright.backends.torch.kernels import Dense
from tokenwright.backends.torch.reference_kernels import ReferenceKernels
from tokenwright.bench.limits import Bound, Least, StepWork
from tokenwright.formats import WeightFormat

REFERENCE = ReferenceKernels(wide=torch.float64)
PIECES = (b": ping\r\n\r\n", b'data: {"a": 1}\n\n', b"data: [DONE]\n\n")


@pytest.fixture
def native() -> NativeKernels:
    found = find_kernels()
    assert found is not None
    return found


@needs_native
@pytest.mark.parametrize("form", kernels.WEIGHTS, ids=str)
def test_a_linear_case_is_a_linear_layer(native: NativeKernels, form: WeightFormat) -> None:
    packed = kernels.filled(64, 256, form)
    case = kernels.linear_case(native, packed, str(form), 3)
    case.run()
    _, x, y = case.keeps
    assert isinstance(x, np.ndarray)
    assert isinstance(y, np.ndarray)
    wide = torch.from_numpy(packed.unpack()).double()
    right = REFERENCE.linear(torch.from_numpy(x).double(), Dense(wide, None))
    assert (torch.from_numpy(y) - right).norm() < 0.02 * right.norm()  # some formats round their rows
    assert case.work == StepWork(packed.nbytes, weights=3 * 64 * 256)


@needs_native
@pytest.mark.parametrize("form", kernels.CACHES)
def test_attention_reads_every_text_once(native: NativeKernels, form: str) -> None:
    texts = kernels.Texts(native, form, 100 * kernels.PAGE * 1024)
    one, chunk = texts.case(64, 1, 1000), texts.case(64, 16, 1)
    assert one.calls == texts.pages * kernels.PAGE // 64
    assert one.work == StepWork(one.calls * 64 * texts.bytes_per_token)
    assert chunk.work.nbytes == 64 * texts.bytes_per_token
    assert chunk.work.attention == 2 * 14 * 64 * sum(range(49, 65))
    for case in (one, chunk):
        case.run()
        _, _, out = case.keeps
        assert isinstance(out, np.ndarray)
        assert np.isfinite(out).all() and abs(out).max() > 0


@needs_native
def test_a_share_is_of_the_limit_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "best_seconds", lambda run, seconds: 2.0)
    monkeypatch.setattr(Bound, "__call__", lambda self, work: Least(0.5, 1.0))
    found = kernels.measure(kernels.Case("linear", "int8", 4, StepWork(8e9, 4e9), int, 2), Bound(64), 3)
    assert (found.share, found.of_reading, found.bound) == (0.5, 0.25, "matrix")
    assert (found.microseconds, found.gb_per_second, found.g_multiplications_per_second) == (1e6, 4.0, 2.0)


def test_the_interval_contains_the_true_median() -> None:
    for n, cut in ((6, 0), (9, 1), (30, 9)):
        middle, low, high = pairs.interval([float(n - at) for at in range(n)])
        assert (low, middle, high) == (1.0 + cut, (n + 1) / 2, float(n - cut))
        assert 2 * sum(comb(n, at) for at in range(cut + 1)) / 2**n <= 0.05
        assert 2 * sum(comb(n, at) for at in range(cut + 2)) / 2**n > 0.05
    assert pairs.interval([2.0, 1.0]) == (1.5, 1.0, 2.0)


def test_the_report_of_pairs() -> None:
    both = {"old": [100.0, 100.0], "new": [98.0, 102.0]}
    text = pairs.report({"step-stream": both, "256-generate": both, "256-astream": both})
    assert "1.000 (0.980 to 1.020)" in text
    assert "old, step-stream: 10000.0 us a step" in text
    assert "new, 256 in astream / in generate: 1.000" in text
    threads = {"old 1": [600.0, 600.0], "old 2": [60.0, 90.0], "new 1": [600.0, 600.0], "new 2": [660.0, 540.0]}
    text = pairs.busy_report({"stories-1": threads})
    assert "old: one 600.0, two 75.0 tok/s, 0.125 (0.100 to 0.150)" in text
    assert "new: one 600.0, two 600.0 tok/s, 0.950 (0.900 to 1.000)" in text
    assert "new / old with 2: 8.500" in text


def turn(contender: str, round_: int, decode: float, first: float, ids: list[int]) -> Turn:
    figures = {"prefill": 1.0, "decode": decode, "8": 1.0, "16": 1.0, "first": first}
    return Turn("tiny", contender, round_, figures, load_s=1.0, peak_mb=1.0, first_ids=ids)


def test_a_ratio_compares_turns_of_one_round_with_the_best_peer() -> None:
    turns = [
        *(turn("ours int8", at, decode, 5.0, []) for at, decode in enumerate((20.0, 30.0, 44.0))),
        *(turn("openvino int8", at, 10.0, 10.0, []) for at in range(3)),
        *(turn("llama.cpp q8_0", at, 1.0, 20.0, []) for at in range(3)),
        *(turn("llama.cpp q4_0", at, 20.0, 2.5, []) for at in range(3)),
    ]
    found = {(one.measure, one.peer): one for one in peers.ratios("tiny", turns)}
    equal, any_ = found["decode", "openvino int8"], found["decode", "llama.cpp q4_0"]
    assert (equal.middle, equal.low, equal.high) == pytest.approx((3.0, 2.0, 4.4))
    assert any_.middle == pytest.approx(1.5)
    assert found["first", "openvino int8"].middle == pytest.approx(2.0)  # half the time is twice as fast
    assert found["first", "llama.cpp q4_0"].middle == pytest.approx(0.5)


def test_the_table_counts_equal_first_tokens() -> None:
    turns = [turn("ours bf16", 0, 1.0, 1.0, [5, 6, 7]), turn("transformers bf16", 0, 1.0, 1.0, [5, 6, 8])]
    rows = {row.split()[0]: row.split()[-1] for row in peers.table("tiny", turns).splitlines()}
    assert rows["ours"] == "2/3"
    assert rows["transformers"] == "3/3"


def answer(listener: socket.socket) -> None:
    with listener.accept()[0] as connection:
        connection.recv(65_536)
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in PIECES)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        connection.recv(1)  # the client is done


def test_a_ping_is_not_the_first_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Thread(target=answer, args=(listener,), daemon=True)
        server.start()
        reply = asyncio.run(ask(listener.getsockname(), "/"))
        server.join()
    assert len(reply.times) == 2
    assert reply.events() == [{"a": 1}]
