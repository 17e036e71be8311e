"""The sites where a tap can observe a forward pass: a closed list. A tap must not write to the value.

Legend: T tokens of the step, H query heads, G KV heads, D size of a key, v of a value (with a latent less than D), d
width, m the numbers between the two products of an MLP.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any


class Site(StrEnum):
    """A place in the forward pass; `DIMS` gives the dims of its value."""

    EMBEDDING = "embedding"  # the residual stream before the first layer (its layer is 0)
    ATTENTION_INPUT = "attention_input"  # what attention projects: the norm of the residual stream
    QUERY = "query"  # after its norm and its rotation
    SINK_QUERY = "sink_query"  # the query, rotated for the keys of sinks; only in rotary layers with sinks
    KEY = "key"  # after its norm and its rotation, as stored in the cache
    VALUE = "value"
    MIXED = "mixed"  # the values that each head has read, before the output projection
    ATTENTION = "attention"  # the residual stream after the layer's attention
    MLP_INPUT = "mlp_input"  # what the MLP reads: the norm of the residual stream
    MLP_HIDDEN = "mlp_hidden"  # after its activation; not in a mixture of experts
    MLP = "mlp"  # the residual stream after the layer; of several streams the first, which is then corrected
    MERGED = "merged"  # the stream that the head reads (its layer is 0); only where layers have several


DIMS: Mapping[Site, tuple[str, ...]] = {
    Site.EMBEDDING: ("T", "d"),
    Site.ATTENTION_INPUT: ("T", "d"),
    Site.QUERY: ("T", "H", "D"),
    Site.SINK_QUERY: ("T", "H", "D"),
    Site.KEY: ("T", "G", "D"),
    Site.VALUE: ("T", "G", "v"),
    Site.MIXED: ("T", "H", "v"),
    Site.ATTENTION: ("T", "d"),
    Site.MLP_INPUT: ("T", "d"),
    Site.MLP_HIDDEN: ("T", "m"),
    Site.MLP: ("T", "d"),
    Site.MERGED: ("T", "d"),
}

Tap = Callable[[Site, int, Any], None]  # site, layer, value: a tensor of the torch backend


def ignore(site: Site, layer: int, value: Any) -> None:
    """The no-op tap, for steps without an observer."""
