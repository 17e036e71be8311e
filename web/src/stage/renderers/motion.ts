// The time of a step's animation, and the gliding of a view from one place to another. The step: cells fill from the
// first layer to the last as the engine's own layer times say, then the beams grow, then the type bar strikes.

import { Cell, type Scene } from "./renderer";

export const clamp = (value: number, low: number, high: number): number => Math.min(high, Math.max(low, value));
export const easeOut = (t: number): number => 1 - (1 - t) ** 3;
const easeBoth = (t: number): number => t * t * t * (t * (6 * t - 15) + 10);

// Shares of a step's animation: when the head begins to read, and from when on the token is written.
export const READS = 0.4;
export const WRITES = 0.8;

export interface Phases {
  fallen: number; // of what was thrown away before: 0 stands, 1 is gone
  filled: number; // layers that are done, with a fraction
  beams: number; // 0 none, 1 fully grown
  strike: number; // 0 the bar is up, 1 the token stands
}

export function phasesOf(scene: Scene): Phases {
  const { progress, layerShare, layers } = scene;
  const part = (from: number, length: number) => clamp((progress - from) / length, 0, 1);
  const thrown = !scene.cache && scene.cells[0] === Cell.recomputed;
  const before = thrown || scene.cells.includes(Cell.left) ? 0.2 : 0; // time for the old columns to fall
  return {
    fallen: before > 0 ? part(0, before) : 1,
    filled: filledLayers(part(before, 0.5 - before), layerShare, Math.max(1, layers)),
    beams: easeOut(part(READS, WRITES - READS)),
    strike: part(WRITES, 1 - WRITES),
  };
}

/** How many layers are done when `share` of the step's layer time has passed. */
export function filledLayers(share: number, layerShare: Float32Array, layers: number): number {
  if (share >= 1) return layers;
  let before = 0;
  for (let layer = 0; layer < layers; layer++) {
    const after = layerShare[layer] ?? (layer + 1) / layers;
    if (share < after) return layer + (after > before ? clamp((share - before) / (after - before), 0, 1) : 0);
    before = after;
  }
  return layers;
}

export function reducedMotion(): boolean {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

const GLIDE_MS = 260;
export const FLIGHT_MS = 1000; // from one stop of a flight to the next

/** Some numbers on their way to a goal. A goal that is set again from where they are never makes them jump. */
export class Glide<T extends Record<keyof T, number>> {
  private from: T | null = null;
  private goal: T | null = null;
  private began = 0;
  private duration = 0;

  /** `ms`: how long it takes; a flight starts and ends slowly. */
  aim(goal: T, now: number, atOnce: boolean, ms = GLIDE_MS): void {
    const before = this.goal;
    if (before && !atOnce && (Object.keys(goal) as (keyof T)[]).every((key) => goal[key] === before[key])) return;
    this.from = before ? this.at(now) : goal;
    this.goal = goal;
    this.began = now;
    this.duration = before && !atOnce && !reducedMotion() ? ms : 0;
  }

  at(now: number): T {
    const { from, goal } = this;
    if (!from || !goal) throw new Error("A glide was read before it had a goal.");
    // A frame's time may lie a little before that of the call that set the goal.
    const ease = this.duration > GLIDE_MS ? easeBoth : easeOut;
    const share = this.moving(now) ? ease(Math.max(0, now - this.began) / this.duration) : 1;
    const values = { ...goal };
    for (const key of Object.keys(goal) as (keyof T)[])
      values[key] = (from[key] + (goal[key] - from[key]) * share) as T[keyof T];
    return values;
  }

  moving(now: number): boolean {
    return this.duration > 0 && now - this.began < this.duration;
  }
}
