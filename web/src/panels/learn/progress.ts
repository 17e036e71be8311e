// Where a learner is: the open card, the level of its text, the cards that were read and the challenges that were met.
// Kept only in this browser.

import { effect, signal } from "@preact/signals";
import { CARDS, LEVELS, type Level } from "./cards";

const KEY = "tokenwright.learn";

interface Kept {
  card: string;
  level: Level;
  seen: string[];
  done: string[];
}

function read(): Partial<Kept> {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    return typeof found === "object" && found !== null ? found : {};
  } catch {
    return {}; // no storage here, or another page's
  }
}

const names = (value: unknown): string[] =>
  Array.isArray(value) ? value.filter((name): name is string => typeof name === "string") : [];

const kept = read();
export const card = signal(CARDS.some(({ id }) => id === kept.card) ? (kept.card as string) : "loop");
export const level = signal<Level>(LEVELS.find((name) => name === kept.level) ?? LEVELS[0]);
export const seen = signal<readonly string[]>(names(kept.seen));
export const done = signal<readonly string[]>(names(kept.done));

effect(() => {
  const now: Kept = { card: card.value, level: level.value, seen: [...seen.value], done: [...done.value] };
  try {
    localStorage.setItem(KEY, JSON.stringify(now));
  } catch {
    // Where nothing can be kept, the lesson works all the same.
  }
});

/** Opens a card; the one that was open counts as read. */
export function open(id: string): void {
  if (!seen.value.includes(card.value)) seen.value = [...seen.value, card.value];
  card.value = id;
}

export function move(by: number): void {
  const next = CARDS[CARDS.findIndex(({ id }) => id === card.value) + by];
  if (next) open(next.id);
}

export function solved(id: string): void {
  if (!done.value.includes(id)) done.value = [...done.value, id];
}
