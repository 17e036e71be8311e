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

/** Looks at that head once the shown run has read its prompt, unless someone has chosen one by then. */
export function chooseHead(): void {
  const current = run.peek();
  if (current === null || current.origin !== "live" || picked.peek()) return;
  const { layers, heads } = current.model;
  if (layers * heads > MOST || Array.from({ length: layers }, (_, layer) => layer).some(keepsState)) return;
  const stop = effect(() => {
    void current.count.value;
    const read = current.frames.find(({ token }) => token !== null);
    if (run.value === current && read === undefined) return; // the prompt is still read
    queueMicrotask(() => stop());
    if (run.value !== current || read === undefined) return;
    call<AtlasCard>(`runs/${current.id.peek()}/atlas?step=${read.step}`)
      .then(({ heads: found }) => {
        const best = mostTelling(found);
        if (best !== null && run.peek() === current && !picked.peek()) look(best.layer, best.head);
      })
      .catch(() => undefined); // then it stays as it is
  });
}
