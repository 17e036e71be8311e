"""The chat page: what is said is what the model says, branches keep it all, and the explorer runs the same ids."""

import io
import json
from base64 import b64decode, b64encode

import pytest

from tests.browser.conftest import HANGS, SIZE, Explored
from tests.browser.looks import findings
from tests.browser.served import serving
from tests.models.fixtures import plain_stories
from tests.vision.models import IMAGE, make_model, picture, question
from tokenwright import LLM

HOSTILE = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script> [x](javascript:window.pwned=1) '
    "<|end|> **bold** `<b>code</b>`\n\n"
    "```html\n</code></pre><iframe src=x></iframe>\n```\n\n- <svg onload=window.pwned=1>"
)
KEY = "a-key-for-the-tests"


class Talk:
    """A tab with the chat page in it."""

    def __init__(self, explored):
        self.explored, self.tab = explored, explored.tab
        self.tab.goto(f"{explored.address}/chat")

    def until(self, condition):
        self.tab.wait_for_function(f"() => {condition}", timeout=HANGS)

    def option(self, label, value):
        self.tab.get_by_label(label).fill(str(value))

    def say(self, text):
        self.tab.get_by_label("Message").fill(text)
        self.tab.get_by_role("button", name="Send").click()
        self.written()

    def written(self):
        """Until the answer is complete."""
        self.until("document.querySelector('.chat').dataset.writing === 'false'")

    @property
    def turns(self):
        """The turns that are shown: who, state, text."""
        return self.tab.eval_on_selector_all(
            ".turn",
            "all => all.map(e => [e.classList[1], e.dataset.state ?? 'said',"
            " e.querySelector('.said, .prose')?.textContent ?? ''])",
        )

    def stat(self, name):
        """The exact value below the last answer."""
        return float(self.tab.locator(f".turn.assistant [data-stat={name}]").last.get_attribute("data-value"))

    def kept(self):
        return self.tab.evaluate(
            "Object.keys(localStorage).filter(name => name.startsWith('tokenwright-chat-')).length"
        )


@pytest.fixture
def talk(explored):
    return Talk(explored)


def answered(server, ids, seed, tokens=24):
    """The model's answer to a prompt of these ids."""
    [answer] = server.llm.generate([ids], server.llm.sampling(temperature=2.0, top_k=0, seed=seed, max_tokens=tokens))
    return answer


def said(text):
    """A text without what Markdown takes from it: stories have none but line breaks."""
    return " ".join(text.split())


def test_a_conversation_its_branches_and_the_way_inside(talk, server):
    talk.option("max tokens", 24)
    talk.option("seed", 5)
    talk.option("temperature", 2)
    talk.option("top-k", 0)
    talk.option("system prompt", "You tell stories.")
    first = "Tell me of a fox. <|end|> </script>"
    talk.say(first)
    messages = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": first}]
    ids = list(server.llm.render(messages).ids)
    answer = answered(server, ids, 5)
    assert talk.turns[0] == ["user", "said", first]
    assert (talk.turns[1][1], said(talk.turns[1][2])) == ("done", said(answer.text))
    assert (talk.stat("prompt_tokens"), talk.stat("completion_tokens")) == (len(ids), len(answer.token_ids))

    talk.say("Tell me a story about a bear.")
    messages += [{"role": "assistant", "content": ""}, {"role": "user", "content": "Tell me a story about a bear."}]
    after = server.llm.render(messages).ids[len(ids) :]  # what follows an answer, here an empty one
    ids += [*answer.token_ids, *after]  # the answer as it was written, which its text may tokenise to otherwise
    answer = answered(server, ids, 5)
    assert said(talk.turns[3][2]) == said(answer.text)
    cached = talk.stat("cached_tokens")
    assert cached >= 16, "the second prompt begins as the first one did, whose pages are cached"
    assert cached < len(ids)
    assert talk.stat("tokens_per_s") > 0
    assert findings(talk, "document") == {}

    talk.option("seed", 6)
    talk.tab.get_by_role("button", name="Regenerate").last.click()
    talk.written()
    other = talk.turns[3][2]
    assert said(other) == said(answered(server, ids, 6).text) != said(answer.text)
    assert talk.tab.locator(".branch-count").inner_text() == "2/2"
    talk.tab.get_by_role("button", name="Version before").click()
    assert said(talk.turns[3][2]) == said(answer.text)
    talk.tab.get_by_role("button", name="Edit").first.click()
    talk.tab.get_by_label("Edited message").fill("Tell me of a bear.")
    talk.tab.get_by_role("button", name="Say this instead").click()
    talk.written()
    assert talk.turns[0][2] == "Tell me of a bear."
    assert len(talk.turns) == 2
    talk.tab.get_by_role("button", name="Version before").click()
    assert len(talk.turns) == 4, "with all that followed it"

    reused = int(talk.stat("cached_tokens"))
    talk.tab.get_by_role("link", name="Look inside").last.click()
    talk.explored.until("window.__explorer?.state.state === 'paused' || window.__explorer?.state.steps > 0")
    talk.explored.pace(None)
    talk.explored.until_state("done")
    talk.explored.press("Home")
    told = talk.tab.locator(".story-line").inner_text()
    assert reused >= 16 and f"In the chat {reused} of them were found in the cache" in told, told
    assert talk.explored.state["ids"] == [*ids, *answer.token_ids], "the very run: prompt, seed and options"
    assert "<|end|>" in talk.tab.locator("#prompt").input_value()
    talk.tab.get_by_role("button", name="Share", exact=True).click()
    assert talk.tab.get_by_role("menuitem", name="Copy link").is_disabled(), "a prompt of the chat is in no link"
    talk.explored.press("Escape")

    talk.tab.get_by_role("link", name="Chat").click()
    talk.until("document.querySelectorAll('.turn').length === 4")
    assert talk.kept() == 1
    talk.tab.on("dialog", lambda dialog: dialog.accept())
    talk.tab.get_by_role("button", name="Delete:").click()
    assert talk.kept() == 0
    assert talk.turns == []


