import { expect, it } from "vitest";
import { Run } from "./run";
import { frame, model, runCard, tokens } from "./samples";
import { readTrace, writeTrace } from "./trace";

it("reads what it wrote, exactly", () => {
  const run = new Run(model, runCard(tokens("Hi"), "Hi"), "live");
  run.label(tokens("Hi", " you"));
  const row = { layer: 1, head: 0, argmax: 1, codes: Uint8Array.of(0, 255, 7) };
  run.push(
    frame({ step: 0, flops: 2n ** 63n + 1n, token: 1, seq_len: 2, text: " you", attention: row, uniform: 1 / 3 }),
  );
  run.state.value = { ...run.state.value, state: "done", reason: "length" };
  const back = readTrace(writeTrace(run), "file", "trace.json");
  expect(back.frames).toEqual(run.frames);
  expect(back.state.value).toEqual(run.state.value);
  expect(back.pieces).toEqual(["Hi", " you"]);
});

it("keeps both ways of a run, and each knows the other", () => {
  const run = new Run(model, runCard(tokens("Hi"), "Hi"), "live");
  run.push(frame({ step: 0, token: 1, seq_len: 2, length: 1 }));
  const values = JSON.parse(writeTrace(run)) as { steps: object[]; halves: object[] };
  expect(values.halves).toEqual([]);
  const half = {
    cache: false,
    summary: null,
    steps: values.steps.map((step) => ({ ...step, cache: false, length: 2 })),
  };
  const back = readTrace(JSON.stringify({ ...values, halves: [half] }), "file", "trace.json");
  const other = back.both.get(false);
  expect(back.both.get(true)).toBe(back);
  expect(other?.both.get(true)).toBe(back);
  expect(other?.frames[0]?.length).toBe(2);
  const again = readTrace(writeTrace(back), "file", "trace.json");
  expect(again.both.get(false)?.frames).toEqual(other?.frames);
});

it("says what is wrong with a file", () => {
  expect(() => readTrace("[", "file", "")).toThrow("not JSON");
  expect(() => readTrace("null", "file", "")).toThrow("not a trace");
  expect(() => readTrace('{"format":"tokenwright-trace"}', "file", "")).toThrow("not a trace");
  const run = new Run(model, runCard(tokens("Hi"), "Hi"), "live");
  const later = writeTrace(run).replace('"version":1', '"version":99');
  expect(() => readTrace(later, "file", "")).toThrow("version 99");
});
