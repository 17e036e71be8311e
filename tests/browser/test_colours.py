"""The roles' colours differ for every kind of colour vision, in both themes; they also differ in shape and pattern."""

import re
from itertools import combinations

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


def lab(colour, vision):
    """A colour as it is seen, in CIE L*a*b*."""
    coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("theme", "colours"), list(themes()))
def test_roles_differ(theme, colours, vision):
    pairs = [*combinations(CELLS, 2), ("prompt", "generated"), ("beam", "kept"), ("beam", "bg")]
    apart = {
        pair: float(np.linalg.norm(lab(colours[pair[0]], vision) - lab(colours[pair[1]], vision))) for pair in pairs
    }
    assert {pair: round(far, 1) for pair, far in apart.items() if far < LEAST} == {}
