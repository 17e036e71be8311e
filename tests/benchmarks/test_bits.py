"""The recording of bits: which requests there are, that a session can be repeated, and that a difference is found."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import bits
import bits_models
import bits_requests
import pytest

SESSIONS = bits_requests.sessions()


def recording(**requests: Any) -> bits.Recording:
    return {"models": {}, "environments": {"avx2": {"requests": requests, "happened": {}}}}


def test_200_requests_in_every_way() -> None:
    calls = [call for session in SESSIONS for call in session.calls]
    names = [name for call in calls for name in call.names]
    assert len(names) == len(set(names)) == 200
    assert {len(call.names) for call in calls} == {1, 2, 8, 17}
    assert {call.how for call in calls} == {"generate", "stream", "astream", "score"}
    assert {call.cache for call in calls} == {True, False}
    assert all(call.how == "generate" or len(call.names) == 1 for call in calls)


@pytest.mark.parametrize("environment", range(len(bits.ENVIRONMENTS)))
def test_an_environment_meets_every_format(environment: int) -> None:
    settings = range(bits.TURNS * environment, bits.TURNS * (environment + 1))
    opened = [session.opened(setting) for setting in settings for session in SESSIONS]
    pairs = {((one["weights"], one["dtype"]), one["kv"]) for one in opened}
    assert len(pairs) == 40
    assert {weights for weights, _ in pairs} == set(bits_requests.WEIGHTS)
    assert {kv for _, kv in pairs} == set(bits_requests.CODECS)


def test_the_random_models_are_always_the_same(tmp_path: Path) -> None:
    assert bits_models.write(tmp_path / "one") == bits_models.write(tmp_path / "other")


def test_a_session_repeats_itself_and_another_format_does_not(tmp_path: Path) -> None:
    bits_models.write(tmp_path)
    session = next(
        one for one in SESSIONS if one.model == "gpt2" and one.options["pages"] == bits_requests.SMALL["pages"]
    )
    happened: Counter[str] = Counter()
    first, again, other = (dict(bits.run_session(session, setting, tmp_path, happened)) for setting in (0, 0, 1))
    assert happened["preemptions"] > 0
    assert json.dumps(first) == json.dumps(again)
    assert len(first) == sum(len(call.names) for call in session.calls)
    assert not set(map(json.dumps, first.values())) & set(map(json.dumps, other.values()))


def test_one_bit_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = ({"text": "a", "logprobs": bits.exact([-1.0, logprob])} for logprob in (-0.1, -0.1 + 2**-56))
    assert old["logprobs"] != new["logprobs"]
    assert bits.compare(recording(one=old), recording(one=old))
    assert not bits.compare(recording(one=old), recording(one=new))
    assert "one: logprobs[1]: '-0x1.9" in capsys.readouterr().out
    assert not bits.compare(recording(one=old), recording(other=old))
    assert "one: only in the old recording" in capsys.readouterr().out
    assert not bits.compare(recording(), recording())
    assert not bits.compare(recording(one=old), {"models": {"gpt2": "changed"}, "environments": {}})


def test_recordings_are_compared_by_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, text in zip(files, "ab", strict=True):
        made = recording(**{"03.001 x": {"text": "a"}, "04.001 x": {"text": text}})
        file.write_text(json.dumps(made), encoding="utf-8")
    for sessions, code in (("3", 0), ("4", 1)):
        monkeypatch.setattr(sys, "argv", ["bits", "compare", str(files[0]), "--with", str(files[1]),
                                          "--sessions", sessions])  # fmt: skip
        assert bits.main() == code
