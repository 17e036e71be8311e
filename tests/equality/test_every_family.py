"""Every family of the equality matrix through what stands around the engine: the trace, drafts, a disk tier, replicas.

A part of the families always runs: one at least of each thing that a text may keep. The rest is a sweep.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.equality.harness import checkpoint_of, make_subject
from tests.equality.kinds import ALL_KINDS
from tests.llm.drafts.test_speculation import has_failed, with_draft
from tests.serve.conftest import served
from tests.trace.definition import defined_row, row_of_run
from tokenwright import LLM, RequestError
from tokenwright.cache import KVStore, layer_specs
from tokenwright.cache.store import KVView
from tokenwright.cluster.processes import open_cluster
from tokenwright.explorer.panels import block as block_panel
from tokenwright.explorer.panels import heads as heads_panel
from tokenwright.explorer.panels.export import chrome_trace
from tokenwright.llm.model import LoadedModel
from tokenwright.llm.run import Run
from tokenwright.llm.run_trace import run_card
from tokenwright.trace.frame_codec import pack, unpack

PROMPT = list(range(5, 45))  # longer than the windows, and than a page
NEW = 6
GREEDY: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
CANNOT = "rewrite a state at each token, so earlier steps cannot be replayed"


def part(every: int, *always: str) -> list[Any]:
    """All kinds, of which each that `every` counts and those named always run, and the others in a sweep."""
    kinds = list(ALL_KINDS)
    chosen = {*kinds[::every], *always}
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.sweep) for kind in kinds]


def path_of(kind: str) -> Path:
    return Path(checkpoint_of(kind)[2].name) / "model"


def options_of(kind: str) -> dict[str, Any]:
    one = ALL_KINDS[kind]
    return {"pages": 64} | ({} if one.window is None else {"window": one.window, "sinks": one.sinks})


def written(llm: Any, prompt: Sequence[int] = PROMPT, **more: Any) -> list[int]:
    [done] = llm.generate([prompt], **GREEDY | more)
    return list(done.token_ids)


@pytest.mark.parametrize(
    "kind", part(9, "window", "states alone", "layers of one op", "state spaces beside", "residual streams")
)
def test_observed_texts(kind: str) -> None:
    """The last stream gives the engine's probabilities; each head's weights are those of the definition."""
    with LLM(path_of(kind), trace=True, **options_of(kind)) as llm:
        layers, heads, graph = llm.config.layers, llm.config.heads, llm.llm_engine.facts.graph
        asked = [(layer, heads - 1) for layer in range(layers) if layer not in graph.recurrent]
        [done] = llm.generate([PROMPT], **GREEDY, prompt_logprobs=0, observe=asked)
        seen = done.observed
        assert seen is not None
        assert seen.hidden.shape == (layers + 1, len(PROMPT) + NEW, llm.config.width)
        assert list(seen.attention) == asked
        for place in (1, 20, len(PROMPT) - 2):
            assert abs(seen.lens(place)[-1][PROMPT[place + 1]] - done.prompt_logprobs[place]) <= 1e-3
        replay = llm.llm_engine.recording.replay  # type: ignore[union-attr]
        for (layer, head), weights in seen.attention.items():
            assert np.abs(np.triu(weights, 1)).max() == 0.0
            right = defined_row(replay, seen.tokens, len(seen.tokens) + 1, layer, head)
            assert np.abs(weights[-1] - right).max() <= 1e-4
        for layer in graph.recurrent:
            with pytest.raises(RequestError, match=f"layer {layer} keeps a state and has no attention heads"):
                llm.generate([PROMPT], **GREEDY, observe=[(layer, 0)])


@pytest.mark.parametrize("kind", part(12, "states alone", "layers of one op", "latent + sinks"))
def test_runs(kind: str) -> None:
    """Frames, replayed rows, the pages' views and the exports of a run; what cannot be replayed is refused."""
    with LLM(path_of(kind), trace=True, **options_of(kind)) as llm, llm.run(PROMPT, **GREEDY) as run:
        run.step()
        assert run.pages()[0].pages > 0
        while not run.ended:
            run.step()
        assert list(run.completion.token_ids) == written(llm)
        assert len(run.frames) == NEW and all(pack(unpack(pack(one))) == pack(one) for one in run.frames)
        trace = json.loads(json.dumps(run.trace()))
        assert [one["token"] for one in trace["steps"]] == list(run.completion.token_ids)
        events = chrome_trace(run_card(llm.llm_engine, run, kind, ""), run.frames)["traceEvents"]
        assert sum(one.get("cat") == "step" for one in json.loads(json.dumps(events))) == NEW
        assert "<iframe" in run._repr_html_()
        graph = llm.llm_engine.facts.graph
        for layer in range(llm.config.layers):
            if layer not in graph.recurrent:
                check_layer(run, layer, recurrent=bool(graph.recurrent))
        views = (
            lambda: run.heads(3),
            lambda: list(heads_panel.atlas_card(run.look, run.tokens[:44], 3, llm.config.layers, llm.config.heads)),
            lambda: heads_panel.lens_card(run.look, 42, 3, run.tokens[43], lambda token: token),  # type: ignore[arg-type,return-value]
        )
        for view in views:
            looked(view, recurrent=bool(graph.recurrent))


