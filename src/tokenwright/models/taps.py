"""The places where one may look at a forward pass: a closed list, each with a name and its dims.

The decoder calls a tap at every site with the layer and the value. As a rule the tap is `ignore`; looking never
changes what is seen, so a tap must not write to what it is given. Legend: T tokens of the step, H query heads, G KV
heads, D head size, d width.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import torch


class Site(StrEnum):
    """Where in the forward pass."""

    EMBEDDING = "embedding"  # the residual stream before the first layer (its layer is 0)
    QUERY = "query"  # after its norm and its rotation
    SINK_QUERY = "sink_query"  # the query turned to meet the keys of sinks; only where a layer has them and rotates
    KEY = "key"  # after its norm and its rotation: as it goes to the cache
    VALUE = "value"
    ATTENTION = "attention"  # the residual stream after the layer's attention
    MLP = "mlp"  # the residual stream after the layer


DIMS: Mapping[Site, tuple[str, ...]] = {
    Site.EMBEDDING: ("T", "d"),
    Site.QUERY: ("T", "H", "D"),
    Site.SINK_QUERY: ("T", "H", "D"),
    Site.KEY: ("T", "G", "D"),
    Site.VALUE: ("T", "G", "D"),
    Site.ATTENTION: ("T", "d"),
    Site.MLP: ("T", "d"),
}

Tap = Callable[[Site, int, torch.Tensor], None]  # site, layer, value


def ignore(site: Site, layer: int, value: torch.Tensor) -> None:
    """The tap of a run that nobody looks at."""
