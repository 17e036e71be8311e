// The cell of the cache that was clicked on the stage: a token, and a layer where the picture has one under the pointer.

import { signal } from "@preact/signals";

export const chosenCell = signal<{ readonly position: number; readonly layer: number | null } | null>(null);
