// Which positions a view holds. A run grows by one token a step; if the view were fitted to the tokens it would move
// with each. So it is fitted to a number of slots from a ladder, and the write head moves through them as over a page;
// only when the page is full does the view step back. A run with more slots than are legible is followed at its head.

import type { Camera } from "./renderer";

const LADDER = [8, 10, 12, 15, 18, 22, 26, 31, 37, 44, 52, 62, 74, 88, 105, 125, 150, 180, 215, 256];
const NEAR = 24; // tokens that the cameras "follow" and "head" keep in view
const AHEAD = 3; // free slots before the head when it is followed

export interface Span {
  first: number;
  count: number;
}

const LEAST_PITCH = 12; // CSS pixels, of a run that is seen whole
const READING_PITCH = 19; // of one that is followed

export function spanOf(camera: Camera, tokens: number, width: number): Span {
  const fits = (pitch: number, most: number) => Math.max(6, Math.min(most, Math.floor(width / pitch)));
  const near = camera === "follow" || camera === "head";
  const most = near ? fits(READING_PITCH, NEAR + AHEAD) : fits(LEAST_PITCH, Infinity);
  if (tokens + 2 <= most) return { first: 0, count: LADDER.find((step) => step >= tokens + 2 && step <= most) ?? most };
  const count = near ? most : fits(READING_PITCH, Infinity);
  return { first: tokens + AHEAD - count, count };
}
