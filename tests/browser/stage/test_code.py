"""The panel Code: the listing follows the switch, the lit line the step, and the engine's lines are the engine's."""

import re

from tests.browser.conftest import ROOT
from tests.browser.looks import findings

RUN = "#p=Once%20upon%20a%20time&seed=1&T=0.7&n=40&step=12&pace=0.25&renderer=2d"
LISTINGS = ROOT / "web" / "src" / "panels" / "code" / "listings.ts"


def opened(explored, where=RUN):
    explored.open(where)
    explored.until("window.__explorer.state.step === 12")
    explored.tab.get_by_role("button", name="In code").click()
    explored.tab.locator(".code-lines").wait_for()
    return explored


def lines(explored):
    """The lines of the open listing, each with what stands under it, and the one that is lit."""
    rows = explored.tab.locator(".code-lines li")
    each = rows.evaluate_all("all => all.map((e) => [...e.children].map((one) => one.textContent.trim()))")
    lit = explored.tab.locator(".code-lines .lit code").all_inner_texts()
    return {code: beside[0] if beside else "" for code, *beside in each}, [one.strip() for one in lit]


def test_the_listing_follows_the_switch_and_has_the_steps_numbers(explored):
    opened(explored)
    model, step = explored.get("model"), explored.api("/steps/12")
    found, lit = lines(explored)
    assert 8 <= len(found) <= 14 and lit == ["new = [next_token]"]
    shape = [1, model["kv_heads"], step["start"] + 1, model["head_size"]]
    assert str(shape) in found["K, V = cache[layer].append(k, v)"], "batch, KV heads, positions, head size"
    assert found["x = embed(new)"] == "1 token"
    assert f"= {step['layer_tokens']} cells" in found["for layer in layers:"]
    explored.press("n")
    explored.step()
    explored.until("document.querySelector('.code-lines').dataset.listing === 'without'")
    step, (found, lit) = explored.api("/steps/13"), lines(explored)
    assert 8 <= len(found) <= 12 and lit == ["tokens.append(next_token)"]
    assert found["x = embed(tokens)"] == f"{step['length']} tokens"
    assert found["q, k, v = layer.qkv(norm(x))"] == f"{step['recomputed']} of them again"
    explored.press("ArrowLeft")
    explored.until("document.querySelector('.code-lines').dataset.listing === 'with'")
    assert findings(explored) == {}
    for stop, line in (("word", "tokens = tokenize(prompt)"), ("embedding", "x = embed(new)")):
        explored.press("i")
        explored.tab.locator(f".way[data-stop={stop}]").wait_for()
        assert lines(explored)[1] == [line], "a flight has stopped there"


def test_the_lit_line_goes_with_the_moments_of_a_step(animated):
    opened(animated)
    animated.tab.evaluate("""() => {
      window.seen = [];
      const look = () => {
        const { moment } = document.querySelector('.page').dataset;
        const lit = document.querySelector('.code-lines .lit code')?.textContent.trim();
        if (!window.seen.some(([one, other]) => one === moment && other === lit)) window.seen.push([moment, lit]);
        requestAnimationFrame(() => setTimeout(look));
      };
      look();
    }""")
    animated.press("Space")
    animated.until("window.__explorer.state.step >= 14 && new Set(window.seen.map(([moment]) => moment)).size >= 2")
    seen = dict(animated.tab.evaluate("window.seen"))
    lit = {"look": "x = x + layer.attend(q, K, V)", "rest": "new = [next_token]"}
    lit |= dict.fromkeys(("pass", "work"), "q, k, v = layer.qkv(norm(x))")
    assert len(seen) >= 2 and seen.items() <= (lit | {"write": "next_token = sample(head(x[-1]))"}).items()


def test_the_engines_lines_are_in_its_sources():
    """In their order, in the files that the panel names."""
    source = LISTINGS.read_text(encoding="utf-8")
    for listing in re.split(r"\n    id: ", source)[3:]:
        [path] = re.findall(r"[\w/]+\.py", listing)
        shown = re.findall(r'text: "([^"]+)"', listing)
        _, _, code = (ROOT / path).read_text(encoding="utf-8").partition("    def step(self)")
        assert len(shown) == 4
        places = [code.index(line) for line in shown]
        assert places == sorted(places) and places[-1] - places[0] < 900, path


def test_on_a_phone_the_code_stands_under_the_stage(explored):
    """The wall and the first lines are on one screen."""
    explored.tab.set_viewport_size({"width": 390, "height": 844})
    explored.run("Once upon a time", 6, renderer="2d", stop=2)
    explored.tab.locator(".see-code").click()
    explored.tab.locator(".code-lines li").first.wait_for()
    explored.settle()
    wall = explored.tab.locator(".view").bounding_box()
    line = explored.tab.locator(".code-lines li").first.bounding_box()
    assert wall["height"] >= 200 and wall["y"] + wall["height"] <= line["y"] and line["y"] + line["height"] <= 844
