"""The roles' colours differ for every kind of colour vision, in both themes; they also differ in shape and pattern.

The colours of the CSS are compared by a model of what is left of them; the swatches of the legend by pictures that
Chromium takes with each deficiency emulated, where pattern and shape count as well.
"""

import io
import re
from itertools import combinations

import matplotlib.image
import numpy as np
import pytest

from tests.browser.conftest import ROOT

# Machado, Oliveira, Fernandes 2009: what is left of a colour at full severity, on linear RGB.
VISION = {
    "full": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = XYZ.sum(1)
CELLS = ("kept", "fresh", "recomputed", "empty")  # beside each other in the wall
LEAST = 20  # CIE76: ten times what is just noticed


def themes():
    """The colours by name, of dark and light."""
    css = (ROOT / "web/src/style/roles.css").read_text(encoding="utf-8")
    for name in ("dark", "light"):
        [block] = re.findall(rf'\[data-theme="{name}"\] \{{(.*?)\}}', css, re.DOTALL)
        yield name, dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))


def lab(coded, vision="full"):
    """Colours [..., 3] of 0..1 as they are seen, in CIE L*a*b*."""
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    ratio = np.clip(linear @ np.array(VISION[vision]).T, 0, 1) @ XYZ.T / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(f, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def coded(colour):
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("theme", "colours"), list(themes()))
def test_roles_differ(theme, colours, vision):
    pairs = [*combinations(CELLS, 2), ("prompt", "generated"), ("beam", "kept"), ("beam", "bg")]
    seen = {name: lab(coded(colours[name]), vision) for name in {*CELLS, "prompt", "generated", "beam", "bg"}}
    apart = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in pairs}
    assert {pair: round(far, 1) for pair, far in apart.items() if far < LEAST} == {}


EMULATED = ("none", "protanopia", "deuteranopia", "tritanopia", "achromatopsia")
LEAST_GREY = 12  # without hues: lightness, and shape (recomputed is hatched, attention an arch, prompt a frame)
SIDE = 8  # CSS px of a swatch that are compared


def swatches(explored):
    """The legend's swatches as they are on the screen: role -> CIE L*a*b* [SIDE, SIDE, 3]."""
    legend = explored.tab.locator(".legend")
    picture = matplotlib.image.imread(io.BytesIO(legend.screenshot()))[:, :, :3]
    places = legend.evaluate(
        """legend => [...legend.querySelectorAll('.swatch')].map(swatch => {
          const all = legend.getBoundingClientRect(), one = swatch.getBoundingClientRect();
          return [swatch.classList[1], Math.round(one.x - all.x), Math.round(one.y - all.y)];
        })"""
    )
    return {role: lab(picture[y : y + SIDE, x : x + SIDE]) for role, x, y in places}


def test_the_legends_swatches_differ_with_each_deficiency_emulated(explored):
    explored.run("Once upon a time", 8, renderer="2d", stop=2)
    devtools = explored.tab.context.new_cdp_session(explored.tab)
    seen = {vision: {} for vision in EMULATED}
    for _ in range(2):  # with the cache, then without
        explored.settle()
        for vision, roles in seen.items():
            devtools.send("Emulation.setEmulatedVisionDeficiency", {"type": vision})
            roles |= {role: look for role, look in swatches(explored).items() if role not in roles}
        explored.press("n")
        explored.step()
    assert {"prompt", "generated", "kept", "fresh", "recomputed", "beam"} <= set(seen["none"])
    grey = seen["achromatopsia"]["fresh"]
    assert np.abs(grey[..., 1:]).max() < 3, "the emulation is in the picture"
    apart = {
        (vision, *pair): float(np.linalg.norm(roles[pair[0]] - roles[pair[1]], axis=-1).mean())
        for vision, roles in seen.items()
        for pair in combinations(roles, 2)
    }
    least = {vision: LEAST_GREY if vision == "achromatopsia" else LEAST for vision in EMULATED}
    near = {pair: round(far, 1) for pair, far in apart.items() if far < least[pair[0]]}
    assert near == {}