def looked(view: Any, *, recurrent: bool) -> Any:
    """What a view shows; None for a model of which it is refused."""
    if not recurrent:
        return view()
    with pytest.raises(RequestError, match=CANNOT):
        view()
    return None


def check_layer(run: Run, layer: int, *, recurrent: bool) -> None:
    right, at = row_of_run(run, 3, layer, 0), run.last_position(3)
    row = looked(lambda: run.look(lambda one, two: one.row(two, at, layer, 0), at), recurrent=recurrent)
    assert recurrent or np.abs(row - right).max() <= 1e-4
    block = looked(
        lambda: run.look(lambda one, two: block_panel.block_view(one, two, at, layer), at), recurrent=recurrent
    )
    assert recurrent or block.reads[0].weight == pytest.approx(max(right), abs=1e-4)
    way = looked(
        lambda: run.look(lambda one, two: block_panel.way_view(one, two, at, layer, 0, at), at), recurrent=recurrent
    )
    assert recurrent or way.weight == pytest.approx(right[at], abs=0.01)
    matrix = looked(lambda: list(heads_panel.matrix_card(run.look, at + 1, 3, layer, 0))[-1], recurrent=recurrent)
    assert recurrent or matrix.tokens == at + 1


@pytest.mark.parametrize("kind", part(12, "states alone", "layers of one op", "residual streams"))
def test_panels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each panel of the page answers, or refuses what the model cannot show; none fails."""
    with served(path_of(kind), **options_of(kind)) as (client, explorer):
        body = {"prompt": "the end of the " * 4, "max_tokens": NEW, "ignore_eos": True, "seed": 1}
        identity = client.post("/runs", json=body).json()["run"]
        run = explorer.player(identity).run
        while not run.ended:
            run.step()
        config, recurrent = explorer.llm.config, explorer.llm.llm_engine.facts.graph.recurrent
        refused = 400 if recurrent else 200
        run_path, step = f"/runs/{identity}", {"step": 3}
        for layer in range(config.layers):
            head = {"layer": layer, "head": config.heads - 1}
            for path, query in (
                ("block", {"layer": layer}), ("way", head | {"position": run.last_position(3)}), ("matrix", head),
                ("attention", head),
            ):  # fmt: skip
                check(client.get(f"{run_path}/{path}", params=step | query), refused, CANNOT)
        for path, why in (("lens", CANNOT), ("atlas", CANNOT), ("heads", CANNOT), ("drafts", "keep a state")):
            check(client.get(f"{run_path}/{path}", params=step), refused, why)
        for path in ("logits", "sampler", "branches", "trace.json", "perfetto.json", "steps/3", "times"):
            check(client.get(f"{run_path}/{path}", params=step))
        for path in ("/model", "/learn", f"/pages?run={identity}", f"{run_path}/trace.json?halves=true"):
            check(client.get(path))
        check(client.post(f"{run_path}/fork", json={"step": 2, "token": 7}), 201)
        check(client.post("/calculate", json={"context": 512}))
        check(client.post("/beams", json={"prompt": "the", "beams": 2, "max_tokens": 3}))
        check(client.post("/race", json={"prompt": "the", "max_tokens": 3}))
        check(client.post(f"{run_path}/lab", json={"kv": "int8"}))


def check(answer: Any, status: int = 200, why: str = "") -> None:
    assert answer.status_code == status, f"{answer.request.url}: {answer.status_code} {answer.text[:300]}"
    assert why in answer.text or status == 200


@pytest.mark.parametrize("kind", part(9, "window", "shared keys and values", "values from keys", "residual streams"))
def test_drafts_by_a_copy_and_by_another_of_its_shape(kind: str, tmp_path: Path) -> None:
    """A copy's guesses all hold. Another model's guesses are its own texts, so it reads none of the model's K and V."""
    loaded = LoadedModel(str(path_of(kind)))
    if loaded.facts.graph.recurrent:
        with pytest.raises(RequestError, match="give a draft model without recurrent layers"):
            LLM(loaded, draft=str(path_of(kind)))
        return
    with LLM(loaded, speculate="off", **options_of(kind)) as llm:
        plain = written(llm, max_tokens=3 * NEW)
    for draft in (path_of(kind), another(kind, tmp_path)):
        made: list[tuple[list[int], list[int]]] = []
        with with_draft(loaded, str(draft), "native", options_of(kind)) as llm:
            proposer: Any = llm.llm_engine.inspect(lambda engine: engine.scheduler.proposer)
            proposer.earlier.capacity, proposer._repeated = 0, lambda *_: None  # no drafts from repeated text
            propose = proposer.propose

            def noted(sequences: Any, *arguments: Any) -> Any:
                drafts = propose(sequences, *arguments)  # noqa: B023
                made.extend((list(one.tokens), list(its)) for one, its in zip(sequences, drafts, strict=True))  # noqa: B023
                return drafts

            proposer.propose = noted
            assert written(llm, max_tokens=3 * NEW) == plain and not has_failed(llm)
        with LLM(str(draft), speculate="off", **options_of(kind)) as llm:
            assert sum(len(drafts) for _, drafts in made) >= NEW
            for text, drafts in made:
                assert not drafts or written(llm, text, max_tokens=len(drafts)) == drafts


