"""The panel Drafts: its figures are the server's answer, its ghosts are the drafts, and the stage decides them."""

from tests.browser.looks import findings

PROMPT = "Once upon a time there was a little girl named Lily. She loved to play in the park. " * 2
FIGURES = ("steps", "tokens", "drafting", "drafted", "kept", "per_step", "cost", "plain_cost", "second_row")
LOOK = """(all) => all.map((one) => ({
  kind: one.classList.contains('ahead') ? 'ahead' : one.classList.contains('now') ? 'now' : 'behind',
  kept: [...one.querySelectorAll('ins')].map((token) => token.textContent),
  rejected: [...one.querySelectorAll('del')].map((token) => token.textContent),
  struck: [...one.querySelectorAll('del')].every((token) =>
    getComputedStyle(token).textDecorationLine === 'line-through'),
  says: one.querySelector('.sr')?.textContent ?? '',
}))"""


def look(token):
    return token["text"].replace("\n", "⏎") if token["text"].strip() else None  # white space is drawn as a sign


def check(explored, answer, position):
    """The panel against the server's answer, with the token at `position` as the newest on the stage."""
    explored.until(f"document.querySelector('[data-stat=drafts_cost]')?.dataset.value === '{answer['cost']}'")
    stats = explored.stats()
    assert {name: float(stats[f"drafts_{name}"][0]) for name in FIGURES} == {name: answer[name] for name in FIGURES}
    shown = explored.tab.locator(".draft-step").evaluate_all(LOOK)
    assert len(shown) == len(answer["each"])
    for step, found in zip(answer["each"], shown, strict=True):
        drafts, kept, last = step["drafts"], step["kept"], step["position"] + len(step["written"]) - 1
        kind = "ahead" if step["position"] > position else "now" if position <= last else "behind"
        assert found["kind"] == kind
        assert (len(found["kept"]), len(found["rejected"])) == (kept, len(drafts) - kept)
        for token, text in zip(drafts, (*found["kept"], *found["rejected"]), strict=True):
            assert look(token) in (None, text)
        assert found["struck"] == (kind != "ahead" or not found["rejected"])
        assert (f"{kept} kept" in found["says"]) == bool(drafts)


def test_drafts_are_the_servers_and_come_with_the_stage(explored):
    explored.run(PROMPT, 60, temperature=0.0, renderer="2d", stop=59)
    explored.drawer("Drafts")
    paid, every = explored.api("/drafts"), explored.api("/drafts?free=true")
    assert 0 < every["kept"] <= every["drafted"] and paid["kept"] <= paid["drafted"] <= every["drafted"]
    prompt = explored.steps(1)[0]["seq_len"] - 1
    check(explored, paid, prompt + 59)
    # How many drafts pay for their rows is this machine's: its costs are measured.
    saved = f"{paid['steps']} steps instead of 60" if paid["steps"] < 60 else "as many steps, 60"
    be = "was" if paid["kept"] == 1 else "were"
    drafted = "1 drafted token" if paid["drafted"] == 1 else f"{paid['drafted']} drafted tokens"
    assert explored.tab.locator(".panel .panel-result").inner_text() == (
        f"With drafts this text takes {saved}: {paid['kept']} of {drafted} {be} kept."
        if paid["drafted"]
        else "Nothing was drafted: this text takes 60 steps with drafts and without."
    )
    explored.tab.get_by_label("draft as if each row cost nothing").check()
    check(explored, every, prompt + 59)
    explored.scrub(30)
    check(explored, every, prompt + 30)
    drafted = [step["position"] - prompt for step in every["each"] if step["drafts"]]
    after = [n for n in drafted if n > 30]
    before = [n for n in reversed(drafted) if n < max([30, *after])]
    for button, steps in (("Next draft →", after), ("← Draft before", before)):
        for n in steps:
            explored.tab.get_by_role("button", name=button).click()
            explored.until(f"window.__explorer.state.step === {n}")
        assert explored.tab.get_by_role("button", name=button).is_disabled()
    check(explored, every, prompt + drafted[0])
    assert findings(explored, ".panel") == {}
    explored.tab.set_viewport_size({"width": 390, "height": 844})
    assert explored.tab.evaluate("document.documentElement.scrollWidth") <= 390
    wide = "(all) => all.filter((one) => one.getBoundingClientRect().right > 390).length"
    assert explored.tab.locator(".panel :is(ins, del, button, label, dd)").evaluate_all(wide) == 0


def test_a_run_that_goes_on_shows_the_drafts_of_the_next_step(explored):
    """A text of three tokens repeated has drafts at its end; they are ghosts until its next tokens are there."""
    explored.run(PROMPT, 60, temperature=0.0, renderer="2d", stop=8)
    explored.drawer("Drafts")
    every = explored.tab.get_by_label("draft as if each row cost nothing")
    every.check()
    every.blur()  # the keys are the stage's again
    before = explored.api("/drafts?free=true")
    check(explored, before, explored.steps(1)[0]["seq_len"] - 1 + 8)
    while not (card := explored.api("/drafts?free=true"))["each"][-1]["open"]:
        explored.step()
    assert explored.state["steps"] < 60
    ghosts = explored.tab.locator(".draft-step .draft-ghost")
    ghosts.first.wait_for()
    assert card["each"][-1]["drafts"][-1]["text"].strip() == ghosts.last.inner_text().strip()
    assert "not decided yet" in explored.tab.locator(".draft-step").last.inner_text()
