"""Responses that are kept: what refers to them, who sees them, and when they leave."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.engines import slowed, until
from tests.serve.talking import Talker, make_talker, talking
from tokenwright.errors import EngineError
from tokenwright.serve.app import Served
from tokenwright.serve.openai.responses import stored as stored_responses
from tokenwright.serve.openai.responses.bodies import ItemReference, ResponseMessage
from tokenwright.serve.openai.responses.stored import StoredItem, StoredResponse, StoredResponses
from tokenwright.serve.service.generation import Generation
from tokenwright.serve.service.types import Caller
from tokenwright.serve.transport import guard

ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_output_tokens": 4}
KEYS = ("a key of one", "a key of two")


@pytest.fixture
def client(talker: Talker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_conversation_goes_on_from_a_response(talker: Talker, client: openai.OpenAI, streamed: bool) -> None:
    def create(**more: Any) -> Any:
        if not streamed:
            return client.responses.create(**ASKED, **more)
        return list(client.responses.create(**ASKED, stream=True, **more))[-1].response  # type: ignore[union-attr]

    first = create(input="Hello", instructions="Be brief.")
    second = create(input="And?", previous_response_id=first.id)
    third = create(input=[{"role": "user", "content": "So?"}], previous_response_id=second.id, instructions="Be kind.")
    assert (first.store, second.previous_response_id) == (True, first.id)
    told = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first.output_text}]
    told += [{"role": "user", "content": "And?"}]
    assert second.usage.input_tokens == talker.tokens(told), "instructions are those of one request"
    told += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "So?"}]
    assert third.usage.input_tokens == talker.tokens([{"role": "system", "content": "Be kind."}, *told])
    assert third.output_text == talker.greedy([{"role": "system", "content": "Be kind."}, *told], 4)


def test_a_stored_response_is_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(input="Hello", **ASKED)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="is stored here"):
            again(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="And?", previous_response_id=made.id, **ASKED)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_that_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(input="Hello", store=False, **ASKED)
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_items_of_a_conversation_are_listed_in_pages(client: openai.OpenAI) -> None:
    texts = [{"role": "user", "content": str(n)} for n in range(5)]
    first = client.responses.create(input=texts, **ASKED)  # type: ignore[arg-type]
    second = client.responses.create(input="last", previous_response_id=first.id, **ASKED)

    def said(**more: Any) -> list[str]:
        return [item.content[0].text for item in client.responses.input_items.list(second.id, **more)]

    wanted = [*"01234", first.output_text, "last"]
    assert said(order="asc", limit=3) == wanted
    assert said() == wanted[::-1]
    page = client.responses.input_items.list(second.id, order="asc", limit=3)
    assert (len(page.data), page.has_more) == (3, True)
    for bad in ({"limit": 0}, {"limit": 101}, {"after": "nothing"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(bad))):
            client.responses.input_items.list(second.id, extra_query=bad)


def test_an_item_may_be_sent_by_its_id(talker: Talker, client: openai.OpenAI) -> None:
    first = client.responses.create(input="Hello", **ASKED)
    given: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "And?"}]
    second = client.responses.create(input=given, **ASKED)
    told = [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And?"}]
    assert second.usage is not None and second.usage.input_tokens == talker.tokens(told)


def test_a_response_that_is_written_can_be_cancelled(talker: Talker, client: openai.OpenAI) -> None:
    with slowed(talker.llm):
        stream = client.responses.create(input="Hello", stream=True, **ASKED | {"max_output_tokens": 1500})
        events = iter(stream)
        created: Any = next(events)
        assert client.responses.cancel(created.response.id).status == "cancelled"
        last = list(events)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")  # type: ignore[union-attr]
    until(talker.idle)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(created.response.id)
    done = client.responses.create(input="Hello", **ASKED)
    with pytest.raises(openai.BadRequestError, match="is incomplete already"):
        client.responses.cancel(done.id)


def test_a_response_that_failed_is_not_stored(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by its id, under which it would be complete."""

    async def failing(_: Generation) -> None:
        raise EngineError("out of order")

    monkeypatch.setattr(Generation, "__anext__", failing)
    *_, last = client.responses.create(input="Hello", stream=True, **ASKED)
    assert last.type == "response.failed" and last.response.status == "failed"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_each_key_sees_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_talker(tmp_path_factory.mktemp("keys"))
    with talking(folder, keys=[key.replace(" ", "-") for key in KEYS]) as talker:
        one, two = ({"authorization": f"Bearer {key.replace(' ', '-')}"} for key in KEYS)
        url = f"{talker.url}/v1/responses"
        made = httpx.post(url, json=ASKED | {"input": "Hello"}, headers=one).json()["id"]
        for method in ("GET", "DELETE"):
            assert httpx.request(method, f"{url}/{made}", headers=two).status_code == 404
        asked = ASKED | {"input": "And?", "previous_response_id": made}
        assert [httpx.post(url, json=asked, headers=key).status_code for key in (one, two)] == [200, 400]
        talk = httpx.post(f"{talker.url}/v1/conversations", json={}, headers=one).json()["id"]
        place, asked = f"{talker.url}/v1/conversations/{talk}", ASKED | {"input": "Hello", "conversation": talk}
        assert [httpx.get(place, headers=key).status_code for key in (one, two)] == [200, 404]
        assert [httpx.post(url, json=asked, headers=key).status_code for key in (two, one)] == [404, 200]


