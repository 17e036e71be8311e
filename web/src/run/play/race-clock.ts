// The clock of a race: both lanes start on it together, and each does a step in the time that the engine measured for it.
// The clock runs as slowly as it takes to see that; it is the same for both lanes.

import type { RaceStep } from "../../schema/race";

const SEEN = 12e6; // µs that the slower lane may take on the screen; one that takes longer runs at its real speed

/** Where a lane stands: the steps it has done, the share of the next one, and whether it is through. */
export interface Place {
  done: number;
  part: number;
  over: boolean;
}

/** When each step of a lane ends, in µs since the start. */
export function endsOf(times: readonly number[]): number[] {
  let sum = 0;
  return times.map((time) => (sum += time));
}

export function placeAt(ends: readonly number[], us: number): Place {
  const next = ends.findIndex((end) => end > us);
  if (next < 0) return { done: ends.length, part: 0, over: true };
  const from = ends[next - 1] ?? 0;
  return { done: next, part: Math.max(0, (us - from) / ((ends[next] ?? 0) - from)), over: false };
}

/** The steps that both lanes computed; the others cannot be raced. */
export const racedOf = (steps: readonly RaceStep[]): RaceStep[] =>
  steps.filter(({ uncached_us }) => uncached_us !== null);

/** How many times slower than the engine the clock runs, at least 1. */
export function slownessOf(longest: number): number {
  const exact = SEEN / Math.max(1, longest);
  return exact <= 1 ? 1 : Number(exact.toPrecision(1));
}
