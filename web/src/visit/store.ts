// The one state of the page, as signals, and what follows from it. A live run, the recording and an opened file all end
// up as the same `run`; the stage, the text, the instruments and the list are views of it. Modules that act (session,
// player, live) write here; components only read.

import { computed, signal } from "@preact/signals";
import { moment, written } from "./clock";
import { type Camera, HOME_CAMERA } from "../stage/renderers/renderer";
import type { Run, Totals } from "../run/run";
import type { Loading, ModelCard, StepFrame, Summary } from "../schema";

/** What the engine's side is doing, seen from the page. */
export const loading = signal<Loading | null>(null); // the last answer to /status; null: none yet
export const reachable = signal(true);
export const refused = signal(""); // why the engine cannot say what it has, although it answers; empty: it can
export const model = signal<ModelCard | null>(null); // of the live engine
export const clustered = computed(() => (model.value?.replicas ?? 0) > 0); // replicas write without pauses: it makes no runs
export const asking = signal(false); // a run has been asked for and is not there yet

export const room = signal<"teach" | "join" | null>(null); // the visitor's part in a class
export const embedded = signal(false); // whether the page is a part of another one: the stage, the text and the transport
export const joined = signal<string | null>(null); // the run that a link named by its id
export const alone = signal(false); // whether this page is a file or a site of recorded runs, and there is no engine

/** What a static site has recorded, where the page is one; the files are in runs/ and beside the page. */
export interface Site {
  readonly runs: readonly { readonly id: string; readonly name: string; readonly prompt: string }[];
}
export const site = signal<Site | null>(null);

/** Whether the page has panels, which need the server and a place beside the stage. */
export const panelled = computed(() => !alone.value && !embedded.value);

/** The link of the live run. */
export type LinkState = "none" | "opening" | "open" | "broken" | "lost";
export const link = signal<LinkState>("none");
export const retryAt = signal(0); // ms, as performance.now(): when a broken link is tried again

/** Why something that was asked for did not happen, until the next attempt. */
export interface Problem {
  kind: string;
  message: string;
  again?: () => void; // asks for the same once more, where that can help
}
export const problem = signal<Problem | null>(null);
/** A problem of the run or of the page's own; a file that cannot be read is told on the stage and stops nothing. */
const obstacle = computed(() => (["trace", "own"].includes(problem.value?.kind ?? "") ? null : problem.value));

/** The run that is shown, and which of its frames: an index, -1 before the first. */
export const run = signal<Run | null>(null);
export const shown = signal(-1);

/** How it is looked at. */
export const layer = signal(4); // later layers look back at words; the first ones mostly at neighbours
export const head = signal(3);
export const picked = signal(false); // whether layer and head were chosen by someone
export const camera = signal<{ readonly name: Camera }>({ name: HOME_CAMERA });
export const hovered = signal<number | null>(null); // a position
export const rendererChoice = signal<"2d" | "3d" | null>(null); // null: what suits the machine
export const renderer = signal<"2d" | "3d" | null>(null); // what is drawing
export const rendererNote = signal(""); // why the renderer is not the one that was hoped for
export const pictureTime = signal<number | null>(null); // ms, where 3-D was found to be too slow here
export const panel = signal<string | null>(null); // the panel in the drawer; null: the drawer is closed
export const badges = signal(false); // whether each number says where it comes from, or only under the pointer
export const helpOpen = signal(false);
export const resultClosed = signal(false); // whether the band at the end of a run was put away

/** How it goes on. */
export const playing = signal(false);
export const PACE = 4; // tokens per second, until the visitor says otherwise
export const pace = signal<number | null>(PACE); // null: as fast as the engine
export const cache = signal(true); // for the next step of a live run
export const switched = signal(false); // whether the cache was ever switched: then no visitor needs to be told how

export const frame = computed<StepFrame | null>(() => run.value?.frames[shown.value] ?? null);
export const totals = computed<Totals | null>(() => run.value?.totals[shown.value] ?? null);
/** The newest frame whose token is on the stage: that of the shown step once it is written. */
export const writtenFrame = computed<StepFrame | null>(() =>
  written.value ? frame.value : (run.value?.frames[shown.value - 1] ?? null),
);
/** The figures of the whole run, once it is over and its last token is on the stage. */
export const summary = computed<Summary | null>(() => {
  const current = run.value;
  const over = current?.ended === true && shown.value === last.value && moment.value === "rest";
  return over ? (current.state.value.summary ?? null) : null;
});
/** Those figures while the band that tells of them is open. */
export const result = computed<Summary | null>(() => (resultClosed.value ? null : summary.value));
export const last = computed(() => (run.value?.count.value ?? 0) - 1);
/** Tokens of the text as shown. */
export const length = computed(() => run.value?.length(shown.value) ?? 0);
/** The card of the model that made what is shown; without a run that of the engine. */
export const card = computed<ModelCard | null>(() => run.value?.model ?? model.value);
export const live = computed(() => run.value?.origin === "live");

export type PageState =
  | "boot"
  | "loading-model"
  | "empty"
  | "tokenizing"
  | "queued"
  | "prefill"
  | "running"
  | "paused"
  | "throttled"
  | "done"
  | "error"
  | "disconnected"
  | "expired"
  | "replay";

export const pageState = computed<PageState>(() => {
  const current = run.value;
  if (current?.origin === "file") return "replay";
  if (current === null || current.origin === "recorded") {
    if (!reachable.value) return "disconnected";
    if (asking.value) return "tokenizing";
    if (refused.value !== "" || loading.value?.phase === "failed" || obstacle.value !== null) return "error";
    if (loading.value === null) return "boot";
    if (loading.value.phase === "loading" || model.value === null) return "loading-model";
    return "empty";
  }
  if (asking.value) return "tokenizing";
  if (link.value === "broken" || !reachable.value) return "disconnected";
  if (refused.value !== "" || obstacle.value !== null) return "error";
  const { state, throttled } = current.state.value;
  if (state === "failed") return "error";
  if (current.ended) return "done";
  if (link.value === "lost") return loading.value?.phase === "loading" ? "loading-model" : "expired";
  if (state === "expired") return "expired";
  if (state === "done") return "throttled"; // the last frames are still to come
  if (link.value === "opening" && current.count.value === 0) return "queued";
  if (state === "paused") return current.count.value === 0 && playing.value ? "prefill" : "paused";
  if (current.count.value === 0 || current.frames[last.value]?.token === null) return "prefill";
  return throttled ? "throttled" : "running";
});
