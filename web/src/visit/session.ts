// The course of a visit: the recording plays while the model loads, then the same prompt runs for real; later runs,
// opened files, and a run that the server has lost and that is built again from its text. It decides; live.ts and
// player.ts carry out.

import { batch } from "@preact/signals";
import * as api from "./api";
import { ask } from "./server";
import * as nextRun from "../run/next-run";
import * as live from "./live";
import * as player from "../run/play/player";
import type { Link } from "./hash";
import { free, liveRuns } from "../run/live-runs";
import { Run } from "../run/run";
import type { ModelCard, RunCard } from "../schema";
import {
  alone,
  asking,
  cache,
  clustered,
  head,
  joined,
  layer,
  link,
  loading,
  model,
  panel,
  playing,
  problem,
  reachable,
  refused,
  resultClosed,
  run,
  shown,
  site,
  type Site,
} from "./store";
import { select } from "../run/answers/attention-row";
import { chooseHead } from "../run/answers/first-head";
import * as tour from "./tour";
import { readTrace } from "../run/trace";

const LOOKS = ["camera", "renderer"]; // of a link: with no more than these a visit begins with the tour
const ASK = 250; // ms between two looks at a loading model
const LONGEST_ASK = 4000; // milliseconds, where no server answers
const GLANCE = 250; // ms in which an engine that is there says so: then nothing is played before the real run

let reviving: Promise<void> | null = null;

/** The first minute. A link may bring a prompt and a step to stop at; a link with an empty prompt runs nothing. */
export async function boot(wanted: Link): Promise<void> {
  const introduce = (): void => (wanted.pace === undefined ? player.introduce() : undefined); // else the link sets a speed
  introduce();
  void playRecording();
  await ready();
  if (run.value?.origin === "file") return; // someone opened a file meanwhile
  introduce();
  await follow(wanted);
  if (Object.keys(wanted).every((name) => LOOKS.includes(name))) tour.begin();
}

/** Runs what a link asks for. A link with an empty prompt runs nothing. */
export async function follow(wanted: Link): Promise<void> {
  if (model.value === null) return; // the prompt box has it, and it runs when the model is there
  if (clustered.value) {
    panel.value ??= "replicas";
    return leave();
  }
  if (wanted.layer !== undefined || wanted.head !== undefined)
    select(wanted.layer ?? layer.value, wanted.head ?? head.value);
  try {
    if (wanted.inside !== undefined) await (await import("../chat/inside")).take(wanted.inside);
  } catch (error) {
    leave();
    return report(error);
  }
  const told = wanted.layer !== undefined || wanted.head !== undefined || wanted.step !== undefined;
  if (wanted.run !== undefined) await join(wanted.run);
  else if (wanted.prompt === "") leave();
  else {
    if (wanted.panel !== "guide") await start(wanted.step ?? null); // the guide begins its own
    if (!told) chooseHead();
  }
}

/** Shows a run that the server has, at its end, and follows it. */
async function join(id: string): Promise<void> {
  try {
    const answer = await ask(`runs/${id}/trace.json`);
    if (!answer.ok)
      throw new Error("The server has no such run any more. A run ends with its server, or when nobody looks at it.");
    void release();
    const found = readTrace(await answer.text(), "live", id);
    cache.value = found.state.value.cache;
    joined.value = id;
    adopt(found);
  } catch (error) {
    leave();
    report(error);
  }
}

/** Plays the run of a page that was saved as a file: no server is asked for anything. */
export function playAlone(trace: string): void {
  alone.value = true;
  panel.value = null; // none works without a server, whatever the address says
  try {
    const kept = readTrace(trace, "file", "this file");
    player.introduce();
    show(kept, -1);
    player.play();
    tour.begin();
  } catch (error) {
    report(error);
  }
}

/** Opens a site of recorded runs, with what a link names of it. */
export async function openSite(found: Site, wanted: Link): Promise<void> {
  alone.value = true;
  site.value = found;
  player.introduce();
  await visit(wanted.run ?? found.runs[0]?.id ?? "", wanted);
  if (Object.keys(wanted).every((name) => LOOKS.includes(name))) tour.begin();
}

