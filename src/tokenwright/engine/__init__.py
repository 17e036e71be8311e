"""Sequences, pages, the scheduler and the loop: the part to read first. It imports no torch."""

from tokenwright.engine.batch import Batch, flatten, one_chunk
from tokenwright.engine.core import Engine, Runner, Sampler
from tokenwright.engine.layer_group import AttentionWindow, Group
from tokenwright.engine.page_pool import Memory, PagePool
from tokenwright.engine.prefix_index import PrefixIndex
from tokenwright.engine.request import (
    FinishReason,
    NoStopChecker,
    Request,
    Sequence,
    SequenceGroup,
    State,
    StopChecker,
    Thoughts,
    TokenConstraints,
)
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.step import (
    Chunk,
    Dropped,
    Event,
    Failed,
    Finish,
    Finished,
    Forked,
    HiddenStates,
    LogitsNeeded,
    Output,
    Pick,
    PromptLogprobs,
    Proposer,
    Result,
    Step,
    Token,
    TopLogprob,
)
from tokenwright.sampling_params import Grammar, SamplingParams
