"""axe finds nothing serious on the page with any panel, in dark, light and forced colours."""

import pytest

from tests.browser.conftest import SIZE, Explored
from tests.browser.test_learn import LOOKS, serious

RUN = "#p=Once%20upon%20a%20time&seed=1&step=4&renderer=2d"


@pytest.mark.sweep
@pytest.mark.parametrize("look", LOOKS)
def test_no_panel_has_a_serious_finding(browser, server, look):
    context = browser.new_context(viewport=SIZE, reduced_motion="reduce", **LOOKS[look])
    explored = Explored(context.new_page(), server.address).open(RUN)
    explored.until("window.__explorer.state.step >= 4")
    buttons = explored.tab.locator(".panel-buttons button")
    found = {}
    for number in range(buttons.count()):
        name = buttons.nth(number).inner_text()
        buttons.nth(number).click()
        explored.until(f"document.querySelectorAll('.panel-buttons button')[{number}].ariaPressed === 'true'")
        explored.until(
            "document.querySelector('.page').dataset.panel === 'false' || document.querySelector('.panel > *')"
        )
        explored.settle()
        if problems := serious(explored, "document"):
            found[name] = problems
        for card in range(2, 9) if name == "Learn" else ():
            explored.tab.locator(f".learn-contents li:nth-child({card}) button").click()
            if problems := serious(explored):
                found[f"{name}, card {card}"] = problems
    assert found == {}
    context.close()
