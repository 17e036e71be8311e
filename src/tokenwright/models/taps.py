"""The sites where a tap can observe a forward pass. A tap must not write to the value.

T: tokens of the step, H, G: query and KV heads, D, v: size of a key and a value, d: width, m: hidden size of an MLP.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any


class Site(StrEnum):
    """A place in the forward pass; `DIMS` gives the dims of its value."""

    EMBEDDING = "embedding"  # before the first layer (its layer is 0)
    ATTENTION_INPUT = "attention_input"  # the norm of the residual stream
    QUERY = "query"  # after norm and rotation
    SINK_QUERY = "sink_query"  # rotated for the keys of sinks; only in rotary layers with sinks
    KEY = "key"  # after norm and rotation, as stored in the cache
    VALUE = "value"
    MIXED = "mixed"  # each head's result, before the output projection
    ATTENTION = "attention"  # the residual stream after attention
    MLP_INPUT = "mlp_input"  # the norm of the residual stream
    MLP_HIDDEN = "mlp_hidden"  # after its activation; not in a mixture of experts
    MLP = "mlp"  # the residual stream after the layer; of several the first, before its correction
    MERGED = "merged"  # the stream that the head reads (its layer is 0); only of several


DIMS: Mapping[Site, tuple[str, ...]] = {
    Site.EMBEDDING: ("T", "d"), Site.ATTENTION_INPUT: ("T", "d"), Site.QUERY: ("T", "H", "D"),
    Site.SINK_QUERY: ("T", "H", "D"), Site.KEY: ("T", "G", "D"), Site.VALUE: ("T", "G", "v"),
    Site.MIXED: ("T", "H", "v"), Site.ATTENTION: ("T", "d"), Site.MLP_INPUT: ("T", "d"), Site.MLP_HIDDEN: ("T", "m"),
    Site.MLP: ("T", "d"), Site.MERGED: ("T", "d"),
}  # fmt: skip

Tap = Callable[[Site, int, Any], None]


def ignore(site: Site, layer: int, value: Any) -> None: ...
