// A run as a file, in both directions: reading trace.json (the recording that ships with the page, a file that was
// opened or dropped) and writing one from what the page holds, which also works when the engine is gone.

import { VERSION, frameFromJson, type ModelCard, type RunCard, type StepFrame, type Trace } from "./schema";
import { Run, type Origin } from "./run";

const LARGEST = BigInt(Number.MAX_SAFE_INTEGER) + 1n; // beyond it whole numbers are written as strings

/** What files of earlier versions do not say of their run. */
const OLDER = { min_p: 0, repetition_penalty: 1, parent: null };

/** The run of a trace. Throws an Error with a sentence for people. */
export function readTrace(text: string, origin: Origin, name: string): Run {
  let values: Partial<Omit<Trace, "steps">> & { steps?: unknown };
  try {
    values = JSON.parse(text) as typeof values;
  } catch {
    throw new Error("This file is not JSON. A trace is a file that Export made: trace.json.");
  }
  if (values?.format !== "tokenwright-trace" || !values.model || !values.run || !Array.isArray(values.steps))
    throw new Error("This JSON file is not a trace of Tokenwright.");
  if (values.version !== VERSION)
    throw new Error(`The trace has version ${values.version}; this page reads version ${VERSION}.`);
  const model: ModelCard = { ...values.model, kv_format: values.model.kv_format ?? values.model.dtype };
  const card: RunCard = { ...OLDER, ...values.run };
  const run = new Run(model, card, origin, name);
  if (values.labels) run.label(values.labels);
  for (const step of values.steps as Record<string, unknown>[])
    if (run.push(frameFromJson(step)) !== "new") throw new Error("The steps of this trace are not in order.");
  if (values.state) run.state.value = values.state;
  return run;
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
    },
    (_, value: unknown) => (typeof value === "bigint" ? (value < LARGEST ? Number(value) : String(value)) : value),
  );
}

function frameToJson(frame: StepFrame): object {
  const row = frame.attention;
  if (row === null) return frame;
  let codes = "";
  for (const code of row.codes) codes += String.fromCharCode(code);
  return { ...frame, attention: { ...row, codes: btoa(codes) } };
}
