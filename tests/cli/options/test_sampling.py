"""The options of SamplingParams on the command line: each reaches its field, and what they bring is shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tokenwright.cli.commands.generate import picture
from tokenwright.cli.options.sampling import COMMON, MORE, chosen_from
from tokenwright.engine import FinishReason, Grammar, SamplingParams
from tokenwright.llm.input_processor import InputProcessor
from tokenwright.llm.outputs import TreeToken

GIVEN: dict[str, tuple[tuple[object, ...], object]] = {
    "temperature": (("--temperature", 0.5), 0.5),
    "top_k": (("--top-k", 9), 9),
    "top_p": (("--top-p", 0.9), 0.9),
    "min_p": (("--min-p", 0.1), 0.1),
    "typical_p": (("--typical-p", 0.8), 0.8),
    "top_n_sigma": (("--top-n-sigma", 1.5), 1.5),
    "xtc_probability": (("--xtc-probability", 0.5), 0.5),
    "xtc_threshold": (("--xtc-threshold", 0.2), 0.2),
    "mirostat": (("--mirostat", 2), 2),
    "mirostat_tau": (("--mirostat-tau", 3.0), 3.0),
    "mirostat_eta": (("--mirostat-eta", 0.2), 0.2),
    "seed": (("--seed", 7), 7),
    "repetition_penalty": (("--repetition-penalty", 1.2), 1.2),
    "repetition_window": (("--repetition-window", 64), 64),
    "presence_penalty": (("--presence-penalty", 0.5), 0.5),
    "frequency_penalty": (("--frequency-penalty", -0.5), -0.5),
    "dry_multiplier": (("--dry-multiplier", 0.8), 0.8),
    "dry_base": (("--dry-base", 2.0), 2.0),
    "dry_allowed_length": (("--dry-allowed-length", 3), 3),
    "dry_window": (("--dry-window", 100), 100),
    "dry_breakers": (("--dry-breaker", "a", "--dry-breaker", "b"), ("a", "b")),
    "logit_bias": (("--logit-bias", "7:-2", "--logit-bias", "3:1.5"), ((3, 1.5), (7, -2.0))),
    "allowed_ids": (("--allow-id", 5, "--allow-id", 4), (4, 5)),
    "banned_ids": (("--ban-id", 5), (5,)),
    "bad_words": (("--bad-word", "the"), ("the",)),
    "stop": (("--stop", "x", "--stop", "y"), ("x", "y")),
    "stop_ids": (("--stop-id", 9), (9,)),
    "include_stop": (("--include-stop",), True),
    "ignore_eos": (("--ignore-eos",), True),
    "min_tokens": (("--min-tokens", 3), 3),
    "max_seconds": (("--max-seconds", 60), 60.0),
    "json_schema": (("--json-schema", '{"type": "null"}'), Grammar.json_schema('{"type": "null"}')),
    "regex": (("--regex", "[0-9]+"), Grammar.regex("[0-9]+")),
    "lark": (("--lark", 'start: "a"'), Grammar.lark('start: "a"')),
    "choice": (("--choice", "yes", "--choice", "no"), Grammar.choice(["yes", "no"])),
    "n": (("--texts", 2), 2),
    "best_of": (("--best-of", 3), 3),
    "beams": (("--beams", 4), 4),
    "length_penalty": (("--beams", 2, "--length-penalty", 0.5), 0.5),
    "early_stopping": (("--beams", 2, "--early-stopping", "never"), "never"),
    "logprobs": (("--logprobs", 2), 2),
}


@pytest.fixture
def generate(run: Run, model: Path) -> Callable[..., Any]:
    def go(*arguments: object, **options: Any) -> Any:
        return run("generate", "the sun and the other", "--model", model, "-n", 12, *arguments, **options)

    return go


FORMATS = ("json_schema", "regex", "lark", "choice")
SEARCH = ("beams", "length_penalty", "early_stopping")
TOGETHER = sorted((COMMON.keys() | MORE.keys()) - {"max_tokens", *FORMATS, *SEARCH})


@pytest.mark.parametrize("names", [TOGETHER, *([one] for one in (*FORMATS, *SEARCH))], ids=lambda names: names[0])
def test_each_option_reaches_its_field(names, generate, monkeypatch):
    seen: list[SamplingParams] = []
    build = InputProcessor.build

    def watched(self, prompt, params, *options):
        seen.append(params)
        return build(self, prompt, params, *options)

    monkeypatch.setattr(InputProcessor, "build", watched)
    result = generate(*(word for name in names for word in GIVEN[name][0]))
    assert result.exit_code == 0, result.output
    fields = {"grammar" if name in FORMATS else name: GIVEN[name][1] for name in names} | {"max_tokens": 12}
    assert {field: getattr(seen[0], field) for field in fields} == fields


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--regex", "a", "--choice", "b"), "a text has one format; give only one of --regex and --choice"),
        (("--logit-bias", "x"), "--logit-bias must be ID:NUMBER"),
        (("--beams", 2, "--early-stopping", "soon"), "--early-stopping must be true, false or never"),
        (("--json-schema", "@nowhere.json"), "'nowhere.json' cannot be read: No such file"),
        (("--tree",), "--tree draws a beam search"),
        (("--beams", 2, "--cache-file", "x"), "leave --texts, --best-of and --beams out"),
        (("--beams", 2, "--top-k", 3), "beam search draws nothing; leave --top-k out"),
        (("--beams", 4, "--temperature", 1), "beam search draws nothing; leave --temperature out"),
        (("--beams", 2, "--seed", 3), "beam search draws nothing; leave --seed out"),
        (("--best-of", 2, "--texts", 3), "--best-of is 2, less than --texts, which is 3"),
        (("--ban-id", 10**6), "the model's ids are 0 to"),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(arguments, message, generate):
    result = generate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


def test_several_texts_are_numbered_and_the_json_has_all(generate):
    result = generate("--texts", 3, "--seed", 1, "--ignore-eos", "--min-tokens", 12, "--logprobs", 0)
    told = json.loads(generate("--texts", 3, "--seed", 1, "--json", "--ignore-eos", "--logprobs", 1).stdout)
    texts = [one["text"] for one in told["choices"]]
    assert len(set(texts)) == 3
    assert told["text"] == texts[0]
    assert result.stdout == "".join(f"[{place}] {text}\n" for place, text in enumerate(texts, 1))
    labels = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert labels == ["[1]", "[2]", "[3]"], "whose the log-probabilities are"
    assert " + 36 generated tokens" in result.stderr and told["facts"]["generated_tokens"] == 36
    assert all(len(one["top_logprobs"]) == len(one["token_ids"]) == 12 for one in told["choices"])


def test_a_schema_is_read_from_a_file(generate, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["a", "b"]}')
    told = json.loads(generate("--json-schema", f"@{file}", "--json").stdout)
    assert json.loads(told["text"]) in ("a", "b")
    assert told["finish_reason"] in ("grammar", "eos")


def test_the_tree_shows_what_was_searched(generate):
    result = generate("--beams", 3, "--texts", 2, "--tree")
    lines = [line for line in result.stderr.splitlines() if "─" in line]
    assert sum("#1" in line for line in lines) == 1
    assert sum("#2" in line for line in lines) == 1
    told = json.loads(generate("--beams", 3, "--texts", 2, "--json").stdout)
    assert [one["score"] for one in told["choices"]] == sorted((one["score"] for one in told["choices"]), reverse=True)
    for token in told["tree"]:
        parent = None if token["parent"] is None else told["tree"][token["parent"]]
        before = parent["score"] if parent else 0.0
        assert token["score"] == pytest.approx(before + token["logprob"])


def test_a_picture_joins_what_does_not_part():
    tree = [
        TreeToken(None, 1, -1.0, -1.0, None),
        TreeToken(0, 2, -1.0, -2.0, None),
        TreeToken(1, 3, -1.0, -3.0, FinishReason.EOS),
        TreeToken(1, 4, -2.0, -4.0, None),
        TreeToken(None, 5, -3.0, -3.0, None),
    ]
    assert picture(tree, lambda ids: "".join(map(str, ids)), [2]) == [
        "├─ '12' -2.00",
        "│  ├─ '3' -3.00  eos  #1",
        "│  └─ '4' -4.00  left",
        "└─ '5' -3.00  left",
    ]


def test_options_become_fields():
    options = dict.fromkeys(COMMON | MORE) | {"max_tokens": 5, "early_stopping": "TRUE", "beams": 2}
    assert chosen_from(options) == {"max_tokens": 5, "early_stopping": True, "beams": 2}
