"""axe on a part of the page in its three looks: dark, light and forced colours, without loading the page again."""

from importlib.resources import files

from tests.profiles import some

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
LOOKS = ("dark", "light", "forced colours")
ALL = {"resultTypes": ["violations"]}
# Chromium tells -webkit-text-fill-color, which axe reads, as it was before colours were forced: the others are painted.
CHECK = """async ([where, rules]) => {
  const part = where === 'document' ? 'body *' : `${where}, ${where} *`
  const all = matchMedia('(forced-colors: active)').matches ? [...document.querySelectorAll(part)] : []
  const colours = all.map((one) => getComputedStyle(one).color)
  all.forEach((one, i) => one.style.setProperty('-webkit-text-fill-color', colours[i]))
  try {
    return (await axe.run(where === 'document' ? document : where, rules)).violations
  } finally {
    all.forEach((one) => one.style.removeProperty('-webkit-text-fill-color'))
  }
}"""
COLOURS = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}  # what depends on the look is contrast


def look(explored, name):
    """Give the page this look."""
    explored.tab.emulate_media(forced_colors="active" if name == "forced colours" else "none")
    theme = "light" if name == "light" else "dark"
    explored.tab.evaluate("theme => document.documentElement.dataset.theme = theme", theme)


def serious(explored, where=".rail", rules=ALL):
    """What axe finds serious or worse in a part of the page: the rule, and the first element."""
    if not explored.tab.evaluate("'axe' in window"):
        explored.tab.evaluate(AXE)
    found = explored.tab.evaluate(CHECK, [where, rules])
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]


def findings(explored, where=".rail", looks=()):
    """What is serious in these looks: all rules in the first one, contrast in the others. The page is dark after.

    Without looks: dark, and others by the profile's share (tests/profiles.py).
    """
    looks, found = looks or (LOOKS[0], *some(LOOKS[1:])), {}
    for name in reversed(looks):
        look(explored, name)
        if problems := serious(explored, where, ALL if name == looks[0] else COLOURS):
            found[name] = problems
    look(explored, LOOKS[0])
    return found