def test_a_server_may_store_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_talker(tmp_path_factory.mktemp("nothing"))
    with talking(folder, served=Served(["tiny"], stored_responses=0)) as talker:
        made = httpx.post(f"{talker.url}/v1/responses", json=ASKED | {"input": "Hello"}).json()
        assert made["store"] is False
        assert httpx.get(f"{talker.url}/v1/responses/{made['id']}").status_code == 404
        assert "stores nothing" in httpx.post(f"{talker.url}/v1/conversations", json={}).text


def response(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "id": f"m{name}", "content": "a" * 100}],
    }


def test_the_oldest_leave_where_there_is_no_room() -> None:
    most = 2 * StoredResponse.of(response("a"), []).size + 100
    stored = StoredResponses(most)
    for name in "abc":
        stored.add("key", StoredResponse.of(response(name), []))
    assert [stored.get("key", name) is not None for name in "abc"] == [False, True, True]
    assert 0 < stored.sizes.total() <= most
    stored.add("key", StoredResponse.of(response("d") | {"text": "a" * most}, []))
    assert stored.get("key", "d") is None and stored.get("key", "c") is not None, "what never fits displaces nothing"
    stored.add("key", StoredResponse.of(response("c"), []))
    for name in "bc":
        assert stored.remove("key", name)
    assert (stored.sizes.total(), stored.remove("key", "c")) == (0, False)


def test_no_key_displaces_what_another_keeps_within_its_share() -> None:
    size = StoredResponse.of(response("r00"), []).size
    stored = StoredResponses(8 * size)
    for name in ("q00", "q01"):
        stored.add("quiet", StoredResponse.of(response(name), []))
    for number in range(40):
        stored.add("busy", StoredResponse.of(response(f"r{number:02}"), []))
    assert all(stored.get("quiet", name) for name in ("q00", "q01"))
    assert [number for number in range(40) if stored.get("busy", f"r{number:02}")] == [34, 35, 36, 37, 38, 39]
    for number in range(40):
        stored.add("third", StoredResponse.of(response(f"r{number:02}"), []))
    assert {key: size_of // size for key, size_of in stored.sizes.items()} == {"quiet": 2, "busy": 3, "third": 3}


def test_the_budget_is_that_of_memory() -> None:
    """64 MiB of JSON were 650 MB, as objects and as they were read."""
    told = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]} for _ in range(200)]
    stored = StoredResponses(2**22)
    tracemalloc.start()
    try:
        for number in range(100):
            items = [StoredItem.of(one | {"id": f"m{number}-{at}"}) for at, one in enumerate(told)]
            stored.add("key", StoredResponse.of(response(f"r{number}"), items))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert stored.sizes.total() > 2**21, "the budget is used"
    assert held < 2**22


def test_references_are_found_among_what_other_responses_hold() -> None:
    stored = StoredResponses()
    told = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}], "id": "m1"}
    stored.add("key", StoredResponse.of(response("a"), [StoredItem.of(told)]))
    stored.add("key", StoredResponse.of(response("b"), [StoredItem("m2", b"no JSON, and not asked for")]))
    asked = [ItemReference(type="item_reference", id=identity) for identity in ("ma", "m1", "nobody")]
    answer, message, missing = stored.resolved("key", asked)
    assert isinstance(message, ResponseMessage) and message.id == "m1"
    assert isinstance(answer, ResponseMessage) and answer.role == "assistant"
    assert missing is asked[2] and list(stored.resolved("other", asked)) == asked


