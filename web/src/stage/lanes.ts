// The stage during a race: the text that both lanes write, with two walls below it, the cached lane's above the other's.
// The engine has computed and measured both lanes step by step, taking turns; here they start together, and each does its
// steps in the time that they took. So the upper wall goes ahead, and the lower one falls behind.

import { computed, effect, signal, untracked } from "@preact/signals";
import * as clock from "../visit/clock";
import { figures, joined, micros, plural } from "../ui/format";
import { type Place, endsOf, placeAt, racedOf, slownessOf } from "../run/play/race-clock";
import { Cell, type Scene, type SceneToken } from "./renderers/renderer";
import type { StepFrame, TokenCard } from "../schema";
import type { RaceCard, RaceStep } from "../schema/race";
import { rewritten, statesOf } from "./scene";
import { card, run, shown } from "../visit/store";
import { align, look } from "../ui/text";

/** The race that the engine computes. */
export const racing = signal<AbortController | null>(null);

/** A race that the stage shows, and what follows from its steps. */
interface Shown {
  card: RaceCard;
  prompt: readonly SceneToken[];
  steps: readonly RaceStep[]; // those that both lanes computed
  written: readonly SceneToken[];
  pieces: readonly string[];
  cached: readonly number[]; // µs since the start at which each step ends
  uncached: readonly number[];
  slow: number; // how many times slower than the engine the clock runs
}

/** A lane at a time of the clock. */
export interface Lane {
  place: Place;
  text: string; // what it has written
  tokens: number; // sent through the layers so far, without the step under way
  ended: number; // µs since the start at the end of its newest step
}

/** What a step's bar of work says. */
export type Bar = Pick<StepFrame, "layer_tokens" | "start" | "length" | "recomputed" | "cache" | "token">;

const race = signal<Shown | null>(null);
const at = signal(0); // µs of the clock
let request = 0;

/** What is on the stage in place of the shown run; null: nothing. */
export const lanes = computed(() => {
  const shownRace = race.value;
  if (shownRace === null) return null;
  const cached = laneOf(shownRace, "cached", at.value);
  const uncached = laneOf(shownRace, "uncached", at.value);
  const { slow, card } = shownRace;
  const all = shownRace.steps.reduce((sum, step) => sum + (step.uncached_tokens ?? 0), 0);
  return {
    cached,
    uncached,
    slow,
    all,
    layers: card.layers,
    bars: barsOf(shownRace, cached.place.done, uncached.place.done),
    scene: sceneOf(shownRace, cached.place, uncached.place),
    told: tell(shownRace, cached, uncached),
  };
});

// Another run has the engine and the stage to itself. A step of the shown run that was still on its way ends no race.
effect(() => {
  void run.value;
  untracked(hide);
});
effect(() => {
  void shown.value;
  leave();
});

/** The tokens of a race's prompt as the stage shows them. */
export function looksOf(prompt: string, cards: readonly TokenCard[]): SceneToken[] {
  const pieces = align(prompt, cards);
  return cards.map((card, i) => look(card, "prompt", pieces[i] ?? "", i));
}

/** Puts a race on the stage, at its start or at its end. */
export function show(
  card: RaceCard,
  prompt: readonly SceneToken[],
  steps: readonly RaceStep[],
  from: "start" | "end",
): void {
  const raced = racedOf(steps);
  if (raced.length === 0) return;
  const cached = endsOf(raced.map((step) => step.cached_us));
  const uncached = endsOf(raced.map((step) => step.uncached_us ?? 0));
  const longest = Math.max(cached.at(-1) ?? 0, uncached.at(-1) ?? 0);
  const written = steps.map(({ token, text }, i) => look(token, "generated", text, prompt.length + i));
  const pieces = steps.map(({ text }) => text);
  race.value = { card, prompt, steps: raced, written, pieces, cached, uncached, slow: slownessOf(longest) };
  at.value = from === "start" ? 0 : longest;
  cancelAnimationFrame(request);
  if (from === "start") tick(performance.now(), longest);
  clock.settle();
}

function tick(before: number, longest: number): void {
  request = requestAnimationFrame((now) => {
    const shownRace = race.peek();
    if (shownRace === null) return;
    at.value = Math.min(longest, at.peek() + (Math.max(0, now - before) * 1000) / shownRace.slow);
    if (at.peek() < longest) tick(now, longest);
  });
}

