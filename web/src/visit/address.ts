// The address keeps up with the form and the view, so that it can be copied or reloaded at any time. It is written
// without an entry in the history, and not more often than once in a while.

import { effect } from "@preact/signals";
import { fits, format, parse, type Link, type SamplerLink } from "./hash";
import * as nextRun from "../run/next-run";
import { HOME_CAMERA } from "../stage/renderers/renderer";
import {
  PACE,
  cache,
  camera,
  embedded,
  frame,
  head,
  joined,
  last,
  layer,
  live,
  model,
  pace,
  panel,
  picked,
  playing,
  rendererChoice,
  room,
  run,
  shown,
  site,
} from "./store";
import type { RunCard } from "../schema";

const PAUSE = 300; // ms

let written = location.hash; // what the page itself put there

/** Takes over what the address says; what it does not say is as in a fresh page. Layer and head wait for the model, which
 * says how many there are. */
export function read(): Link {
  const link = parse(location.hash);
  nextRun.prompt.value = link.prompt ?? nextRun.PROMPTS[0].text;
  nextRun.seed.value = link.seed ?? null;
  nextRun.temperature.value = link.temperature ?? null;
  nextRun.sampler.value = link.sampler ?? {};
  nextRun.stop.value = link.stop ?? "";
  nextRun.maxTokens.value = link.tokens ?? nextRun.MAX_TOKENS;
  pace.value = link.pace === undefined ? PACE : link.pace;
  cache.value = link.cache ?? true;
  camera.value = { name: link.camera ?? HOME_CAMERA };
  rendererChoice.value = link.renderer ?? null;
  panel.value = link.panel ?? null;
  room.value = link.room ?? null;
  embedded.value = link.embed ?? false;
  return link;
}

/** Calls `follow` when another address is put into the open page. What the page writes there itself is no such thing. */
export function listen(follow: (link: Link) => void): void {
  addEventListener("hashchange", () => {
    if (location.hash === written) return;
    written = location.hash;
    follow(read());
  });
}

/** What the page shows now, as far as it differs from the defaults. */
function now(): Link {
  const link: Link = {};
  const came = nextRun.givenNow();
  if (came !== null) link.inside = came.from;
  else if (nextRun.prompt.value !== nextRun.PROMPTS[0].text) link.prompt = nextRun.prompt.value;
  if (nextRun.seed.value !== null) link.seed = nextRun.seed.value;
  if (nextRun.temperature.value !== null) link.temperature = nextRun.temperature.value;
  if (Object.keys(nextRun.sampler.value).length > 0) link.sampler = nextRun.sampler.value;
  if (nextRun.maxTokens.value !== nextRun.MAX_TOKENS) link.tokens = nextRun.maxTokens.value;
  if (nextRun.stop.value !== "") link.stop = nextRun.stop.value;
  if (pace.value !== PACE) link.pace = pace.value;
  if (!cache.value) link.cache = false;
  if (picked.value) Object.assign(link, { layer: layer.value, head: head.value });
  if (camera.value.name !== HOME_CAMERA) link.camera = camera.value.name;
  if (rendererChoice.value !== null) link.renderer = rendererChoice.value;
  if (panel.value !== null) link.panel = panel.value;
  if (joined.value !== null && (site.value !== null || joined.value === run.value?.id.value)) link.run = joined.value;
  if (room.value !== null) link.room = room.value;
  if (embedded.value) link.embed = true;
  const held = site.value !== null || (live.value && shown.value < last.value);
  if (held && !playing.value && frame.value) link.step = frame.value.step;
  if (site.value !== null && frame.value?.cache === false) link.cache = false;
  return link;
}

/** Whether a link can hold the run that is shown; a trace file always can. A branch has tokens that nobody would draw. */
export const linkable = (): boolean =>
  site.value !== null ||
  (live.value && run.value?.card.parent == null && fits(run.value?.card.prompt ?? "") && nextRun.givenNow() === null);

/** Whether the page's address leads to this machine alone. */
export const nearby = /^(localhost|127\.|\[?::1)/.test(location.hostname);

/** A link to exactly this run, in a page of its own: with the seed that it drew. */
export function share(): string {
  const link = now();
  if (site.value === null) delete link.run; // it ends with the server
  delete link.embed;
  delete link.room;
  const card = live.value ? run.value?.card : null;
  if (card) {
    link.prompt = card.prompt;
    link.temperature = card.temperature;
    link.sampler = samplerOf(card);
    link.tokens = card.max_tokens;
    delete link.stop;
    if (card.stop[0] !== undefined) link.stop = card.stop[0];
    if (card.seed !== null) link.seed = card.seed;
  }
  return location.href.replace(/#.*/, "") + format(link);
}

/** The sampler settings of a run that differ from the defaults. */
function samplerOf({ top_k, top_p, min_p, repetition_penalty }: RunCard): SamplerLink {
  return {
    ...(top_k !== (model.value?.top_k ?? 0) && { top_k }),
    ...(top_p !== (model.value?.top_p ?? 1) && { top_p }),
    ...(min_p !== 0 && { min_p }),
    ...(repetition_penalty !== 1 && { repetition_penalty }),
  };
}

export function keep(): void {
  let timer: ReturnType<typeof setTimeout> | null = null;
  const write = (): void => {
    timer = null;
    if (location.hash !== written) return; // another address was put there, and `listen` is about to be called
    const hash = format(now());
    if (location.hash !== hash)
      history.replaceState(null, "", hash === "" ? location.pathname + location.search : hash);
    written = location.hash;
  };
  effect(() => {
    now(); // what it reads is what the address depends on
    timer ??= setTimeout(write, PAUSE); // one that is waiting stays: a run that goes on would put it off to its end
  });
}
