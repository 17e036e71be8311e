"""The live page from a plain file server, the engine in its worker. `scripts/wasm` builds the site and runs this."""

import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.browser.conftest import GROUPS, HANGS, SIZE, Explored
from tests.browser.hosted import hosted
from tests.examples.course_answers import wrong_answers
from tokenwright import LLM, plan
from tokenwright.environment import Environment
from web.course.answers import LESSONS, answer

PROMPT, TOKENS = "The blue whale said", 16
LINK = f"#p={quote(PROMPT)}&seed=1&T={{temperature}}&n={TOKENS}&pace=engine"

# Whether this processor multiplies and adds with one rounding: all of ARM's do, and x86's with FMA.
FUSES = platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text(encoding="utf-8")

MOVE = "() => { try { top.location.href = 'about:blank'; return 'moved'; } catch (error) { return error.name; } }"


@pytest.fixture(scope="module")
def live(browser):
    """A visit. `away` ends the host; `asked` are the addresses of all requests, also those of the service worker."""
    with ExitStack() as stack:
        address = stack.enter_context(hosted(Path(os.environ["TOKENWRIGHT_SITE"])))
        context = browser.new_context(viewport=SIZE, color_scheme="dark", reduced_motion="reduce")
        explored = Explored(context.new_page(), address)
        explored.away, asked = stack.close, []
        context.on("request", lambda request: asked.append(request.url))
        yield explored
        context.close()
        assert explored.errors == []
        kernels = {url.rpartition("/")[2].partition("-")[0] for url in asked} & {"relaxed", "exact"}
        assert kernels == {"relaxed" if FUSES else "exact"}, "the worker's requests are seen, and the kernels that fuse"
        strange = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
        assert not strange, "the page asked another host"


def written(live, where):
    """The ids of a whole run, from a fresh page."""
    live.tab.goto("about:blank")
    live.open(where)
    live.until("__explorer.state.origin === 'live'")
    live.until_state("done")
    return live.state["ids"]


def expected(temperature):
    with LLM("stories") as llm:
        [done] = llm.generate(PROMPT, temperature=temperature, seed=1, max_tokens=TOKENS)
        return [*llm.tokenizer.encode(PROMPT), *done.token_ids]


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_texts_are_the_server_s_with_the_cache_and_without(live, temperature):
    ids = expected(temperature)
    assert written(live, LINK.format(temperature=temperature)) == ids
    if temperature:
        assert written(live, LINK.format(temperature=temperature) + "&cache=off") == ids


def test_figures_beyond_32_bits_are_the_planner_s(live):
    """A page's processor has 32 bits, in which a range of tokens must fit."""
    live.until("__explorer.state.origin === 'live'")
    plan_of = {"model": "Llama-3.1-405B", "context": 131_072, "batch": 1}
    found, expected = live.post("calculate", plan_of), plan("llama-3.1-405b", context=131_072)
    assert (found["kv_total"], found["exceeds_at"]) == (expected.kv_bytes_total, expected.cache_exceeds_weights_at)
    assert live.post("check/balance", {"answer": {"tokens": 3759, "tokens_batch": 470}})["passed"]


def test_there_is_no_panel_of_a_server_s_clients(live):
    """The chat has a worker of its own, so a panel on the turns of conversations would stay empty."""
    live.open()
    live.drawer("Race")
    names = live.tab.locator(".panel-row:not(.groups) button").all_inner_texts()
    assert tuple(names) == GROUPS["Experiments"] and "Conversations" not in names
    live.drawer(None)


def offered(live, path):
    """Choose a model's file from the menu Share; what the page says of it."""
    live.tab.get_by_role("button", name="Share", exact=True).click()
    with live.tab.expect_file_chooser() as chosen:
        live.tab.get_by_role("menuitem", name="Open a model").click()
    chosen.value.set_files(path)
    said = live.tab.locator("[aria-label='Your own model']").or_(live.tab.get_by_text("cannot run here"))
    return said.first.inner_text()


def answered(live, message):
    """The answer of the chat, and how many tokens of its prompt were found in the cache."""
    live.tab.get_by_label("Message").fill(message)
    live.tab.get_by_role("button", name="Send").click()
    live.until("document.querySelector('.chat').dataset.writing === 'false'")
    last = live.tab.locator(".turn.assistant").last
    found = last.locator("[data-stat=cached_tokens]").get_attribute("data-value")
    return last.locator(".prose").inner_text(), int(found)