/** Lets both lanes be at their ends. */
export function finish(): void {
  const shownRace = race.peek();
  if (shownRace !== null) at.value = Math.max(shownRace.cached.at(-1) ?? 0, shownRace.uncached.at(-1) ?? 0);
}

/** Takes the race off the stage. */
export function leave(): void {
  cancelAnimationFrame(request);
  race.value = null;
}

/** Gives the stage back to the shown run. That ends a race, which has no other place. */
export function hide(): void {
  stop();
  leave();
}

/** Ends the race: the server ends it when its stream is closed. */
export function stop(): void {
  racing.value?.abort();
  racing.value = null;
}

function laneOf(shownRace: Shown, lane: "cached" | "uncached", us: number): Lane {
  const { steps, pieces, [lane]: ends } = shownRace;
  const place = placeAt(ends, us);
  const done = steps.slice(0, place.done);
  return {
    place,
    text: pieces.slice(0, (done.at(-1)?.step ?? -1) + 1).join(""),
    tokens: done.reduce((sum, step) => sum + ((lane === "cached" ? step.cached_tokens : step.uncached_tokens) ?? 0), 0),
    ended: ends[place.done - 1] ?? 0,
  };
}

/** The steps that a lane has done: those of the slower lane without the cache, those that only the other has done with it. */
function barsOf({ card, steps }: Shown, cached: number, uncached: number): Bar[] {
  return steps.slice(0, Math.max(cached, uncached)).map((step, i) => {
    const cache = i >= uncached;
    const length = cache ? step.cached_tokens : (step.uncached_tokens ?? 0);
    const recomputed = cache || i === 0 ? 0 : length - 1;
    return {
      layer_tokens: BigInt(card.layers * length),
      start: step.context - length,
      length,
      recomputed,
      cache,
      token: step.token.id,
    };
  });
}

/** Upper slices: the cached lane's. Lower ones: those of the step that the other lane computes, down to where it is. */
function sceneOf({ card: { layers }, prompt, steps, written }: Shown, cached: Place, uncached: Place): Scene {
  const newest = steps[cached.done - 1];
  const tokens = [...prompt, ...written.slice(0, newest === undefined ? 0 : newest.step + 1)];
  const cells = new Uint8Array(tokens.length * 2 * layers).fill(Cell.empty);
  const kept = newest === undefined ? 0 : newest.context;
  for (let position = 0; position < Math.min(kept, tokens.length); position++)
    cells.fill(
      position < kept - (newest?.cached_tokens ?? 0) ? Cell.kept : Cell.fresh,
      position * 2 * layers,
      (position * 2 + 1) * layers,
    );
  const step = steps[Math.min(uncached.done, steps.length - 1)];
  const done = uncached.over ? layers : Math.ceil(uncached.part * layers);
  for (let position = 0; position < Math.min(step?.context ?? 0, tokens.length); position++) {
    const from = (position * 2 + 1) * layers;
    cells.fill(
      (step?.step ?? 0) > 0 && position < (step?.context ?? 0) - 1 ? Cell.recomputed : Cell.fresh,
      from,
      from + done,
    );
  }
  const states = statesOf(card.peek()?.windows ?? []);
  return {
    tokens,
    head: tokens.length - 1,
    layers: 2 * layers,
    states,
    lanes: 2,
    cells: rewritten(cells, 2 * layers, states), // of the upper wall: the lower one keeps nothing
    layerShare: Float32Array.from({ length: 2 * layers }, (_, i) => (i + 1) / (2 * layers)),
    row: null,
    layer: -1,
    thin: 1,
    cache: true,
    progress: 1,
    hovered: null,
    recorded: false,
  };
}

const time = (us: number): string => joined(micros(Math.round(us)));

function tell({ steps, cached, uncached, slow }: Shown, fast: Lane, behind: Lane): string {
  const [first, last] = [cached.at(-1) ?? 0, uncached.at(-1) ?? 0];
  const tokens = plural(steps.length, "token");
  if (fast.place.over && behind.place.over)
    return `The same ${tokens}: after ${time(first)} with the cache, after ${time(last)} without it, ${figures(last / Math.max(1, first))} times as long.`;
  const pace = slow === 1 ? "" : ` Slowed ${slow} times.`;
  if (fast.place.over)
    return `With the cache all ${tokens} were there after ${time(first)}. Without it there are ${behind.place.done}.${pace}`;
  return `Both lanes started together: ${plural(fast.place.done, "token")} with the cache, ${behind.place.done} without it.${pace}`;
}
