// The sentences of the panel Drafts about a text with drafts, and where the shown step stands in it.

import { count, figures, plural } from "../../ui/format";
import type { DraftsCard, DraftStep } from "../../schema/drafting";

/** The result in a sentence. */
export function result({ steps, tokens, drafted, kept }: DraftsCard): string {
  if (drafted === 0) return `Nothing was drafted: this text takes ${plural(steps, "step")} with drafts and without.`;
  const saved =
    steps < tokens ? `${plural(steps, "step")} instead of ${count(tokens)}` : `as many steps, ${count(steps)}`;
  return `With drafts this text takes ${saved}: ${count(kept)} of ${plural(drafted, "drafted token")} ${kept === 1 ? "was" : "were"} kept.`;
}

/** What the costs of steps say of these drafts. */
export function verdict({ cost, plain_cost, drafted, free, second_row }: DraftsCard): string {
  if (drafted === 0)
    return free
      ? "A draft is what followed the last three tokens where they stood before. A text that repeats itself has some."
      : `A draft must be likely enough to pay for its row: a step of two rows costs ${figures(second_row)} of one. See every guess:`;
  const gain = figures(plain_cost / cost);
  return `By this model’s table of step costs that is ${cost < plain_cost ? `${gain} times as fast` : cost > plain_cost ? `no gain: ${gain} times as fast` : "as fast as without"}.`;
}

/** Whether a step of the panel is behind, at or ahead of the token at `position`, the newest on the stage. */
export function phase(step: DraftStep, position: number): "behind" | "now" | "ahead" {
  if (step.position > position) return "ahead";
  return position < step.position + step.written.length ? "now" : "behind";
}

/** The place in `each` of the next step with a draft from a position on (by 1), or before it (by -1); -1: none. */
export function beside(each: readonly DraftStep[], position: number, by: 1 | -1): number {
  const found = (step: DraftStep): boolean =>
    step.drafts.length > 0 && !step.open && phase(step, position) === (by > 0 ? "ahead" : "behind");
  return by > 0 ? each.findIndex(found) : each.findLastIndex(found);
}
