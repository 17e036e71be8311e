// A reader's cells, and which of them were right. Kept only in this browser.

import { effect, signal } from "@preact/signals";

const KEY = "tokenwright.course";

type Cells = Readonly<Record<string, string>>;

function read(): { lesson?: unknown; cells?: unknown; solved?: unknown } {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    return typeof found === "object" && found !== null ? found : {};
  } catch {
    return {}; // no storage here, or another page's
  }
}

const texts = (value: unknown): Cells =>
  Object.fromEntries(Object.entries(value ?? {}).filter(([, code]) => typeof code === "string")) as Cells;

const kept = read();
export const lesson = signal(typeof kept.lesson === "string" ? kept.lesson : "");
export const cells = signal<Cells>(texts(kept.cells)); // as they stand, by lesson
export const solved = signal<Cells>(texts(kept.solved)); // as they were when they passed

effect(() => {
  const now = { lesson: lesson.value, cells: cells.value, solved: solved.value };
  try {
    localStorage.setItem(KEY, JSON.stringify(now));
  } catch {
    // Where nothing can be kept, the course works all the same.
  }
});
