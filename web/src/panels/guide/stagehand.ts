// Brings the stage to the place of a scene: a run of one of the guide's texts, at a step, made in the way that the script
// says. Steps that are there already are shown again; others the engine makes.

import { effect } from "@preact/signals";
import * as flight from "../../stage/flight/flight";
import * as api from "../../visit/api";
import * as live from "../../visit/live";
import * as nextRun from "../../run/next-run";
import * as player from "../../run/play/player";
import * as session from "../../visit/session";
import type { Run } from "../../run/run";
import {
  asking,
  cache,
  head,
  last,
  layer,
  link,
  model,
  pace,
  problem,
  resultClosed,
  run,
  shown,
} from "../../visit/store";

/** A text of the guide. */
export interface Text {
  prompt: string;
  tokens: number; // to be written
  ends?: true; // whether the model may end it; the others go on to their length
  without?: readonly number[] | "all"; // steps that are made without the cache
}

const PACE = 30; // tokens per second of a text that is written to its end

/** The newest run of each text. */
const runs = new Map<Text, Run>();

/** Waits until something is so. Rejects where the guide goes elsewhere, or the engine refuses. */
export function until(met: () => boolean, gone: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const leave = (): void => reject(new DOMException("", "AbortError"));
    if (gone.aborted) return leave();
    let stop = (): void => undefined;
    const end = (settle: () => void): void => {
      gone.removeEventListener("abort", left);
      queueMicrotask(() => stop()); // not while it runs
      settle();
    };
    const left = (): void => end(leave);
    gone.addEventListener("abort", left);
    stop = effect(() => {
      const trouble = problem.value;
      if (trouble !== null) end(() => reject(new Error(trouble.message)));
      else if (met()) end(resolve);
    });
  });
}

const uses = ({ without }: Text, step: number): boolean => without !== "all" && !without?.includes(step);

/** Shows a run of the text that has come at least so far; a new one, if there is none that can go on. */
async function present(text: Text, gone: AbortSignal): Promise<Run> {
  flight.go(null);
  const known = runs.get(text);
  if (known !== undefined && run.value === known && !session.isLost()) return known;
  await until(() => model.value !== null && !asking.value, gone);
  nextRun.prompt.value = text.prompt;
  const before = run.value;
  cache.value = uses(text, 0);
  const request = {
    ...nextRun.request(cache.value, layer.value, head.value),
    max_tokens: text.tokens,
    temperature: 0,
    seed: 1,
    stop: [],
    ignore_eos: text.ends !== true,
  };
  void session.begin(() => api.createRun(request), 0);
  await until(() => run.value !== before && run.value !== null && link.value === "open" && last.value >= 0, gone);
  const made = run.value as Run;
  runs.set(text, made);
  return made;
}

/** Shows the text after a step: one that was made, or the engine makes those up to it. */
export async function show(text: Text, step: number, gone: AbortSignal): Promise<Run> {
  const current = await present(text, gone);
  if (step <= last.value) {
    if (shown.value !== step) player.seek(step);
    return current;
  }
  player.seek(last.value);
  for (let next = last.value + 1; next <= step && !current.ended; next++) {
    turn(uses(text, next));
    player.step(1);
    await until(() => shown.value >= next || (current.ended && shown.value === last.value), gone);
  }
  return current;
}

function turn(on: boolean): void {
  if (cache.value === on) return;
  cache.value = on;
  live.send({ op: "cache", on });
}

/** Lets the text be written to its end, unless it is: to be watched, or at the engine's speed (null). */
export async function finish(text: Text, gone: AbortSignal, speed: number | null = PACE): Promise<Run> {
  const current = await present(text, gone);
  player.seek(last.value);
  if (!current.ended) {
    const own = pace.value;
    player.setPace(speed);
    player.play();
    await until(() => current.ended && shown.value === last.value, gone).finally(() => player.setPace(own));
  }
  resultClosed.value = false;
  return current;
}

/** The page is the visitor's again: the next step is made with the cache. */
export const release = (): void => turn(true);
