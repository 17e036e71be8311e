"""The panels that look inside: what they show is the server's answer, what is chosen there is shown on the stage."""

import json
import time

from tests.browser.conftest import near
from tests.browser.looks import findings

PROMPT = "Once upon a time, there was a little fox who"
# The panel tells what the server says now.
SHOWN = """fetch('%s').then((answer) => answer.json()).then(({ groups: [{ used }] }) =>
  document.querySelector('[data-stat=pool_used]')?.dataset.value === String(used))"""
WRITE = """id => fetch(`batches/${id}/write`, { method: 'POST', body: '{"tokens": 1}',
  headers: { 'content-type': 'application/json' } })"""


def opened(explored, name):
    """Open a panel by its button."""
    explored.drawer(name)
    explored.tab.locator(".panel-lead").wait_for()


def clean(explored):
    """Nothing serious by axe in any look; nothing wider than the page."""
    assert findings(explored, ".panel") == {}
    assert explored.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def told(explored, prefix, answer, names):
    """The figures of a panel against a message."""
    stats = explored.stats()
    for name in names:
        assert float(stats[f"{prefix}_{name}"][0]) == float(answer[name]), name


def test_pages_blocks_and_heads(explored):
    explored.run(PROMPT, 24, renderer="2d", stop=14)
    check_pages(explored)
    check_block(explored)
    check_heads(explored)


def ended_late(route):
    """The batch ends after the page has looked at the pool: it looks again."""
    time.sleep(0.5)
    route.continue_()


def last_answer(tab, url):
    """The next answer that the page gets, and gets again: runs of closed tabs may end while the page is looked at."""
    answers = []

    def give(route):
        if not answers:
            answers.append(route.fetch())
        route.fulfill(response=answers[0])

    with tab.expect_response(lambda _: bool(answers)):
        tab.route(url, give)
    return answers[0].json()


def check_pages(explored):
    tab = explored.tab
    opened(explored, "Pages")
    prompts = tab.locator(".panel textarea")
    told_by_none_else = [f"Far away, {line}" for line in prompts.input_value().splitlines()]
    prompts.fill("\n".join(told_by_none_else))
    tab.get_by_role("button", name="Start the batch").click()
    explored.until("document.querySelectorAll('[data-refcount=\"3\"]').length === 2")
    tab.get_by_role("button", name="Pause the batch").click()
    run = explored.state["run"]
    explored.until("document.querySelectorAll('tr[data-whose=batch]').length === 3")
    reused = [int(cell.inner_text()) for cell in tab.locator("tr[data-whose=batch] [data-reused]").all()]
    assert reused == [0, 32, 32], "the second and the third find the two pages that the first has computed"
    tab.route("**/batches/*", ended_late)
    with tab.expect_response(lambda response: response.request.method == "DELETE"):
        tab.get_by_role("button", name="End the batch").click()
    tab.unroute("**/batches/*")
    explored.until("document.querySelectorAll('tr[data-whose=batch]').length === 0")
    [group] = last_answer(tab, "**/pages?*")["groups"]
    explored.until(f"document.querySelector('[data-stat=pool_used]').dataset.value === '{group['used']}'")
    told(explored, "pool", group, ("used", "shared", "cached", "free", "pages", "page_bytes", "saved_bytes"))
    cells = tab.eval_on_selector_all(
        "[data-page]", "all => all.map(e => [e.dataset.page, e.dataset.refcount, e.dataset.filled].map(Number))"
    )
    assert cells == [[page["page"], page["refcount"], page["filled"]] for page in group["listed"]]
    assert group["used"] >= 2 and group["cached"] > 0  # the page's first run may still have its own
    tab.unroute("**/pages?*")
    another = explored.post("batches", {"prompts": [f"An old bear slept. {PROMPT}"], "max_tokens": 8})["batch"]
    explored.tab.evaluate(WRITE, another)  # as another tab does while this page rests
    explored.until(SHOWN % f"pages?run={run}")
    explored.tab.evaluate("id => fetch(`batches/${id}`, { method: 'DELETE' })", another)
    explored.until(SHOWN % f"pages?run={run}")
    clean(explored)


def check_block(explored):
    tab = explored.tab
    opened(explored, "Block")
    for position, layer in ((25, 4), (7, 1)):
        if position == 7:  # a cell of the wall on the stage
            explored.settle()  # the panel has made the stage narrower
            tile, box = explored.project(position), tab.locator(".canvas canvas").bounding_box()
            for down in range(20, round(box["height"] - tile["y"]), 5):
                tab.mouse.click(box["x"] + tile["x"], box["y"] + tile["y"] + down)
                if explored.state["layer"] == layer:
                    break
            assert explored.state["layer"] == layer, "no place of the wall is that layer's"
        else:
            tab.evaluate("document.querySelector('[data-cell=\"25/4\"]').click()")
        right = explored.api(f"/block?step=14&layer={layer}&position={position}")
        norms = json.dumps([str(stage["norm"]) for stage in right["stages"]])
        explored.until(
            f"JSON.stringify([...document.querySelectorAll('[data-norm]')].map(e => e.dataset.norm))"
            f" === JSON.stringify({norms}.map(n => String(Number(n))))"
        )
        told(explored, "block", right, ("context", "kv_bytes", "flops", "model_flops"))
        flops = tab.eval_on_selector_all("[data-flops]", "all => all.map(e => Number(e.dataset.flops))")
        assert flops == [stage["flops"] for stage in right["stages"] if stage["flops"]]
        assert explored.state["layer"] == layer, "the beams go with it"
    clean(explored)