def test_what_a_model_writes_stays_text_and_an_answer_can_be_stopped(talk, server):
    chunk = {"choices": [{"index": 0, "delta": {"content": HOSTILE}, "finish_reason": None}]}
    hostile = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    talk.tab.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=hostile, content_type="text/event-stream")
    )
    talk.say(HOSTILE)
    prose = talk.tab.locator(".prose")
    for text in ('<img src=x onerror="window.pwned=1">', "</code></pre><iframe src=x></iframe>", "<b>code</b>", "<svg"):
        assert text in prose.inner_text()
    assert talk.turns[0][2] == HOSTILE
    assert prose.locator("strong").inner_text() == "bold"
    assert talk.tab.locator(".turn :is(img, script, iframe, svg[onload], b, a[href^=javascript])").count() == 0
    assert talk.tab.evaluate("window.pwned") is None

    talk.tab.unroute("**/v1/chat/completions")
    endless = lambda route: route.continue_(post_data=route.request.post_data_json | {"ignore_eos": True})  # noqa: E731
    talk.tab.route("**/v1/chat/completions", endless)
    talk.option("max tokens", 1900)
    talk.tab.get_by_label("Message").fill("Tell me a long story.")
    talk.tab.get_by_role("button", name="Send").click()
    talk.until("document.querySelector('.turn:last-child .prose').textContent.length > 20")
    talk.tab.get_by_role("button", name="Stop").click()
    talk.written()
    assert talk.turns[-1][1] == "stopped"
    talk.tab.wait_for_timeout(300)
    assert server.service.running == 0, "the engine writes for nobody"


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_it_fits_the_window(talk, size):
    talk.tab.set_viewport_size({"width": size[0], "height": size[1]})
    if size[0] < 1100:
        talk.tab.get_by_role("button", name="Options").click()
    talk.option("max tokens", 60)
    if size[0] < 1100:
        talk.tab.get_by_role("button", name="Options").click()
        small = talk.tab.eval_on_selector_all(
            "button, a", "all => all.filter(e => e.offsetParent && e.getBoundingClientRect().height < 44).length"
        )
        assert small == 0
    talk.say("a " * 400 + "averyveryverylongword" * 20)
    width, height, scrolled = talk.tab.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.scrollHeight,"
        " document.querySelector('.composer').getBoundingClientRect().bottom]"
    )
    assert width <= size[0]
    assert height <= size[1]
    assert scrolled <= size[1]


def test_a_model_without_a_chat_template_goes_on_with_the_text(browser, tmp_path):
    folder = plain_stories(tmp_path)
    with serving(lambda report: LLM(folder, trace=True, report=report, pages=128)) as server:
        explored = Explored(browser.new_context(viewport=SIZE).new_page(), server.address)
        talk = Talk(explored)
        talk.until("document.querySelector('.notice')?.textContent.includes('no chat template')")
        talk.option("max tokens", 12)
        talk.option("seed", 3)
        talk.tab.get_by_label("Text").fill("Once upon a time")
        talk.tab.get_by_role("button", name="Continue").click()
        talk.written()
        params = server.llm.sampling(seed=3, max_tokens=12)
        [first] = server.llm.generate(["Once upon a time"], params)
        assert talk.turns[1][2] == first.text
        talk.tab.get_by_role("button", name="Continue").click()
        talk.written()
        [second] = server.llm.generate([f"Once upon a time{first.text}"], params)
        assert talk.turns[2][2] == second.text
        talk.tab.get_by_role("link", name="Look inside").last.click()
        explored.until("window.__explorer?.state.steps > 0")
        explored.pace(None)
        explored.until_state("done")
        assert explored.state["ids"] == [
            *server.llm.tokenizer.encode(f"Once upon a time{first.text}"),
            *second.token_ids,
        ]
        assert explored.errors == []
        talk.tab.context.close()


