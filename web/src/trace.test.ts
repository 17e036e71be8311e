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

it("says what is wrong with a file", () => {
  expect(() => readTrace("[", "file", "")).toThrow("not JSON");
  expect(() => readTrace("null", "file", "")).toThrow("not a trace");
  expect(() => readTrace('{"format":"tokenwright-trace"}', "file", "")).toThrow("not a trace");
  const run = new Run(model, runCard(tokens("Hi"), "Hi"), "live");
  const later = writeTrace(run).replace('"version":1', '"version":99');
  expect(() => readTrace(later, "file", "")).toThrow("version 99");
});
