// A run as a file, in both directions: reading trace.json (the recording that ships with the page, a file that was
// opened or dropped) and writing one from what the page holds, which also works when the engine is gone.

import {
  VERSION,
  frameFromJson,
  type Half,
  type ModelCard,
  type RunCard,
  type RunState,
  type StepFrame,
  type Trace,
} from "../schema";
import { Run, type Origin } from "./run";

const LARGEST = BigInt(Number.MAX_SAFE_INTEGER) + 1n; // beyond it whole numbers are written as strings

type JsonStep = Record<string, unknown>;
type JsonHalf = Omit<Half, "steps"> & { steps: readonly JsonStep[] };

/** What files of earlier versions do not say of their run. */
const OLDER = { min_p: 0, repetition_penalty: 1, parent: null, pictures: [], held: "" };

/** The run of a trace. Throws an Error with a sentence for people. */
export function readTrace(text: string, origin: Origin, name: string): Run {
  let values: Partial<Omit<Trace, "steps" | "halves">> & { steps?: unknown; halves?: readonly JsonHalf[] };
  try {
    values = JSON.parse(text) as typeof values;
  } catch {
    throw new Error("This file is not JSON. A trace is a file that Export made: trace.json.");
  }
  if (values?.format !== "tokenwright-trace" || !values.model || !values.run || !Array.isArray(values.steps))
    throw new Error("This JSON file is not a trace of Tokenwright.");
  if (values.version !== VERSION)
    throw new Error(`The trace has version ${values.version}; this page reads version ${VERSION}.`);
  const model: ModelCard = {
    ...values.model,
    kv_format: values.model.kv_format ?? values.model.dtype,
    state_bytes: values.model.state_bytes ?? 0,
  };
  const card: RunCard = { ...OLDER, ...values.run };
  const { labels = [], state, halves = [] } = values;
  const made = (steps: readonly JsonStep[], own?: RunState): Run => {
    const run = new Run(model, card, origin, name);
    run.label(labels);
    for (const step of steps)
      if (run.push(frameFromJson(step)) !== "new") throw new Error("The steps of this trace are not in order.");
    if (own) run.state.value = own;
    return run;
  };
  const run = made(values.steps as readonly JsonStep[], state);
  join(
    run,
    new Map(halves.map(({ cache, summary, steps }) => [cache, made(steps, state && { ...state, cache, summary })])),
  );
  return run;
}

/** A run and the ways that it did not go: each of them knows both ways. */
function join(run: Run, halves: Map<boolean, Run>): void {
  if (halves.size === 1) halves.set(!halves.has(true), run);
  for (const way of [run, ...halves.values()]) way.both = halves;
}

export function writeTrace(run: Run): string {
  const { model, card } = run;
  const labels = run.allLabels();
  return JSON.stringify(
    {
      format: "tokenwright-trace",
      version: VERSION,
      model,
      run: card,
      state: run.state.value,
      labels,
      steps: run.frames.map(frameToJson),
      halves: [...run.both].filter(([, way]) => way !== run).map(([cache, way]) => halfToJson(cache, way)),
    },
    (_, value: unknown) => (typeof value === "bigint" ? (value < LARGEST ? Number(value) : String(value)) : value),
  );
}

const halfToJson = (cache: boolean, { state, frames }: Run): JsonHalf => ({
  cache,
  summary: state.value.summary,
  steps: frames.map(frameToJson),
});

function frameToJson(frame: StepFrame): JsonStep {
  const row = frame.attention;
  if (row === null) return { ...frame };
  let codes = "";
  for (const code of row.codes) codes += String.fromCharCode(code);
  return { ...frame, attention: { ...row, codes: btoa(codes) } };
}