def test_a_key_is_asked_for_where_one_is_demanded(browser, server):
    with serving(server.load, keys=[KEY]) as locked:
        context = browser.new_context(viewport=SIZE, extra_http_headers={"authorization": f"Bearer {KEY}"})
        explored = Explored(context.new_page(), locked.address)
        talk = Talk(explored)
        talk.until("document.querySelector('.facts')")
        context.set_extra_http_headers({})  # the page is here; its calls now need a key of their own
        talk.say("Hello")
        assert talk.turns[1][1] == "failed"
        talk.option("This server demands a key", KEY)
        talk.tab.get_by_role("button", name="Use this key").click()
        talk.option("max tokens", 6)
        talk.tab.get_by_role("button", name="Regenerate").click()
        talk.written()
        assert talk.turns[1][1] == "done"
        assert talk.tab.evaluate("Object.values(localStorage).join('')").count(KEY) == 0
        context.close()


GIVE = """({ kind, name, data }) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type: "image/png" }));
  const given = kind === "drop" ? { dataTransfer: files } : { clipboardData: files };
  const made = kind === "drop" ? new DragEvent(kind, { ...given, bubbles: true, cancelable: true })
    : new ClipboardEvent(kind, { ...given, bubbles: true, cancelable: true });
  document.querySelector(".composer textarea").dispatchEvent(made);
}"""


def test_pictures_by_button_paste_and_drop_reach_the_model(browser, tmp_path):
    make_model(tmp_path, "gemma3")
    pictures = [picture(40, 32, seed) for seed in range(3)]
    encoded = []
    for one in pictures:
        file = io.BytesIO()
        one.save(file, "PNG")
        encoded.append(file.getvalue())
    with serving(lambda report: LLM(tmp_path, dtype="float32", report=report, trace=True)) as server:
        explored = Explored(browser.new_context(viewport=SIZE).new_page(), server.address)
        talk = Talk(explored)
        talk.until("document.querySelector('.facts')")
        for label, value in (("max tokens", 8), ("seed", 3), ("temperature", 0)):
            talk.option(label, value)
        talk.tab.get_by_label("Add pictures").set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": encoded[0]}
        )
        for at, kind in ((1, "paste"), (2, "drop")):
            talk.until(f"document.querySelectorAll('.composer img').length === {at}")
            talk.tab.evaluate(GIVE, {"kind": kind, "name": "b.png", "data": b64encode(encoded[at]).decode()})
        talk.until("document.querySelectorAll('.composer img').length === 3")
        talk.tab.get_by_role("button", name="Remove picture 2").click()
        talk.say("what?")
        asked = server.llm.chat(question(pictures[0], pictures[2], "what?"), temperature=0, max_tokens=8)
        assert talk.stat("prompt_tokens") == asked.usage.prompt_tokens
        assert said(talk.turns[1][2]) == said(asked.text)
        assert talk.tab.locator(".turn.user img").count() == 2
        assert talk.tab.locator(".composer img").count() == 0
        talk.say("and now?")
        assert talk.stat("cached_tokens") >= asked.usage.prompt_tokens - 16
        talk.tab.reload()
        talk.until("document.querySelectorAll('.turn.user img').length === 2")
        assert findings(talk, "document") == {}
        talk.tab.get_by_role("link", name="Look inside").first.click()
        explored.until("window.__explorer?.state.steps > 0")
        explored.pace(None)
        explored.until_state("done")
        ids = [*server.llm.render(question(pictures[0], pictures[2], "what?")).ids, *asked.token_ids]
        assert explored.state["ids"] == ids, "the very run"
        check_heat(explored, [at for at, token in enumerate(ids) if token == IMAGE])
        assert explored.errors == []
        talk.tab.context.close()


def check_heat(explored, patches):
    """Each token of two pictures is a cell of its own, shaded by what the chosen head reads of it."""
    tab = explored.tab
    for keys in ("]", "}", "{"):
        explored.press(keys)
        explored.until("document.querySelector('.heat-map rect')")
        state = explored.state
        row = explored.api(f"/attention?step={state['step']}&layer={state['layer']}&head={state['head']}")
        codes = b64decode(row["codes"])
        most = max(codes[at] for at in patches) ** 2 / 0.8
        shown = tab.eval_on_selector_all(
            ".heat-map rect", "all => all.map(e => [Number(e.dataset.position), Number(e.style.opacity)])"
        )
        assert dict(map(tuple, shown)) == pytest.approx(
            {at: codes[at] ** 2 / most for at in patches if codes[at]}, abs=1e-3
        )
    assert tab.locator(".heat-map image").count() == 2
    tab.locator(f".heat-map rect[data-position='{patches[-1]}']").hover()
    assert tab.locator(".token.hovered").get_attribute("data-position") == str(patches[-1])
    explored.settle()
    drawn = "() => document.querySelector('.patches').getContext('2d').getImageData(0, 0, 9e3, 9e3).data.some(Boolean)"
    assert tab.evaluate(drawn), "the patches stand on the stage"
    assert findings(explored, ".attention") == {}
