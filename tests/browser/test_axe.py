"""axe finds nothing serious on either page, with any panel, in any look. CI looks at the panels where it fills them."""

import pytest

from tests.browser.conftest import GROUPS, SIZE, Explored
from tests.browser.looks import LOOKS, findings

RUN = "#p=Once%20upon%20a%20time&seed=1&step=4&renderer=2d"


@pytest.mark.sweep
def test_no_page_and_no_panel_has_a_serious_finding(browser, server):
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce")
    explored = Explored(context.new_page(), server.address).open(RUN)
    explored.until("window.__explorer.state.step >= 4")
    found = {"closed": findings(explored, "document", LOOKS)}
    with explored.settings():
        found["settings"] = findings(explored, "document", LOOKS)
    for name in ("Learn", "Numbers", *GROUPS["Look inside"], *GROUPS["Experiments"]):
        explored.drawer(name)
        if name not in ("Numbers", "Next token"):
            explored.tab.locator(".panel > *").first.wait_for()
        explored.settle()
        found[name] = findings(explored, "document", LOOKS)
        for card in range(1, 9) if name == "Learn" else ():
            explored.tab.locator(f".learn-contents li:nth-child({card}) button").click()
            found[f"{name}, card {card}"] = findings(explored, ".rail", LOOKS)
    explored.tab.goto(f"{server.address}/chat")
    explored.until("document.querySelector('.facts') !== null")
    found["Chat"] = findings(explored, "document", LOOKS)
    assert {name: problems for name, problems in found.items() if problems} == {}
    context.close()
