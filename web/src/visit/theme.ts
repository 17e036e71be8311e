// Dark, light, or what the system says. This browser keeps the choice; the renderers read the colours again when it changes.

import { computed, signal } from "@preact/signals";

export type Choice = "auto" | "dark" | "light";

const KEY = "tokenwright-theme";
const light = matchMedia("(prefers-color-scheme: light)");
const system = signal<"dark" | "light">(light.matches ? "light" : "dark");
light.addEventListener("change", () => (system.value = light.matches ? "light" : "dark"));

export const choice = signal<Choice>(stored());
const wanted = computed(() => (choice.value === "auto" ? system.value : choice.value));

/** What the document shows now: set after its attribute, so that styles read in an effect are the new ones. */
export const theme = signal<"dark" | "light">(wanted.value);

wanted.subscribe((value) => {
  document.documentElement.dataset.theme = value;
  theme.value = value;
});

export function choose(next: Choice): void {
  choice.value = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // Where storage is forbidden the choice lasts as long as the page.
  }
}

function stored(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "dark" || value === "light" ? value : "auto";
  } catch {
    return "auto";
  }
}
