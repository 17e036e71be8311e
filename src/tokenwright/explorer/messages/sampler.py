"""The messages of the sampler's panel: what other settings make of a step's logits, without the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tokenwright.trace.schema import TokenCard
from tokenwright.trace.wire import COUNTED, GIVEN, READ, Wire


@dataclass(frozen=True, slots=True)
class Ranked:
    """One of the most probable tokens."""

    token: TokenCard
    p: float  # the model's, over the whole vocabulary at temperature 1
    sampled: float  # after the sampler; 0: it was cut
    low: float  # the sampler's probabilities of all lower ids: the draw u takes this token in [low, low + sampled)


@dataclass(frozen=True, slots=True)
class SamplerView:
    """GET /runs/ID/sampler: the distribution of one step, before and after the sampler with the settings asked for."""

    step: int
    vocab: Annotated[int, Wire("Q", COUNTED, "", "vocabulary", "ids that have a logit")]
    after_top_k: Annotated[int, Wire("Q", COUNTED, "", "after top-k", "ids left by top-k")]
    after_top_p: Annotated[int, Wire("Q", COUNTED, "", "after top-p", "ids left by top-k and top-p")]
    kept: Annotated[int, Wire("Q", COUNTED, "", "kept", "ids that can be drawn, after all cuts")]
    kept_mass: Annotated[float, Wire("d", READ, "", "their share", "the model's probability of the ids kept")]
    entropy: Annotated[float, Wire("d", READ, "bit", "entropy before", "of the model's distribution")]
    sampled_entropy: Annotated[float, Wire("d", READ, "bit", "entropy after", "of the sampler's distribution")]
    uniform: Annotated[
        float | None, Wire("d", READ, "", "draw u", "the random number of this seed and position; none when greedy")
    ]
    token: int  # that the run wrote at this step
    drawn: Annotated[
        int | None,
        Wire("I", COUNTED, "", "drawn", "the id that these settings take with the same u"),
    ]
    drawn_card: TokenCard | None
    top: tuple[Ranked, ...]  # those of the first ranks
    ranks: tuple[int, ...]  # by logit after the penalty, from 1; all, or of a large vocabulary some, closer at the top
    p: tuple[float, ...]  # the model's, at these ranks
    sampled: tuple[float, ...]  # the sampler's, at these ranks
    temperature: Annotated[float, Wire("d", GIVEN, "", "temperature", "as asked for")]
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    kind: Literal["sampler"] = "sampler"


MESSAGES = (Ranked, SamplerView)
