// The head that a visit begins with, chosen by measurement: of the first run's prompt, the head whose rows put most of
// their weight on few earlier tokens. Heads that read the first token or themselves show little on the stage.

import { effect } from "@preact/signals";
import type { AtlasCard, HeadCard } from "../../schema/heads";
import { keepsState, look } from "./attention-row";
import { call } from "../../visit/api";
import { picked, run } from "../../visit/store";

const MOST = 600; // heads that are measured

/** The one with the most weight on few earlier tokens; none where no head reads any. */
export const mostTelling = (heads: readonly HeadCard[]): HeadCard | null =>
  heads.reduce<HeadCard | null>((best, one) => (one.few > (best?.few ?? 0) ? one : best), null);

/** Looks at that head once a run has read its prompt, unless someone has chosen one by then. Of two runs the one that is
 * shown when the answer comes is measured. */
export function chooseHead(): void {
  const stop = effect(() => {
    const current = run.value;
    void current?.count.value;
    const read = current?.frames.find(({ token }) => token !== null);
    if (current === null || read === undefined) return; // the prompt is still read
    queueMicrotask(() => stop());
    const { layers, heads } = current.model;
    if (current.origin !== "live" || picked.peek() || layers * heads > MOST) return;
    if (Array.from({ length: layers }, (_, layer) => layer).some(keepsState)) return;
    call<AtlasCard>(`runs/${current.id.peek()}/atlas?step=${read.step}`)
      .then(({ heads: found }) => mostTelling(found))
      .catch(() => null) // then it stays as it is
      .then((best) => {
        if (run.peek() !== current) chooseHead();
        else if (best !== null && !picked.peek()) look(best.layer, best.head);
      });
  });
}
