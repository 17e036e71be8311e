"""/v1/rerank and /v1/score, of a reranker and of a model whose embeddings are compared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.relevance import make_reranker, write_modules
from tests.serve.declared import read
from tests.serve.live import Live, live, make_chat_model, settled
from tokenwright.llm.scoring import Relevance
from tokenwright.serve.openai.embeddings import RERANK, Reranked, ScoreReply, TeiEntry

DOCUMENTS = ["the sun", "a moon", "the other one and the sea"]


@pytest.fixture(scope="module", params=["answers", "embeddings"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_reranker(folder) if request.param == "answers" else make_chat_model(folder / "model")
    with live(model) as running:
        yield running
        settled(running)


def ask(server: Live, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


@pytest.mark.parametrize("path", RERANK)
def test_documents_come_in_the_order_of_their_relevance(server: Live, path: str) -> None:
    documents = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]
    reply = ask(server, path, model="tiny", query="sun", documents=documents)
    assert reply.status_code == 200, reply.text
    found = read(Reranked, reply.json())
    expected = server.llm.rerank("sun", DOCUMENTS)
    assert [one.index for one in found.results] == sorted(range(3), key=lambda at: -expected[at])
    for one in found.results:
        assert one.relevance_score == pytest.approx(expected[one.index], abs=1e-6)
        assert one.document.text == DOCUMENTS[one.index]
    assert found.usage.total_tokens == found.usage.prompt_tokens > 0


def test_texts_are_answered_as_tei_answers_them(server: Live) -> None:
    reply = ask(server, "/rerank", query="sun", texts=DOCUMENTS, return_text=True, truncate=True, max_tokens_per_doc=9)
    assert reply.status_code == 200, reply.text
    expected = server.llm.rerank("sun", DOCUMENTS)
    order = sorted(range(3), key=lambda at: -expected[at])
    for one, at in zip(read(list[TeiEntry], reply.json()), order, strict=True):
        assert (one.index, one.text) == (at, DOCUMENTS[at])
        assert one.score == pytest.approx(expected[at], abs=1e-6)


def test_fewer_results_without_their_texts(server: Live) -> None:
    few = ask(server, "/v1/rerank", query="sun", documents=DOCUMENTS, top_n=2, return_documents=False).json()
    all_of_them = ask(server, "/v1/rerank", query="sun", documents=DOCUMENTS).json()
    assert [one["index"] for one in few["results"]] == [one["index"] for one in all_of_them["results"]][:2]
    assert not any("document" in one for one in few["results"])


def test_an_instruction_changes_the_scores(server: Live) -> None:
    plain = ask(server, "/v1/rerank", query="sun", documents=DOCUMENTS[:1]).json()
    told = ask(server, "/v1/rerank", query="sun", documents=DOCUMENTS[:1], instruction="Find moons").json()
    assert told["results"][0]["relevance_score"] != plain["results"][0]["relevance_score"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_pairs(server: Live, path: str) -> None:
    one_to_all = ask(server, path, model="tiny", text_1="sun", text_2=DOCUMENTS)
    assert one_to_all.status_code == 200, one_to_all.text
    found = read(ScoreReply, one_to_all.json())
    assert [one.score for one in found.data] == pytest.approx(list(server.llm.rerank("sun", DOCUMENTS)), abs=1e-6)
    pairs = ask(server, path, model="tiny", text_1=["moon", "sun"], text_2=DOCUMENTS[1:]).json()
    assert pairs["data"][1]["score"] == pytest.approx(found.data[2].score)
    assert ask(server, path, text_1="sun", text_2="a moon").json()["data"][0]["score"] == pytest.approx(
        found.data[1].score
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 9000]}, None),
        (
            "/v1/score",
            {"text_1": [f"{at}" for at in range(64)], "text_2": 64 * ["b"], "instruction": "c" * 600_000},
            None,
        ),
    ],
)
def test_what_cannot_be_done_is_refused(server: Live, path: str, body: dict[str, Any], param: str | None) -> None:
    reply = ask(server, path, **body)
    assert reply.status_code == 400, reply.text
    if param is not None:
        assert reply.json()["error"]["param"] == param


def test_a_long_query_is_written_once_or_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB for each of 2,048 documents would be more than memory has."""
    written: list[str] = []
    real = Relevance.query
    monkeypatch.setattr(Relevance, "query", lambda own, *given: written.append(given[0]) or real(own, *given))
    few = ask(server, "/v1/rerank", query="a sun", documents=[f"b{at}" for at in range(40)], instruction="c")
    assert few.status_code == 200 and len(written) <= 1
    many = ask(server, "/v1/rerank", query="a" * (1 << 20), documents=40 * ["b"], instruction="c")
    assert many.status_code == 400 and len(written) <= 2


def test_another_name_is_the_same_model(server: Live) -> None:
    reply = ask(server, "/v1/rerank", model="other", query="a", documents=["b"])
    assert (reply.json()["model"], reply.headers["x-tokenwright-ignored"]) == ("tiny", "model")


def test_embeddings_are_pooled_as_the_files_say(tmp_path: Path) -> None:
    path = make_chat_model(tmp_path / "model")
    write_modules(path, "Transformer", "Pooling", pooling_mode_lasttoken=True)
    with live(path) as running:
        reply = ask(running, "/v1/embeddings", model="tiny", input="the sun").json()
        [expected] = running.llm.embed("the sun", pooling="last", normalize=True)
    assert reply["pooling"] == "last"
    assert reply["data"][0]["embedding"] == pytest.approx(expected.tolist(), abs=1e-6)
