"""The part one reads first: sequences, pages, the scheduler and the loop. Imports no torch."""

from tokenwright.engine.engine import Engine, Runner, Sampler
from tokenwright.engine.pages import Memory, PagePool
from tokenwright.engine.reach import Group, Reach
from tokenwright.engine.scheduler import Scheduler
from tokenwright.engine.sequence import FinishReason, Guard, NoGuard, Request, SamplingParams, Sequence, State
from tokenwright.engine.step import (
    Chunk,
    Event,
    Failed,
    Fault,
    Finished,
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
    "Engine",
    "Event",
    "Failed",
    "Fault",
    "FinishReason",
    "Finished",
    "Group",
    "Guard",
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
]
