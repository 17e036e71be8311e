"""The sequences of a scheduler that have not ended, in groups that run or wait; and all ways in which they end."""

from collections import deque

from tokenwright.engine import step as steps
from tokenwright.engine.kv_manager import KVManager
from tokenwright.engine.pictures import PictureSource, Pixels
from tokenwright.engine.pins import NEVER
from tokenwright.engine.request import FinishReason, Sequence, SequenceGroup, State

RUNNING = State.RUNNING


class Roster:
    """The scheduler's base. `sequences` are all that have not ended; `running` has the oldest group first."""

    def __init__(self, kv: KVManager, proposer: steps.Proposer | None, pictures: PictureSource | None) -> None:
        self.kv = kv
        self.proposer = proposer
        self.pictures = pictures
        self.sequences: dict[int, Sequence] = {}
        self.running: list[SequenceGroup] = []
        self.waiting: deque[SequenceGroup] = deque()

    def abort(self, identity: int) -> list[steps.Event]:
        found = self.sequences.get(identity)
        return [] if found is None else self.end_group(found.group, FinishReason.ABORTED)

    def expire(self) -> list[steps.Event]:
        if self.kv.pins.next_end < NEVER:
            self.kv.pins.expire()
        events: list[steps.Event] = []
        for sequence in list(self.sequences.values()):
            if sequence.id in self.sequences:  # else its group has ended in this loop
                try:
                    why: FinishReason | Exception | None = sequence.stop_checker.finished()
                except Exception as error:  # of this request's stop checker: others must not fail with it
                    why = error
                if why is not None:
                    events += self.end_group(sequence.group, why)
        return events

    def fail(self, step: steps.Step, error: Exception) -> list[steps.Event]:
        return [event for chunk in step.chunks for event in self.end_group(chunk.sequence.group, error)]

    def fail_picture(self, pixels: Pixels, error: Exception) -> list[steps.Event]:
        """End the texts that need a picture which cannot be computed."""
        events: list[steps.Event] = []
        for sequence in list(self.sequences.values()):
            if sequence.id in self.sequences and sequence.request.pictures:
                start = sequence.computed if sequence.state is RUNNING else self.kv.loadable_prefix(sequence)
                needed = (one.pixels.digest for one in sequence.request.pictures if one.stop > start)
                if pixels.digest in needed:
                    events += self.end_group(sequence.group, error)
        return events

    def end_group(self, group: SequenceGroup, why: FinishReason | Exception) -> list[steps.Event]:
        events: list[steps.Event] = []
        for sequence in list(group.sequences):
            event = steps.Failed(sequence.id, why) if isinstance(why, Exception) else steps.finished(sequence, why)
            self.end(sequence, event, events)
        return events

    def end(self, sequence: Sequence, event: steps.Event, events: list[steps.Event]) -> None:
        if isinstance(event, steps.Finished):
            self.kv.cache_tail(sequence)
        self.kv.free(sequence)
        if self.proposer is not None:
            self.proposer.end(sequence)
        group = sequence.group
        group.sequences.remove(sequence)
        if not group.sequences:
            (self.running if sequence.state is RUNNING else self.waiting).remove(group)
        sequence.state = State.FINISHED
        del self.sequences[sequence.id]
        if self.pictures is not None and sequence.request.pictures:
            others = (other.request.pictures for other in self.sequences.values())
            self.pictures.stop({one.pixels.digest for spans in others for one in spans})
        events.append(event)
