import { expect, it } from "vitest";
import { bytes, flop, joined, micros, modelName, numbered, ordinal, percent, sentence, shown, weights } from "./format";

it("uses binary units for memory and decimal ones for work", () => {
  expect(joined(bytes(1024n))).toBe("1 KiB");
  expect(joined(bytes(6291456n))).toBe("6 MiB");
  expect(joined(flop(247064064n))).toBe("247 MFLOP");
  expect(joined(micros(1540))).toBe("1.54 ms");
});

it("shows nothing where there is nothing", () => {
  expect(shown(null, "B")).toEqual(["–", ""]);
  expect(shown(1, "tokens")).toEqual(["1", "token"]);
  expect(percent(0.0004)).toBe("<0.1 %");
  expect([0.0996, 0.984, 0.9951, 0.9984, 0.9996, 1].map(percent)).toEqual([
    "10.0 %",
    "98 %",
    "99.5 %",
    "99.8 %",
    ">99.9 %",
    "100 %",
  ]);
});

it("shows a difference by rounding alone as none", () => {
  expect(joined(shown(-7.9e-8, "nat"))).toBe("0.00 nat");
  expect(joined(shown(-0.0061, "nat"))).toBe("-0.0061 nat");
});

it("counts steps and tokens from 1", () => {
  expect([numbered(0), numbered(1023)]).toEqual(["1", "1,024"]);
  expect([shown(0, "index"), shown(7n, "index"), shown(null, "index")]).toEqual([
    ["1", ""],
    ["8", ""],
    ["–", ""],
  ]);
});

it("counts in order", () => {
  expect([1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 1023].map(ordinal).join(" ")).toBe(
    "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th 1,023rd",
  );
});

it("makes a sentence of a message", () => {
  expect(sentence("the folder is empty; give another")).toBe("The folder is empty; give another.");
  expect(sentence("Is it there?")).toBe("Is it there?");
});

it("names a model without the folders of its path, and counts its weights", () => {
  expect(modelName("/data/models/SmolLM2-135M-Instruct.Q4_1.gguf")).toBe("SmolLM2-135M-Instruct.Q4_1.gguf");
  expect(modelName("C:\\models\\small\\")).toBe("small");
  expect(modelName("Qwen/Qwen3-0.6B")).toBe("Qwen/Qwen3-0.6B");
  expect([weights(5_767_168), weights(1.236e9), weights(900)]).toEqual(["5.77 M", "1.24 B", "900"]);
});
