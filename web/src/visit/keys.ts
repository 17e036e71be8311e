// The keys of the page, in one table that both works and is shown as the help sheet. They are silent while text is
// typed, and a focused button keeps its own Space and Enter.

import * as actions from "./actions";
import { CAMERAS, camerasOf } from "../stage/renderers/renderer";
import { hideFirst } from "../run/answers/attention-row";
import * as stage from "../stage/stage";
import * as flight from "../stage/flight/flight";
import { helpOpen, panelled, renderer, result, resultClosed } from "./store";

interface Key {
  keys: string; // as the sheet shows them
  does: string | (() => string); // what the page has decides, where it is a function
  match(event: KeyboardEvent): boolean;
  run(event: KeyboardEvent): void;
  panel?: true; // it opens one
}

const far = (event: KeyboardEvent): number => (event.shiftKey ? 10 : 1);
const is =
  (...names: string[]) =>
  (event: KeyboardEvent) =>
    names.includes(event.key);

const KEYS: readonly Key[] = [
  { keys: "Space", does: "play or pause; after the end: run again", match: is(" "), run: () => actions.toggle() },
  {
    keys: "→",
    does: "one step on; at the end the engine takes it. With Shift: ten",
    match: is("ArrowRight"),
    run: (event) => actions.step(far(event)),
  },
  {
    keys: "←",
    does: "one step back. With Shift: ten",
    match: is("ArrowLeft"),
    run: (event) => actions.step(-far(event)),
  },
  { keys: "Home", does: "the first step", match: is("Home"), run: () => actions.first() },
  { keys: "End", does: "the newest step", match: is("End"), run: () => actions.end() },
  { keys: "N", does: "KV cache on or off", match: is("n", "N"), run: () => actions.toggleCache() },
  {
    keys: "1 – 5",
    does: () =>
      `camera: ${camerasOf(renderer.value)
        .map((name) => `${CAMERAS.indexOf(name) + 1} ${name}`)
        .join(", ")}`,
    match: (event) => /^[1-5]$/.test(event.key),
    run: (event) => actions.setCamera(CAMERAS[Number(event.key) - 1] ?? "iso"),
  },
  {
    keys: "[ ]",
    does: "layer before, layer after: up and down on the wall",
    match: is("[", "]"),
    run: (event) => actions.changeLayer(event.key === "[" ? -1 : 1),
  },
  {
    keys: "{ }",
    does: "head before, head after",
    match: is("{", "}"),
    run: (event) => actions.changeHead(event.key === "{" ? -1 : 1),
  },
  {
    keys: "S",
    does: "the first token’s attention: hide it, show it",
    match: is("s", "S"),
    run: () => (hideFirst.value = !hideFirst.value),
  },
  {
    keys: "B",
    does: "branches: continue from this step with another token",
    match: is("b", "B"),
    run: () => actions.openPanel("branches"),
    panel: true,
  },
  { keys: "L", does: "the lesson", match: is("l", "L"), run: () => actions.openPanel("learn"), panel: true },
  { keys: "V", does: "3-D or 2-D", match: is("v", "V"), run: () => actions.toggleRenderer() },
  { keys: "+ −", does: "zoom", match: is("+", "=", "-"), run: (event) => stage.zoom(event.key === "-" ? 0.8 : 1.25) },
  {
    keys: "I",
    does: "fly into the model from the word that is read most, and on",
    match: is("i", "I"),
    run: () => (flight.stop.value === null ? flight.begin() : flight.move(1)),
  },
  {
    keys: "Esc",
    does: "close this sheet, leave the prompt box, out of a cell, from the end of a run back to the wall",
    match: (event) => event.key === "Escape" && (flight.stop.value !== null || result.value !== null),
    run: () => (flight.stop.value !== null ? flight.move(-1) : (resultClosed.value = true)),
  },
  { keys: "?", does: "this sheet", match: is("?"), run: () => (helpOpen.value = !helpOpen.value) },
];

/** The keys that do something on this page. */
export const keys = (): readonly Key[] => KEYS.filter(({ panel }) => !panel || panelled.value);

const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [-1, 0],
  ArrowRight: [1, 0],
  ArrowUp: [0, -1],
  ArrowDown: [0, 1],
};

export function listen(): void {
  addEventListener("keydown", onKey);
  addEventListener("mousedown", keepFocus);
}

function onKey(event: KeyboardEvent): void {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || helpOpen.value) return;
  const target = event.target instanceof Element ? event.target : null;
  if (target?.closest("textarea, input, select, dialog, [contenteditable]")) return;
  if (target?.closest("button, a, summary") && (event.key === " " || event.key === "Enter")) return;
  const arrow = target?.closest(".canvas") && !event.shiftKey ? ARROWS[event.key] : undefined;
  if (arrow) stage.turn(...arrow);
  else {
    const key = keys().find((entry) => entry.match(event));
    if (!key) return;
    key.run(event);
  }
  event.preventDefault();
}

/** A click on a button does not take the keys from the page, so that Space still plays afterwards; Tab does. */
function keepFocus(event: MouseEvent): void {
  const target = event.target instanceof Element ? event.target : null;
  if (!target?.closest("button")) return;
  event.preventDefault();
  const focused = document.activeElement;
  if (focused instanceof HTMLElement && !target.closest("dialog")) focused.blur();
}
