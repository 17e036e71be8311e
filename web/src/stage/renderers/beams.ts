// Which attention weights become beams, and how strong they look. Weights of at least 1/255 squared (the smallest that
// the frame's coding tells from zero) or the 64 largest, whichever is fewer; what is left is said as a number.

import type { SceneRow } from "./renderer";

export const MOST_BEAMS = 64;
const LEAST = 1 / 255 ** 2;

export interface Beam {
  position: number;
  weight: number;
}

export interface Beams {
  drawn: Beam[]; // the weakest first, so that the strongest is painted over the others
  argmax: number | null;
  strongest: number;
  rest: number; // the weight that is not drawn
  restCount: number;
}

const NONE: Beams = { drawn: [], argmax: null, strongest: 0, rest: 0, restCount: 0 };
const chosen = new WeakMap<SceneRow, { head: number; beams: Beams }>();

export function beamsOf(row: SceneRow | null, head: number): Beams {
  if (!row) return NONE;
  const known = chosen.get(row);
  if (known && known.head === head) return known.beams;
  const beams = choose(row, Math.min(row.weights.length, Math.max(head, 0)));
  chosen.set(row, { head, beams });
  return beams;
}

function choose(row: SceneRow, count: number): Beams {
  const drawn: Beam[] = [];
  let total = 0;
  for (let position = 0; position < count; position++) {
    const weight = row.weights[position] ?? 0;
    total += weight;
    if (weight >= LEAST) drawn.push({ position, weight });
  }
  drawn.sort((a, b) => b.weight - a.weight);
  drawn.length = Math.min(drawn.length, MOST_BEAMS);
  const shown = drawn.reduce((sum, beam) => sum + beam.weight, 0);
  const argmax = row.argmax >= 0 && row.argmax < count ? row.argmax : null;
  // The row's coding can make ties; the engine says which one is the largest.
  const rank = (beam: Beam) => beam.weight + (beam.position === argmax ? 1 : 0);
  drawn.sort((a, b) => rank(a) - rank(b));
  const strongest = argmax === null ? 0 : (row.weights[argmax] ?? 0);
  return { drawn, argmax, strongest, rest: Math.max(0, total - shown), restCount: count - drawn.length };
}

const LEAST_DROP = 0.02; // thinner ones would only cover the labels

/** Whether a beam is drawn on from its token to the cell of the layer that is read. */
export const drops = (weight: number): boolean => weight >= LEAST_DROP;
/** Width of that part in CSS pixels: it stands before labels. */
export const dropWidth = (weight: number): number => 0.8 + 3 * Math.sqrt(weight);

/** The token whose query meets the keys: the last one of the row. */
export const readerOf = (row: SceneRow, head: number): number => Math.min(row.weights.length - 1, Math.max(head, 0));

/** Width of a beam in CSS pixels. */
export const beamWidth = (weight: number): number => 0.8 + 6 * Math.sqrt(weight);
/** Opacity of a beam. */
export const beamOpacity = (weight: number): number => Math.min(1, 0.14 + 0.86 * Math.sqrt(weight));