def check_heads(explored):
    tab = explored.tab
    opened(explored, "Heads")
    right = explored.api("/atlas?step=14")
    tab.locator("[data-head]").first.wait_for()
    kinds = tab.eval_on_selector_all("[data-kind]", "all => all.map(e => e.dataset.kind)")
    assert kinds == [head["kind"] for head in right["heads"]]
    for kind in right["kinds"]:
        assert int(tab.locator(f"[data-count={kind}]").inner_text()) == kinds.count(kind)
    explored.until("document.querySelector('.matrix canvas')?.dataset.size === '26'")
    tab.locator("[data-head='1/3']").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowLeft")
    assert (explored.state["layer"], explored.state["head"]) == (2, 2)
    assert tab.evaluate("document.activeElement.dataset.head") == "2/2"
    assert explored.state["step"] == 14, "the arrows move among the heads alone"
    explored.until("document.querySelector('.matrix canvas').getAttribute('aria-label').includes('layer 2, head 2')")
    lens = explored.api("/lens?step=14")
    shown = tab.eval_on_selector_all("[data-probability]", "all => all.map(e => Number(e.dataset.probability))")
    assert shown == [row["probability"] for row in lens["rows"]]
    clean(explored)


def test_calculator_lab_and_beams(explored):
    explored.run(PROMPT, 40, renderer="2d", stop=10)
    tab = explored.tab
    opened(explored, "Calculator")
    tab.get_by_label("context", exact=True).fill("8192")
    tab.get_by_label("model", exact=True).select_option("Meta-Llama-3-8B")
    tab.get_by_label("weights as").select_option("bfloat16")
    explored.until("document.querySelector('[data-stat=calc_kv_total]')?.dataset.value === String(2 ** 30)")
    explored.until("document.querySelector('[data-stat=calc_base_flops]')?.dataset.value === '15009316864'")
    wanted = {"model": "Meta-Llama-3-8B", "context": 8192, "weights": "bfloat16"}
    right = explored.post("calculate", wanted)
    told(explored, "calc", right, ("kv_per_token", "kv_per_sequence", "kv_total", "weight_bytes", "slope_flops"))
    clean(explored)
    opened(explored, "Lab")
    tab.get_by_label("window").fill("12")
    tab.get_by_role("button", name="Compare").click()
    tab.locator(".lab-text").wait_for()
    right = explored.post(f"runs/{explored.state['run']}/lab", {"kv": "int4", "window": 12})
    told(explored, "lab", right, ("full_bytes", "kept_bytes", "page_bytes", "pages", "same", "mean_kl", "mean_delta"))
    assert right["changed"] and right["kept_bytes"] < right["full_bytes"] / 4
    marks = tab.eval_on_selector_all(
        ".lab-text > span", "all => all.flatMap((e, i) => e.classList.contains('changed') ? [i] : [])"
    )
    assert marks == [one["position"] for one in right["changed"]]
    lit = tab.eval_on_selector_all(".token.changed", "all => all.map((e) => Number(e.dataset.position))")
    assert lit == marks, "they light up in the text of the stage, too"
    blue = near(explored.picture(), explored.colour("kept"), 40)
    wall, last = explored.tab.evaluate("window.__explorer.wall"), len(explored.state["ids"]) - 2
    rows = blue[int(wall["top"]) : int(wall["bottom"])]
    part = [rows[:, round(explored.project(at)["x"]) - 8 :][:, :16].mean() for at in (last - 13, last - 6)]
    assert part[0] == 0 < part[1] < 0.5, "the first has left the window; numbers of four bits are narrow"
    clean(explored)
    opened(explored, "Beams")
    tab.get_by_label("tokens", exact=True).fill("8")
    tab.get_by_role("button", name="Search").click()
    right = explored.post("beams", {"prompt": PROMPT, "beams": 4, "max_tokens": 8})
    explored.until(
        f"Number(document.querySelector('[data-stat=beams_best_sum]')?.dataset.value) === {right['best_sum']!r}"
    )
    told(explored, "beams", right, ("best_sum", "greedy_sum", "gain"))
    texts = [item.inner_text() for item in tab.locator(".beam-texts .beam-text").all()]
    assert texts == [one["text"].strip() for one in right["best"]] + [right["greedy_text"].strip()]
    ranks = tab.eval_on_selector_all("[data-rank]:not([data-rank=''])", "all => all.map(e => Number(e.dataset.rank))")
    assert sorted(ranks) == list(range(len(right["best"])))
    clean(explored)