def chatting(live):
    """The chat page, anew."""
    live.tab.goto("about:blank")
    live.tab.goto(f"{live.address}/chat/")
    live.until("!document.body.innerText.includes('The model is loading')")
    for label, value in (("max tokens", 8), ("temperature", 0)):
        live.tab.get_by_label(label).fill(str(value))


def test_a_visitor_s_model_runs_here_and_its_conversations_survive_a_reload(live, tmp_path):
    file = Path(Environment.read().cache_folder("real"), "SmolLM2-135M-Instruct.Q4_1.gguf")
    if not file.exists():
        pytest.skip("scripts/real_model fetches the model")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:1_000_000])
    live.tab.goto("about:blank")
    live.empty()
    assert "cut.gguf is damaged" in offered(live, cut)
    live.tab.get_by_label("Dismiss").click()
    told = offered(live, file)
    assert "93.8 MiB" in told and "30 layers" in told, told
    with live.tab.expect_navigation():
        live.tab.get_by_role("button", name="Run it here").click()
    chatting(live)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(file) as llm:
        expected = llm.chat(messages, temperature=0.0, max_tokens=8).text
    assert answered(live, messages[0]["content"]) == (expected, 0)
    _, found = answered(live, "And of Italy?")
    live.tab.wait_for_timeout(2000)  # until its K and V are in the browser's storage
    chatting(live)
    assert answered(live, "And of Spain?")[1] > found > 0
    live.empty()
    live.tab.get_by_role("button", name="Share", exact=True).click()
    with live.tab.expect_navigation():
        live.tab.get_by_role("menuitem", name="Back to the small model").click()