/** Shows a run of the site: from its beginning, or the step and the way that a link names. */
export async function visit(id: string, wanted: Link = {}): Promise<void> {
  const about = site.value?.runs.find((one) => one.id === id);
  try {
    const answer = about && (await ask(`runs/${about.id}.json`).catch(() => null));
    if (!about || !answer?.ok) throw new Error("This site has no such run.");
    const found = readTrace(await answer.text(), "file", about.name);
    joined.value = about.id;
    show(found, -1);
    player.showWay(wanted.cache ?? cache.value); // another run keeps the way that was chosen
    if (wanted.step === undefined) player.play();
    else player.seek(wanted.step);
  } catch (error) {
    report(error);
  }
}

/** Waits until the model is there. Fails never: it asks for as long as the page is open, and less often the longer
 * nobody answers, or the longer the answer is an error. */
export async function ready(): Promise<void> {
  for (let pause = ASK; ;) {
    try {
      loading.value = await api.status();
      reachable.value = true;
      if (loading.value.phase === "ready") {
        setModel(await api.model());
        refused.value = "";
        return;
      }
      pause = ASK;
    } catch (error) {
      const answered = error instanceof api.ApiError && error.kind !== "unreachable";
      reachable.value = answered;
      refused.value = answered ? error.message : "";
      pause = Math.min(LONGEST_ASK, pause * 2);
    }
    await rest(pause);
  }
}

const rest = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

function setModel(card: ModelCard): void {
  batch(() => {
    model.value = card;
    layer.value = attending(card, Math.min(layer.value, card.layers - 1));
    head.value = Math.min(head.value, card.heads - 1);
  });
}

/** The layer nearest to this one that attends to tokens: one that keeps a state has no row to show. */
function attending({ windows }: ModelCard, wanted: number): number {
  const layers = windows.flatMap((window, layer) => (window === 0 ? [] : [layer]));
  return layers.sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted))[0] ?? wanted;
}

async function playRecording(): Promise<void> {
  await rest(GLANCE);
  if (loading.value?.phase === "ready") return;
  const answer = await ask("recorded.json").catch(() => null);
  if (!answer?.ok || run.value !== null) return;
  try {
    const recorded = readTrace(await answer.text(), "recorded", "recorded.json");
    if (run.value !== null) return; // the engine was faster
    show(recorded, -1);
    player.play();
  } catch {
    // Without a recording the page waits for the model; nothing is lost but a picture.
  }
}

/** Runs what the form asks for, from its first step; a recording begins again. */
export async function start(stopAt: number | null = null): Promise<void> {
  if (alone.value) return player.again(stopAt);
  if (nextRun.prompt.value === "" || clustered.value) return;
  await begin(() => api.createRun(nextRun.request(cache.value, layer.value, head.value)), stopAt);
}

/** Writes the shown run's text once more, by its card: the same ids, settings and seed, whatever the form says now. */
export async function again(): Promise<void> {
  const card = run.value?.card;
  if (card === undefined) return;
  const { prompt, ids, pictures, stop, ignore_eos, ...settings } = asked(card);
  const watched = { cache: cache.value, layer: layer.value, head: head.value };
  if (card.parent === null)
    return begin(() => api.createRun({ prompt, ids, pictures, stop, ignore_eos, ...settings, ...watched }));
  const fork = { step: card.first_step - 1, token: card.written.at(-1)?.id ?? null, ...settings };
  return begin(() => api.forkRun(card.parent ?? "", fork), null, false);
}

/** Shows the run that `make` asks the server for. `frees`: the page's earlier runs end on the server. */
export async function begin(make: () => Promise<RunCard>, stopAt: number | null = null, frees = true): Promise<void> {
  if (asking.value || model.value === null) return;
  player.pause();
  batch(() => {
    asking.value = true;
    problem.value = null;
  });
  try {
    const card = await make().catch(async (error: unknown) => {
      if (!frees || !(error instanceof api.ApiError) || error.kind !== "capacity") throw error;
      await release(); // the runs of this page may be what takes the room
      link.value = "lost"; // where there is no room for the next one either, the shown one can be built again
      return make();
    });
    if (frees) void release();
    const next = new Run(model.value, card, "live");
    next.reusedInChat = nextRun.givenNow()?.reused ?? 0;
    adopt(next);
    if (stopAt === null) player.play();
    else player.stepLater(stopAt + 1);
  } catch (error) {
    report(error, () => void start(stopAt));
  } finally {
    asking.value = false;
  }
}

