// Branches: a run goes on from an earlier step of another one, with another token or other settings, on the pages that
// hold the text up to there. This page keeps every run of the tree with its frames, so that it can show each again.

import { signal } from "@preact/signals";
import * as api from "../visit/api";
import * as nextRun from "./next-run";
import * as player from "./play/player";
import * as session from "../visit/session";
import { liveRuns } from "./live-runs";
import { Run } from "./run";
import { asking, live, model, playing, problem, run } from "../visit/store";
import type { Branches } from "../schema/branches";

/** The tree that the shown run stands in, as the server counted it last; null: not asked for. */
export const tree = signal<Branches | null>(null);

/** Goes on from a step of the shown run; `token` null: with the token that it wrote there. */
export async function fork(step: number, token: number | null, settings: Partial<api.Settings> = {}): Promise<void> {
  const parent = run.value;
  if (parent === null || !live.value || model.value === null || asking.value) return;
  const goesOn = playing.value;
  player.pause();
  asking.value = true;
  problem.value = null;
  try {
    const card = await api.forkRun(parent.id.value, { step, token, ...settings, ...room(parent, step) });
    session.adopt(new Run(model.value, card, "live"));
    if (goesOn) player.play();
    else player.stepLater(1);
    void refresh();
  } catch (error) {
    session.report(error);
  } finally {
    asking.value = false;
  }
}

/** A fork where the parent has written all that it may gets as much again. */
function room(parent: Run, step: number): { max_tokens?: number } {
  const frame = parent.frames.find((one) => one.step === step);
  const written = (frame?.seq_len ?? 0) - parent.promptTokens;
  return written < parent.card.max_tokens ? {} : { max_tokens: written + nextRun.maxTokens.value };
}

/** The run of this page that the server calls so. */
export const known = (id: string): Run | undefined => [...liveRuns].find((one) => one.id.value === id);

/** Shows another run of the tree. */
export function choose(id: string): void {
  const next = known(id);
  if (next === undefined || next === run.value) return;
  player.pause();
  session.adopt(next);
}

/** Ends a run and frees its pages; the run that it forked from is shown instead, or another one that is left. */
export async function close(id: string): Promise<void> {
  const gone = known(id);
  if (gone === undefined || liveRuns.size < 2) return;
  const parent = gone.card.parent === null ? undefined : known(gone.card.parent);
  liveRuns.delete(gone);
  if (gone === run.value) session.adopt(parent ?? [...liveRuns][0] ?? gone);
  await api.endRun(id);
  await refresh();
}

/** Asks the server for the tree. */
export async function refresh(): Promise<void> {
  const current = run.value;
  if (current === null || !live.value) {
    tree.value = null;
    return;
  }
  const found = await api.branches(current.id.value).catch(() => null);
  if (found === null || run.value !== current) return;
  tree.value = found;
  if (current.model.windows.some((window) => window !== null)) return; // then the shared pages may be any
  for (const { run: id, shared } of found.branches) {
    const one = known(id);
    if (one !== undefined) one.shared.value = shared * current.model.page_size;
  }
}
