"""The part one reads first: sequences, pages, the scheduler and the loop. Imports no torch."""

from tokenwright.engine.engine import Engine, Runner, Sampler
from tokenwright.engine.pages import Memory, PagePool
from tokenwright.engine.params import Grammar, SamplingParams
from tokenwright.engine.reach import Group, Reach
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.sequence import FinishReason, Guard, NoGuard, Request, Sequence, State, Words
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
