// The pictures of a prompt by their tokens: which cell of which picture each one stands for.

import { signal } from "@preact/signals";
import type { PictureCard } from "../schema";

/** The program that shows pictures; it is fetched for the first run that has some. */
export const shower = signal<typeof import("../stage/HeatMaps") | null>(null);

export interface Patch {
  picture: PictureCard;
  row: number;
  column: number;
}

/** By the positions of their tokens, picture by picture and row by row. */
export function patchesOf(pictures: readonly PictureCard[]): Map<number, Patch> {
  const found = new Map<number, Patch>();
  for (const picture of pictures) {
    const { rows, columns, starts } = picture;
    let i = 0;
    for (const start of starts)
      for (let at = start; at < start + (rows * columns) / starts.length; at++, i++)
        found.set(at, { picture, row: (i / columns) | 0, column: i % columns });
  }
  if (pictures[0]) void import("../stage/HeatMaps").then((program) => (shower.value = program));
  return found;
}
