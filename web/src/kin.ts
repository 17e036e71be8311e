// The live runs that this page holds on the server: the one that is shown, and those that it forked from or that forked
// from it. They are freed together, when another text begins.

import * as api from "./api";
import type { Run } from "./run";
import { joined } from "./store";

export const kin = new Set<Run>();

/** Ends all of them on the server, but for one that a link named: it is another page's. */
export function free(): void {
  for (const run of kin) if (run.id.value !== joined.value) api.deleteRun(run.id.value);
  kin.clear();
}
