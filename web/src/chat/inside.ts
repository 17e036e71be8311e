// An answer of the chat page, opened in the explorer: its prompt as the model read it, its seed and its options go into
// the explorer's form. The conversation is in this browser's storage, so the address names it and holds no text.

import { batch } from "@preact/signals";
import * as nextRun from "../run/next-run";
import { panel } from "../visit/store";
import * as calls from "./calls";
import * as keep from "./keep";

/** Fills the form with the answer `from` names. Throws an Error with a sentence for people. */
export async function take(from: string): Promise<void> {
  const [id = "", number = ""] = from.split(".");
  const conversation = keep.one(id);
  const turn = conversation?.turns[Number(number)];
  const asked = turn?.asked;
  if (!conversation || !asked)
    throw new Error("This answer is not kept in this browser, or was deleted. Ask again on the chat page.");
  const { template } = await calls.model();
  const { text, tokens, pictures } = await calls.promptOf(conversation, Number(number), template);
  if (pictures) panel.value ??= "next"; // the heat map is there
  batch(() => {
    nextRun.given.value = {
      from,
      text,
      ids: tokens.map((token) => token.id),
      pictures,
      top_k: asked.top_k,
      top_p: asked.top_p,
      stop: asked.stop,
      reused: turn.facts?.cached_tokens ?? 0,
    };
    nextRun.prompt.value = text;
    nextRun.tokens.value = { text, cards: tokens };
    nextRun.seed.value = asked.seed;
    nextRun.temperature.value = asked.temperature;
    nextRun.maxTokens.value = asked.max_tokens;
  });
}
