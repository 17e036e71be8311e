"""The part one reads first: sequences, pages, the scheduler and the loop. Imports no torch."""

from tokenwright.engine.core import Engine, Runner, Sampler
from tokenwright.engine.page_pool import Memory, PagePool
from tokenwright.engine.request import FinishReason, Guard, NoGuard, Request, Sequence, State, Words
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.step import (
    Chunk,
    Dropped,
    Event,
    Failed,
    Fault,
    Finish,
    Finished,
    Forked,
    Likely,
    Output,
    Pick,
    Result,
    Score,
    Scored,
    Step,
    Token,
    Wants,
)
from tokenwright.engine.window import Group, Reach
from tokenwright.sampling_params import Grammar, SamplingParams

__all__ = [
    "Chunk",
    "Dropped",
    "Engine",
    "Event",
    "Failed",
    "Fault",
    "Finish",
    "FinishReason",
    "Finished",
    "Forked",
    "Grammar",
    "Group",
    "Guard",
    "Likely",
    "Memory",
    "NoGuard",
    "Output",
    "PagePool",
    "Pick",
    "Reach",
    "Request",
    "Result",
    "Runner",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "Score",
    "Scored",
    "Sequence",
    "State",
    "Step",
    "Token",
    "Wants",
    "Words",
]
