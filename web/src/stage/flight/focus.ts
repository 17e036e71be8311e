// Where the camera looks at each stop of a flight: the cell or the token that the stop is about. It stands in the part of
// the canvas that the pictures leave free: at the left, and on a narrow screen above.

import { computed, signal } from "@preact/signals";
import type { Focus } from "../renderers/renderer";
import { card, length } from "../../visit/store";
import { type Stop, cell, stop, subject } from "./flight";

/** Distances between two tokens in the height of the view, and degrees of the camera. */
type Place = Pick<Focus, "units" | "yaw" | "pitch">;
const PLACES: Record<Stop, Place> = {
  word: { units: 6, yaw: 24, pitch: 18 },
  embedding: { units: 4, yaw: -8, pitch: 30 },
  position: { units: 9, yaw: 46, pitch: 22 },
  norm: { units: 7, yaw: 20, pitch: 14 },
  qkv: { units: 4.4, yaw: -20, pitch: 10 },
  score: { units: 6, yaw: 24, pitch: 8 },
  mask: { units: 11, yaw: 54, pitch: 18 },
  softmax: { units: 9, yaw: 38, pitch: 14 },
  value: { units: 4.4, yaw: 12, pitch: 6 },
  mlp: { units: 4.4, yaw: -24, pitch: 12 },
  residual: { units: 6, yaw: 28, pitch: 10 },
  next: { units: 8, yaw: -16, pitch: 16 },
  logits: { units: 6, yaw: 20, pitch: 4 },
  draw: { units: 5, yaw: 30, pitch: 20 },
};
const WORDS: readonly Stop[] = ["word", "embedding", "draw"]; // that are about a token and not about a cell
const ROWS: readonly Stop[] = ["norm", "score", "mask", "softmax", "next"]; // where words belong to the cells

const BAR = 48; // px, of the names of the stops over the canvas

const narrow = matchMedia("(max-width: 699.98px)");
const wide = signal(!narrow.matches);
narrow.addEventListener("change", () => (wide.value = !narrow.matches));

/** Of the flight; null: the camera stands where it was put. */
export const focus = computed<Focus | null>(() => {
  const at = stop.value;
  if (at === null) return null;
  const { position, layer } = cell.value;
  const last = (card.value?.layers ?? 1) - 1;
  const { units, ...turned } = PLACES[at];
  return {
    position: at === "draw" ? length.value - 1 : WORDS.includes(at) ? position : subject.value,
    layer: WORDS.includes(at) ? null : at === "logits" ? last : at === "next" ? Math.min(layer + 1, last) : layer,
    ...turned,
    words: ROWS.includes(at),
    ...(wide.value
      ? { units, x: 0.2, y: ROWS.includes(at) ? 0.76 : 0.5, free: { top: BAR, right: 0.38, bottom: 1 } }
      : { units: units * 2.4, x: 0.5, y: ROWS.includes(at) ? 0.3 : 0.18, free: { top: 0, right: 1, bottom: 0.32 } }),
  };
});
