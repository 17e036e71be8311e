// Where the visitor is in the guide, and what was guessed.

import { signal } from "@preact/signals";
import type { Found } from "./script";

export interface Guess extends Found {
  given: number | string | null; // null: none was made
  ok: boolean;
}

export const at = signal(0);
export const guesses = signal<ReadonlyMap<string, Guess>>(new Map());