def test_a_response_leaves_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredResponses()
    stored.add("key", StoredResponse.of(response("a"), []))
    assert stored.get("key", "a") is not None and stored.get("other", "a") is None
    monkeypatch.setattr(stored_responses, "KEPT_S", -1.0)
    assert stored.get("key", "a") is None
    assert stored.sizes.total() == 0


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_responses_go_on_in_a_conversation(talker: Talker, client: openai.OpenAI, streamed: bool) -> None:
    hello: Any = {"type": "message", "role": "user", "content": "Hello"}
    made = client.conversations.create(items=[hello], metadata={"topic": "tests"})
    assert client.conversations.retrieve(made.id).metadata == {"topic": "tests"}

    def create(**more: Any) -> Any:
        if not streamed:
            return client.responses.create(**ASKED, **more)
        return list(client.responses.create(**ASKED, stream=True, **more))[-1].response  # type: ignore[union-attr]

    first = create(conversation=made.id, store=False)
    client.conversations.items.create(made.id, items=[hello | {"content": "And?"}])
    second = create(conversation={"id": made.id}, input="So?")
    told = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first.output_text}]
    told += [{"role": "user", "content": text} for text in ("And?", "So?")]
    assert second.usage.input_tokens == talker.tokens(told) and second.conversation.id == made.id
    sessions = {one.asked.session for one in talker.llm.llm_engine.prompts.records(Caller().key)[:2]}
    assert sessions == {made.id}, "the cache knows the conversation by its name"
    found: list[Any] = list(client.conversations.items.list(made.id, order="asc", limit=2))
    texts = ["Hello", first.output_text, "And?", "So?", second.output_text]
    assert [item.content[0].text for item in found] == texts
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="send either it or previous_response_id"):
        create(conversation=made.id, previous_response_id=second.id)
    assert client.conversations.delete(made.id).deleted
    for gone in (client.conversations.retrieve, client.conversations.items.list, client.conversations.delete):
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            gone(made.id)
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        create(conversation=made.id, input="So?")


def test_a_conversation_that_no_longer_fits_is_forgotten_rather_than_cut() -> None:
    stored = StoredResponses(2_000)
    stored.add("key", StoredResponse.of({"id": "c"}, []))
    assert stored.get("key", "c") is None and stored.get("key", "c", conversation=True) is not None
    stored.extend("key", stored.found("key", "c", "", conversation=True), [StoredItem("b", b"b" * 100)])
    found = stored.found("key", "c", "", conversation=True)
    assert [only.id for only in found.items] == ["b"]
    stored.extend("key", found, [StoredItem("d", b"d" * 2_000)])
    assert stored.get("key", "c", conversation=True) is None and stored.sizes.total() == 0


def test_a_conversation_outlives_its_own_response(tmp_path: Path) -> None:
    """Of which two do not fit beside each other; and what is not kept is not said to be."""
    hello: Any = {"type": "message", "role": "user", "content": "Hello"}
    with talking(make_talker(tmp_path), served=Served(stored_responses=4_500)) as small:
        url = f"{small.url}/v1/conversations"
        made = httpx.post(url, json={"items": [hello]}).json()["id"]
        for _ in range(2):
            asked = ASKED | {"input": "And?", "conversation": made}
            assert httpx.post(f"{small.url}/v1/responses", json=asked).status_code == 200
        assert len(httpx.get(f"{url}/{made}/items").json()["data"]) == 5
        large = hello | {"content": "a" * 5_000}
        assert httpx.post(url, json={"items": [large]}).status_code == 404
        assert httpx.post(f"{url}/{made}/items", json={"items": [large]}).status_code == 404


def test_items_are_added_without_a_look_at_the_others() -> None:
    """A request of 100 bytes held the event loop for 40 ms, where a conversation had 160,000 items."""
    looks = 0

    class Text(bytes):
        def __len__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__len__()

    stored = StoredResponses()
    stored.add("key", StoredResponse.of({"id": "c"}, [StoredItem(str(n), Text(b"{}")) for n in range(1_000)]))
    found, looks = stored.found("key", "c", "", conversation=True), 0
    stored.extend("key", found, [StoredItem("a", b"{}")])
    found = stored.found("key", "c", "", conversation=True)
    assert looks == 0 and len(found.items) == 1_001
    assert found.size == StoredResponse.of({"id": "c"}, found.items).size


def test_what_a_request_names_counts_as_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests of 71 bytes for a conversation of 60 MiB took 1.3 GB."""
    monkeypatch.setattr(guard, "MOST_HELD", 1)
    with talking(make_talker(tmp_path), body=2_000) as talker:
        item = {"type": "message", "role": "user", "content": "a" * 1_500}
        made = httpx.post(f"{talker.url}/v1/conversations", json={"items": [item]}).json()["id"]
        for path in ("responses", "responses/input_tokens"):
            asked = {"model": "tiny", "input": "Hello"}
            refused = httpx.post(f"{talker.url}/v1/{path}", json=asked | {"conversation": made})
            assert refused.status_code == 429 and "in all are being answered" in refused.text
            assert httpx.post(f"{talker.url}/v1/{path}", json=asked | {"max_output_tokens": 4}).status_code == 200