/** Shows a live run at its end, and follows it. What was shown before stays on the server, until `release`. */
export function adopt(next: Run): void {
  liveRuns.add(next);
  resultClosed.value = false;
  show(next, next.count.value - 1);
  watch(next);
}

function watch(current: Run): void {
  live.attach(current, {
    ready: player.resume,
    lost: () => {
      if (playing.value) void revive();
    },
  });
}

/** A lost run is built again: the same prompt and seed, and what was written, so that it goes on as it would have. */
export function revive(): Promise<void> {
  reviving ??= rebuild().finally(() => (reviving = null));
  return reviving;
}

async function rebuild(): Promise<void> {
  const current = run.value;
  if (current?.origin !== "live" || current.ended) return;
  await ready();
  if (run.value !== current) return;
  try {
    const card = await api.createRun({
      ...asked(current.card),
      written: current.written(),
      first_step: current.next,
      earlier: current.earlier(),
      cache: cache.value,
      layer: layer.value,
      head: head.value,
    });
    if (run.value !== current) return void api.endRun(card.run);
    current.continueAs(card);
    liveRuns.add(current); // it is freed with the others, also where they were freed before
    watch(current);
  } catch (error) {
    if (error instanceof api.ApiError && error.kind === "unreachable") return rest(ASK).then(rebuild);
    player.pause();
    report(error);
  }
}

/** The request that made a run, from its card. */
function asked(card: RunCard) {
  const { prompt, tokens, held, temperature, top_k, top_p, min_p, repetition_penalty } = card;
  const { seed, max_tokens, stop, ignore_eos } = card;
  const ids = tokens.map(({ id }) => id);
  const dials = { temperature, top_k, top_p, min_p, repetition_penalty };
  return { prompt, ids, pictures: held, ...dials, seed, max_tokens, stop: [...stop], ignore_eos };
}

/** Whether the live run is one that must be built again before the engine can go on with it. */
export function isLost(): boolean {
  const current = run.value;
  return current?.origin === "live" && (link.value === "lost" || current.state.value.state === "expired");
}

/** Shows a trace file in place of what is shown. */
export async function openTrace(file: File): Promise<void> {
  try {
    const opened = readTrace(await file.text(), "file", file.name);
    void release();
    show(opened, opened.count.value - 1);
    problem.value = null;
  } catch (error) {
    problem.value = { kind: "trace", message: error instanceof Error ? error.message : String(error) };
  }
}

/** Nothing is shown: the page offers something to begin with. */
export function leave(): void {
  void release();
  batch(() => {
    run.value = null;
    problem.value = null;
  });
  player.reset(-1);
}

/** Asks again at once, where the page would wait before its next attempt. */
export function retryNow(): void {
  live.retryNow();
}

/** Ends the page's runs on the server, whose stream would ask after them otherwise. */
function release(): Promise<void> {
  live.detach();
  return free();
}

function show(next: Run, index: number): void {
  batch(() => {
    run.value = next;
    shown.value = index;
    const [l, h] = next.card.watched;
    const watched = next.frames[Math.max(0, index)]?.attention;
    layer.value = watched?.layer ?? l;
    head.value = watched?.head ?? h;
  });
  player.reset(index);
}

/** Shows the error of a request that failed. `again` repeats the request. */
export function report(error: unknown, again?: () => void): void {
  problem.value = {
    kind: error instanceof api.ApiError ? error.kind : "page",
    message: error instanceof Error ? error.message : String(error),
    ...(again && { again }),
  };
  if (error instanceof api.ApiError && error.kind === "loading") void ready();
}
