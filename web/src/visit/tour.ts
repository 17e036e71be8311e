// The first twenty seconds of a visit play themselves: the prompt, the cache as it fills, eight tokens, some steps without
// the cache, and on with it. Then it is the visitor's turn. Any action ends it, and the run goes on.

import { effect, signal, untracked } from "@preact/signals";
import * as live from "./live";
import * as player from "../run/play/player";
import type { Run } from "../run/run";
import { cache, playing, run, shown, switched } from "./store";

const WITH = 8; // steps with the cache after the prompt's
const WITHOUT = 3;
const SLOW = 0.7; // tokens per second of the steps without: time to read the sentence

/** What the tour is doing; "over": it has come to its end, which is an invitation. */
export const tour = signal<"none" | "with" | "without" | "back" | "over">("none");

function turn({ origin }: Run, on: boolean): void {
  if (origin !== "live") return player.showWay(on);
  cache.value = on;
  live.send({ op: "cache", on });
}

/** Begins it on the run that is shown, which plays: a live one, or a recorded one that has both ways. */
export function begin(): void {
  const first = run.value;
  if (first === null || !playing.value) return;
  if (first.origin === "live" ? !cache.value : first.both.get(true) !== first) return;
  const stays = (): boolean => run.value === first || [...first.both.values()].some((way) => way === run.value);
  tour.value = "with";
  const stop = effect(() => {
    const left = !stays() || switched.value || !playing.value;
    const at = shown.value;
    untracked(() => {
      const frames = run.value?.frames ?? [];
      const off = frames.slice(WITH, at + 1).filter((step) => !step.cache).length;
      if (left) end("none");
      else if (tour.value === "with" && at >= WITH) {
        tour.value = "without";
        player.atMost(SLOW);
        turn(first, false);
      } else if (tour.value === "without" && off >= WITHOUT) {
        tour.value = "back";
        turn(first, true);
      } else if (tour.value === "back" && frames[at]?.cache === true) end("over");
    });
  });
  function end(how: "none" | "over"): void {
    if (how === "none" && first !== null && tour.value !== "with" && stays() && !switched.value) turn(first, true);
    tour.value = how;
    player.atMost(null);
    queueMicrotask(() => stop()); // not while it runs
  }
}
