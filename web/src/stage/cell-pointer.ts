// The cell of the cache that is under the pointer, and the one that was clicked: a token, and a layer where the picture has
// one there.

import { signal } from "@preact/signals";

/** The cell under the pointer, and where that is on the stage. */
export const hoveredCell = signal<{
  readonly position: number;
  readonly layer: number;
  readonly x: number;
  readonly y: number;
} | null>(null);

export const chosenCell = signal<{ readonly position: number; readonly layer: number | null } | null>(null);
