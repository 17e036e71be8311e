// Which positions a view holds, and where each of them stands. A run grows by one token a step; if the view were fitted to
// the tokens it would move with each. So it is fitted to a number of slots from a ladder, and the write head moves through
// them as over a page. When the page is full, the newest tokens keep their width, and all older ones share what is left:
// the wall is always whole. The cameras that follow the head show only the newest tokens.

import type { Camera } from "./renderer";
import { clamp } from "./motion";

const LADDER = [8, 10, 12, 15, 18, 22, 26, 31, 37];
const MOST = 40; // slots
const NEAR = 24; // tokens that the cameras "follow" and "head" keep in view
const FULL = 24; // the newest tokens, which have a slot each
const AHEAD = 3; // free slots before the head
const OLDER = 0.25; // of the slots at most, for all older tokens
const LEAST_PITCH = 16; // CSS pixels of a slot: its word stands beside its neighbours'

/** Where positions stand, in slots: those before `from` are `scale` of a slot apart, the others one. */
export interface Fold {
  from: number;
  scale: number;
}

export interface Span extends Fold {
  first: number; // slot
  count: number; // slots
}

/** The slot of a position, either with a fraction. */
export const slotOf = ({ from, scale }: Fold, position: number): number =>
  position < from ? position * scale : from * scale + position - from;

/** The position in a slot. */
export const positionIn = ({ from, scale }: Fold, slot: number): number =>
  slot < from * scale ? slot / scale : from + slot - from * scale;

export function spanOf(camera: Camera, tokens: number, width: number): Span {
  const near = camera === "follow" || camera === "head";
  const most = clamp(Math.floor(width / LEAST_PITCH), 6, near ? NEAR + AHEAD : MOST);
  if (tokens + 2 <= most) {
    const count = LADDER.find((step) => step >= tokens + 2 && step <= most) ?? most;
    return { first: 0, count, from: 0, scale: 1 };
  }
  if (near) return { first: tokens + AHEAD - most, count: most, from: 0, scale: 1 };
  const full = Math.min(FULL, Math.floor(most * (1 - OLDER)) - AHEAD);
  const from = tokens - full;
  return { first: 0, count: most, from, scale: Math.min(1, (most - AHEAD - full) / from) };
}
