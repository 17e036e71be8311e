"""The comparison with other engines: what its figures mean, and that what is missing is told."""

import sys
from pathlib import Path

import peers
import peers_setup
import pytest
from peers import Contender, EngineError, Turn
from peers_setup import Peer, State

from tokenwright.bench import measures, shapes
from tokenwright.bench.measures import Measure

ONE_TURN = {
    "prefill": Measure(1, 24, 1),
    "decode": Measure(1, 24, 5),
    "8": Measure(3, 8, 4),
    "first": Measure(1, 8, 1, "ms"),
}


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


def test_the_table_tells_how_many_first_tokens_agree() -> None:
    turns = [turn("ours bf16", 0, 1.0, 1.0, [5, 6, 7]), turn("transformers bf16", 0, 1.0, 1.0, [5, 6, 8])]
    rows = {row.split()[0]: row.split()[-1] for row in peers.table("tiny", turns).splitlines()}
    assert rows["ours"] == "2/3"
    assert rows["transformers"] == "3/3"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a checkpoint `tiny` that is smaller still."""
    small = {**shapes.SHAPES["tiny"], "hidden_size": 96, "num_hidden_layers": 2, "intermediate_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", small)  # type: ignore[arg-type]
    shapes.ready("tiny", tmp_path)
    return tmp_path


def test_our_adapter_takes_a_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MEASURES", ONE_TURN)
    monkeypatch.setattr(measures, "ENOUGH_S", 0.0)
    taken = peers.take_turn(Contender("ours", "bf16", 16), "tiny", 0, root, 1, root / "log")
    assert taken.figures.keys() == ONE_TURN.keys()
    assert all(figure > 0 for figure in taken.figures.values())
    assert len(taken.first_ids) == sum(measure.streams for measure in ONE_TURN.values())
    assert taken.peak_mb > 50  # torch alone is more


def test_an_engine_that_fails_tells_why(root: Path) -> None:
    (root / "tiny" / "config.json").unlink()
    with pytest.raises(EngineError, match=r"config\.json"):
        peers.take_turn(Contender("ours", "bf16", 16), "tiny", 0, root, 1, root / "log")


def test_what_cannot_be_set_up_is_kept_with_the_reason(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(bin_: Path, model: Path, form: str, target: Path) -> tuple[str, ...]:
        return (sys.executable, "-c", f"print('no {form} for {model.name}'); raise SystemExit(3)")

    peer = Peer((), {"int4": 4}, refuse)
    monkeypatch.setattr(peers_setup, "PEERS", {"other": peer})
    state = State.read(root, "other")
    assert "run benchmarks/peers_setup.py other" in str(state.why_not("tiny", "int4"))
    state.folder.mkdir(parents=True)
    (state.folder / peers_setup.VERSIONS).touch()
    peers_setup.convert(state, peer, "tiny", root)
    assert "no int4 for tiny" in str(State.read(root, "other").why_not("tiny", "int4"))
    turns, missing = peers.measure_all([Contender("other", "int4", 4)], ["tiny"], 1, root, 1, root)
    assert not turns
    assert "no int4 for tiny" in missing["tiny: other int4"]


def test_what_is_converted_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(bin_: Path, model: Path, form: str, target: Path) -> tuple[str, ...]:
        calls.append(form)
        return ("touch", str(target))

    calls: list[str] = []
    peer = Peer((), {"int4": 4, "int8": 8}, touch)
    monkeypatch.setattr(peers_setup, "PEERS", {"other": peer})
    state = State.read(root, "other")
    state.folder.mkdir(parents=True)
    (state.folder / peers_setup.VERSIONS).touch()
    for _ in range(2):
        peers_setup.convert(state, peer, "tiny", root)
    assert calls == ["int4", "int8"]
    assert state.why_not("tiny", "int8") is None
    assert state.model("tiny", "int8").name == "tiny-int8"


def test_avx2_alone_is_compared_with_avx2_alone() -> None:
    names = ("ours int8", "ours-avx2 int8", "llama.cpp q8_0", "llama.cpp-avx2 q8_0")
    turns = [turn(name, 0, decode, 5.0, []) for name, decode in zip(names, (80.0, 60.0, 50.0, 20.0), strict=True)]
    found = [one for one in peers.ratios("tiny", turns) if one.measure == "decode"]
    pairs = {(one.ours, one.peer, one.middle) for one in found}
    assert pairs == {("ours int8", "llama.cpp q8_0", 1.6), ("ours-avx2 int8", "llama.cpp-avx2 q8_0", 3.0)}


def test_our_kernels_are_limited_to_avx2_by_the_environment(tmp_path: Path) -> None:
    one = Contender("ours-avx2", "int8", 8)
    assert one.environment == {"TOKENWRIGHT_ISA": "avx2"}
    assert one.command(tmp_path)[1].endswith("run_ours.py")
    assert one.model("tiny", tmp_path) == tmp_path / "tiny"
    other = Contender("llama.cpp-avx2", "q8_0", 8)
    assert other.environment == Contender("ours", "int8", 8).environment == {}
    assert other.command(tmp_path)[0].startswith(str(tmp_path / "peers" / "llama.cpp-avx2"))
    assert other.command(tmp_path)[1].endswith("run_llama_cpp.py")