def another(kind: str, folder: Path) -> Path:
    """A model with the shapes of a kind and other weights: the kind's rows, each tensor turned by one."""
    made = folder / "another"
    made.mkdir()
    for file in path_of(kind).iterdir():
        if file.suffix != ".safetensors":
            (made / file.name).write_bytes(file.read_bytes())
            continue
        tensors = {name: one.roll(1, 0).contiguous() if one.ndim > 1 else one for name, one in load_file(file).items()}
        save_file(tensors, made / file.name)
    return made


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_layers_of_a_joined_store_are_those_of_their_own_model(kind: str) -> None:
    """Two models in one store: a layer's K and V lie where they lie with its model alone, whatever specs are equal."""
    for other in {kind, "GQA", "shared keys and values", "residual streams", "hybrid"}:
        first, second = (layer_specs(make_subject(one).graph, "float32") for one in (other, kind))
        store = KVStore((*first, *second), 3, 16)
        alone = KVStore(second, 3, 16)
        views = store.of_layers(len(first), len(first) + len(second))._views
        for theirs in store._views[: len(first)]:
            assert not any(overlap(one, theirs) for one in views)
        shared = [[overlap(one, two) for two in views] for one in views]
        assert shared == [[overlap(one, two) for two in alone._views] for one in alone._views]


def overlap(one: Any, other: Any) -> bool:
    both = [view.parts[0].k.memory[0] if isinstance(view, KVView) else view.memory for view in (one, other)]
    return bool(np.shares_memory(*both))


@pytest.mark.parametrize("kind", part(12, "states alone", "latent + sinks", "residual streams"))
def test_a_disk_tier(kind: str, tmp_path: Path) -> None:
    """A later engine finds the pages in the folder, and writes the same text."""
    options = options_of(kind) | {"kv_disk": str(tmp_path), "page_size": 4, "pages": 400}
    found = []
    for _ in range(2):
        with LLM(path_of(kind), **options) as llm:
            [done] = llm.generate([PROMPT * 3], **GREEDY)
            found.append((list(done.token_ids), done.usage.disk_tokens))
    with LLM(path_of(kind), **options_of(kind)) as llm:
        right = written(llm, PROMPT * 3)
        apart = max(getattr(spec.window, "every", 0) for spec in llm.specs)  # tokens from one kept state to the next
    assert [ids for ids, _ in found] == [right, right]
    assert found[0][1] == 0 and (found[1][1] > 0) == (apart < 3 * len(PROMPT))


@pytest.mark.parametrize("kind", part(40, "states alone", "shared keys and values"))
def test_replicas(kind: str) -> None:
    options = options_of(kind)
    with LLM(path_of(kind), **options) as llm:
        right = written(llm)
    options = {name: one for name, one in options.items() if name != "pages"} | {"kv_memory": 64 << 20}
    with open_cluster(str(path_of(kind)), 1, options) as cluster:
        assert written(cluster) == right
