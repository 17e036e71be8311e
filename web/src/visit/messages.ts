// The page's messages about itself: the state of the connection and of the run, and the sentence about a step.
// Kept apart from the components so that the live region, the bar and the stage say the same.

import { computed } from "@preact/signals";
import { bytes, count, joined, modelName, ordinal, plural, weights } from "../ui/format";
import { card, frame, last, length, link, loading, pace, pageState, playing, run, shown, site } from "./store";
import type { Run } from "../run/run";
import type { RunState, StepFrame } from "../schema";

type Tone = "good" | "wait" | "bad" | "off";

export const connection = computed<{ tone: Tone; text: string }>(() => {
  switch (pageState.value) {
    case "boot":
      return { tone: "wait", text: "looking for the engine" };
    case "loading-model":
      return { tone: "wait", text: "loading the model" };
    case "disconnected":
      return { tone: "bad", text: "not connected" };
    case "expired":
      return { tone: "wait", text: "run released" };
    case "replay":
      return {
        tone: "off",
        text: site.value === null ? "replay of a file" : `a recorded run of ${modelName(run.value?.model.name ?? "")}`,
      };
    default:
      if (loading.value?.phase === "failed") return { tone: "bad", text: "no model" };
      return { tone: "good", text: "engine connected" };
  }
});

/** What wrote the text, where it stands. */
export const author = computed(() => {
  const model = card.value;
  if (model === null) return "";
  const size = weights(model.block_weights + model.head_weights);
  return `model: ${modelName(model.name)}, ${size} weights`;
});

const REASONS: Record<string, string> = {
  eos: "the model ended the text",
  stop: "a stop text was met",
  length: "cut at max tokens",
  context: "cut: the context is full",
  aborted: "ended from outside",
};

/** Why a run ended, and whether that cut the text short. */
export function ending(state: RunState): { text: string; cut: boolean } | null {
  if (state.state !== "done" || state.reason === null) return null;
  return { text: REASONS[state.reason] ?? state.reason, cut: state.reason === "length" || state.reason === "context" };
}

/** The end of a run as a title: a text that was cut is not finished, and a branch counts from its fork. */
export function title({ card, state }: Run, written: number): string {
  const whole = state.value.reason === "eos" || state.value.reason === "stop";
  const tokens = plural(written, "token");
  if (card.parent !== null) return whole ? `Finished: ${tokens} since the fork` : `Stopped: ${tokens} since the fork`;
  return whole ? `Finished after ${tokens}` : `Stopped at ${tokens}`;
}

/** The state of the run in a few words, for the transport. */
export const activity = computed<{ text: string; cut: boolean }>(() => {
  const current = run.value;
  const plain = (text: string) => ({ text, cut: false });
  if (current === null) return plain("");
  const past = shown.value < last.value;
  if (past) {
    const ahead = plural(last.value - shown.value, "step");
    return plain(playing.value ? `playing what was recorded; ${ahead} ahead` : `looking back; ${ahead} after it`);
  }
  if (playing.value && current.origin !== "live") return plain("playing what was recorded");
  switch (pageState.value) {
    case "queued":
      return plain("waiting for the engine");
    case "prefill": {
      const read = frame.value ? frame.value.start + frame.value.length : 0;
      return plain(read > 0 ? `reading the prompt: ${count(read)} of ${count(length.value)}` : "reading the prompt");
    }
    case "running":
      return plain(pace.value === null ? "running at engine speed" : "running");
    case "throttled":
      return plain("running; the page leaves out attention rows");
    case "paused":
      return plain("paused");
    case "done":
      return ending(current.state.value) ?? plain("done");
    case "disconnected":
      return plain("not connected");
    case "expired":
      return plain("the engine freed the cache of this run");
    default:
      return ending(current.state.value) ?? plain("");
  }
});

/** What went through the layers in a step, and which token it wrote: the lesson of the page in one sentence. */
export function work(step: StepFrame): string {
  const all = step.start + step.length;
  return `${passed(step, all)}${step.token === null ? "" : `, to write the ${ordinal(all + 1)}`}`;
}

function passed(step: StepFrame, all: number): string {
  const { recomputed } = step;
  if (step.length === all) {
    const tokens = all === 1 ? "The one token" : `All ${count(all)} tokens`;
    const prompt = all <= (run.value?.promptTokens ?? all);
    if (recomputed === 0 && prompt) return `${tokens} of the prompt went through the layers`;
    if (recomputed === 0) return `${tokens} of the text went through the layers`;
    if (!step.cache) return `${tokens} went through, ${count(recomputed)} of them again`;
    return `${tokens} to fill the cache, ${count(recomputed)} of them again`;
  }
  return `${count(step.length)} of ${plural(all, "token")} went through the layers`;
}

/** Said to those who do not see the page, when the state changes and only then. */
export const announcement = computed(() => {
  const state = pageState.value;
  const tokens = () => plural(length.peek(), "token");
  switch (state) {
    case "boot":
    case "tokenizing":
    case "queued":
    case "prefill":
      return "";
    case "loading-model":
      return "The model is loading. A recorded run is shown.";
    case "empty":
      return "Ready. Write a prompt and run it.";
    case "running":
    case "throttled": // it comes and goes too fast to be said
      return "Running.";
    case "paused":
      return `Paused at ${tokens()}.`;
    case "done":
      return `Done, ${tokens()}: ${activity.peek().text}.`;
    case "error":
      return "Something failed. The page says what.";
    case "disconnected":
      return link.value === "broken" ? "Connection lost. Trying again." : "The engine does not answer. Trying again.";
    case "expired":
      return "The engine freed the cache of this run. Play rebuilds it.";
    case "replay":
      return "Replay of a file.";
  }
});

export const loaded = computed(() => {
  const state = loading.value;
  if (state === null || state.total === 0) return null;
  const [done, total] = [joined(bytes(state.done)), joined(bytes(state.total))];
  return {
    share: Math.min(1, state.done / state.total),
    text: state.done < state.total ? `${done} of ${total}` : `${done} of ${total}, starting`,
  };
});
