// The live runs that this page holds on the server: the one that is shown, and those that it forked from or that forked
// from it. They are freed together, when another text begins.

import * as api from "../visit/api";
import type { Run } from "./run";
import { joined } from "../visit/store";

export const liveRuns = new Set<Run>();

/** Ends all of them on the server, but for one that a link named: it is another page's. */
export async function free(): Promise<void> {
  const own = [...liveRuns].filter((run) => run.id.value !== joined.value);
  liveRuns.clear();
  await Promise.all(own.map((run) => api.endRun(run.id.value)));
}
