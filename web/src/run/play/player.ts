// The playhead. It moves over the frames that are here, from any source; at the end of a live run, moving on means to
// let the engine work. Going back never asks the engine for anything. Every arriving frame is shown when the pace
// leaves time for it; at engine speed those that arrive between two pictures are shown as one.

import { batch } from "@preact/signals";
import * as clock from "../../visit/clock";
import * as lanes from "../../stage/lanes";
import * as live from "../../visit/live";
import type { Run } from "../run";
import { cache, last, link, pace, playing, run, shown } from "../../visit/store";

let following = true; // whether the playhead goes along with new frames
let working = false; // whether the engine has been told to play
let single = 0; // steps that were asked for one by one and are not here yet
let owed = 0; // steps to ask for when the link is there
let slowly = false; // whether the first steps are shown slowly, for a visitor who sees them for the first time
let most: number | null = null; // tokens per second, where the page shows something by itself
let timer: ReturnType<typeof setTimeout> | undefined;

// Tokens per second of a visit's first steps: time to read the sentence that says what happens.
const FIRST_PACES = [0.28, 0.4, 0.5, 0.7, 1, 2];
const FIRST_LONGEST = 2400; // ms of their animation

/** The first steps of the next run are slow, until someone sets a speed or steps by hand. */
export function introduce(): void {
  slowly = true;
}

/** The pace after the frame at `index`. */
function paceAfter(index: number): number | null {
  const first = slowly ? FIRST_PACES[Math.max(0, index)] : undefined;
  const limits = [first, most].filter((limit) => limit !== undefined && limit !== null);
  return limits.length === 0 ? pace.value : Math.min(...limits, pace.value ?? Infinity);
}

/** No faster than this until it is lifted by null. */
export function atMost(value: number | null): void {
  most = value;
  if (working) live.send({ op: "play", pace: paceAfter(shown.value) });
}

/** Starts on another run: before its first frame, or at its end. */
export function reset(index: number): void {
  clearTimeout(timer);
  batch(() => {
    playing.value = false;
    shown.value = index;
  });
  following = index === last.value;
  working = false;
  single = 0;
  owed = 0;
  clock.settle();
}

export function play(): void {
  lanes.hide();
  playing.value = true;
  advance();
}

/** Shows a recording from its beginning: it plays, or is held at a step. */
export function again(stopAt: number | null): void {
  seek(stopAt ?? -1);
  if (stopAt === null) play();
}

export function pause(): void {
  clearTimeout(timer);
  playing.value = false;
  if (working) live.send({ op: "pause" });
  working = false;
}

/** Steps on, or back for a negative number; at the end of a live run the engine takes them. */
export function step(by: number): void {
  const current = run.value;
  if (current === null) return;
  lanes.hide();
  slowly = false;
  pause();
  if (by < 0 || shown.value < last.value) {
    seek(shown.value + by);
    if (by === 1) clock.animate(Infinity);
  } else if (current.origin === "live" && !current.ended) {
    following = true;
    ask(by);
  }
}

/** As `step`, for a run whose link is not there yet: then the engine takes the steps. */
export function stepLater(by: number): void {
  owed += by;
}

function ask(steps: number): void {
  for (let i = 0; i < steps; i++)
    if (live.send({ op: "step" })) single++;
    else if (link.value === "opening") owed++;
}

/** Shows another frame of the history; or the one that is shown, where a race was in its place. */
export function seek(index: number): void {
  lanes.hide();
  pause();
  const first = Math.min(0, last.value);
  shown.value = Math.max(first, Math.min(last.value, index));
  following = shown.value === last.value;
  clock.settle();
}

/** Shows the shown step as it is with the cache, or without it, where a file has both. What plays goes on. */
export function showWay(on: boolean): void {
  const current = run.value;
  const way = current?.both.get(on);
  if (current === null || way === undefined || way === current) return;
  const length = current.length(shown.value);
  const found = way.frames.findIndex((step) => step.seq_len >= length);
  batch(() => {
    run.value = way;
    if (shown.value >= 0) shown.value = found < 0 ? way.count.value - 1 : found;
    cache.value = on;
  });
  clock.animate(Infinity);
}

export function setPace(value: number | null): void {
  pace.value = value;
  slowly = false;
  if (working) live.send({ op: "play", pace: value });
  else if (playing.value) advance();
}

/** The link is there (again): what was going on goes on. */
export function resume(): void {
  working = false;
  single = 0;
  const due = owed;
  owed = 0;
  if (playing.value && shown.value === last.value) work();
  else ask(due);
}

/** Called before each picture: new frames become the shown one. */
export function take(): void {
  const current = run.value;
  if (current?.origin !== "live" || !following) return;
  if (shown.value < last.value) show(newest(current));
  if (current.ended) {
    playing.value = false;
    working = false;
    single = 0;
  }
}

/** The frame to show of those that have come. At engine speed the rows of some are left out, so the newest frame that
 * has one is shown: the beams are sampled. */
function newest(current: Run): number {
  if (pace.value !== null || !playing.value || current.ended) return last.value;
  for (let index = last.value; index > shown.value; index--) if (current.frames[index]?.attention) return index;
  return last.value;
}

function show(end: number): void {
  const asked = single > 0;
  single = Math.max(0, single - (end - shown.value));
  shown.value = end;
  if (asked) return clock.animate(single === 0 ? Infinity : 0);
  const now = paceAfter(end);
  clock.animate(now === null ? 0 : 1000 / now, slowly ? FIRST_LONGEST : undefined);
  if (working && slowly) live.send({ op: "play", pace: now });
  if (end >= FIRST_PACES.length) slowly = false;
}

function advance(): void {
  clearTimeout(timer);
  if (!playing.value) return;
  if (shown.value >= last.value) return work();
  timer = setTimeout(() => {
    shown.value += 1;
    following = shown.value === last.value;
    clock.animate(wait(), slowly ? FIRST_LONGEST : undefined);
    advance();
  }, wait());
}

/** At the end of the history: the engine makes more, if there is one. */
function work(): void {
  const current = run.value;
  following = true;
  if (current === null || current.origin !== "live" || current.ended) {
    playing.value = false;
    return;
  }
  working = live.send({ op: "play", pace: paceAfter(shown.value) });
}

/** Milliseconds between two frames of the history; at engine speed the time that the engine took. */
function wait(): number {
  const now = paceAfter(shown.value);
  if (now !== null) return 1000 / now;
  const next = run.value?.frames[shown.value + 1];
  return Math.max(16, (next?.step_us ?? 0) / 1000);
}
