// The pictures of a prompt by their tokens: which cell of which picture each one stands for.

import { signal } from "@preact/signals";
import type { PictureCard } from "../schema";

/** The program that shows pictures; it is fetched for the first run that has some. */
export const shower = signal<typeof import("../panels/HeatMaps") | null>(null);

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
    const each = { length: (rows * columns) / starts.length };
    starts
      .flatMap((start) => Array.from(each, (_, i) => start + i))
      .forEach((position, i) => found.set(position, { picture, row: Math.floor(i / columns), column: i % columns }));
  }
  if (found.size > 0) void import("../panels/HeatMaps").then((program) => (shower.value = program));
  return found;
}