def test_the_chat_computes_on_a_visitor_s_gpu_what_the_processor_writes(live, launch):
    """By the same shaders as a server, over the browser's software device; without one the page says so."""
    message = "Once upon a time there was a"
    with LLM("stories") as llm:
        expected = llm.chat([{"role": "user", "content": message}], temperature=0, max_tokens=8).text
    chatting(live)
    live.tab.get_by_role("button", name="New conversation").click()
    assert answered(live, message)[0] == expected
    live.tab.goto(f"{live.address}/chat/?device=gpu")
    live.tab.get_by_text("no such GPU adapter was found; the options have a link to the processor").wait_for()
    with live.tab.expect_navigation():
        live.tab.get_by_role("link", name="Use the processor").click()
    live.until("!document.body.innerText.includes('The model is loading')")
    browser = launch("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
    there = Explored(browser.new_page(viewport=SIZE), live.address)
    chatting(there)
    with there.tab.expect_navigation():
        there.tab.get_by_role("link", name="Use the GPU").click()
    there.tab.set_default_timeout(5 * HANGS)  # the software device proves its kernels first
    there.until("!document.body.innerText.includes('The model is loading')")
    for label, value in (("max tokens", 8), ("temperature", 0)):
        there.tab.get_by_label(label).fill(str(value))
    assert there.tab.get_by_text("Your GPU computes (WebGPU)").is_visible()
    assert answered(there, message) == (expected, 0)
    assert there.errors == []
    browser.close()


def test_an_article_of_another_origin_embeds_the_stage_which_cannot_reach_it(live, tmp_path):
    script = Path(os.environ["TOKENWRIGHT_SITE"], "tokenwright.js")
    assert len(script.read_bytes()) <= 60_000
    tag = f'<tokenwright-stage prompt="{PROMPT}" tokens="{TOKENS}" cache="off"></tokenwright-stage>'
    (tmp_path / "index.html").write_text(f'<script src="{live.address}/tokenwright.js" defer></script>{tag}')
    with hosted(tmp_path) as article:
        context, asked = live.tab.context.browser.new_context(viewport={"width": 320, "height": 700}), []
        tab = context.new_page()
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(article)
        stage = tab.locator("tokenwright-stage")
        box = stage.bounding_box()
        assert box["width"] <= 320 and tab.evaluate("document.documentElement.scrollWidth") <= 320
        assert [url for url in asked if not url.startswith(article)] == [f"{live.address}/tokenwright.js"]
        assert len(tab.frames) == 1, "a still picture until it is pressed"
        with tab.expect_event("framenavigated", lambda frame: frame.url.startswith(live.address)):
            tab.mouse.click(box["x"] + 60, box["y"] + box["height"] - 32)
        [_, inside] = tab.frames
        inside.wait_for_function("() => window.__explorer?.state.origin === 'live'", timeout=HANGS)
        assert "cache=off" in inside.url
        assert inside.evaluate(MOVE) == "SecurityError"
        assert inside.evaluate("window.open('about:blank')") is None, "no window"
        assert tab.url.startswith(article)
        context.close()


def lesson(live, name, code):
    """Write code into the cell of a lesson and run it: whether it passed, and what the page says."""
    cell, article = live.tab.get_by_label("Python of this lesson"), live.tab.locator("article[data-lesson]")
    if article.get_attribute("data-lesson") != name:
        live.tab.locator(f".learn-contents li:nth-child({[*LESSONS].index(name) + 1}) button").click()
    cell.fill(code)
    cell.press("Control+Enter")
    verdict = article.locator("[data-passed]")
    verdict.wait_for(timeout=HANGS)
    return verdict.get_attribute("data-passed") == "true", verdict.inner_text()


def test_the_course_is_written_from_beginning_to_end(live):
    """By its typical wrong answers and its right ones, in the engine's worker; the last lesson is the real engine."""
    fetched = []
    live.tab.on("request", lambda request: fetched.append("/engine/course-" in request.url))
    live.tab.goto("about:blank")
    live.empty()
    live.until("__explorer.state.origin !== 'recorded'")
    assert not any(fetched), "the course is fetched when it is opened"
    live.open("#p=&panel=course")
    live.tab.get_by_label("Python of this lesson").wait_for(timeout=HANGS)
    for name in LESSONS:
        for code, hint in wrong_answers(name):
            passed, told = lesson(live, name, code)
            assert not passed and hint in told, (name, told)
        assert lesson(live, name, answer(name))[0], name
    assert "7 of 7" in live.tab.locator(".learn-progress").inner_text()
    with live.tab.expect_download() as saved:
        live.tab.get_by_role("button", name="Save your engine").click()
    assert "def generate(forward" in Path(saved.value.path()).read_text()
    live.tab.reload()
    live.tab.get_by_label("Python of this lesson").wait_for(timeout=HANGS)
    assert live.tab.get_by_label("Python of this lesson").input_value() == answer("preemption")


def test_code_that_never_ends_is_stopped_and_the_engine_starts_again(live):
    """Typed by keys; a run that is shown goes on afterwards, with the text that it would have had."""
    live.tab.goto("about:blank")
    live.open(LINK.format(temperature=0).replace("pace=engine", "step=2&panel=course"))
    live.until("__explorer.state.origin === 'live'")
    cell = live.tab.get_by_label("Python of this lesson")
    live.tab.locator(".learn-contents li:first-child button").click()
    cell.fill("")
    cell.press_sequentially("def generate(forward, tokens, count, end_ids):\nwhile True:\npass")
    assert cell.input_value().endswith(":\n    while True:\n        pass"), "lines begin where they belong"
    cell.press("Control+Enter")
    live.tab.get_by_role("button", name="Stop", exact=True).click()
    live.tab.get_by_text("The engine has started again").wait_for(timeout=HANGS)
    assert lesson(live, "loop", answer("loop"))[0]
    live.tab.locator(".transport").get_by_role("button", name="Play").click()
    live.pace(None)
    live.until_state("done")
    assert live.state["ids"] == expected(0)


def test_a_later_visit_needs_no_network(live):
    """The service worker and the worker's cache have all files."""
    live.until("navigator.serviceWorker.controller !== null")
    live.away()
    start = time.perf_counter()
    assert written(live, LINK.format(temperature=0)) == expected(0)
    print(f"live from the cache, and {TOKENS} tokens written, after {time.perf_counter() - start:.1f} s")
    steps = sorted(live.api(f"/steps/{step}")["step_us"] for step in range(1, TOKENS))
    print(f"a step of one token takes {steps[1] / 1000:.1f} ms, the second least of {len(steps)}")
