import { expect, it } from "vitest";
import { bytes, flop, joined, micros, percent, sentence, shown } from "./format";

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
});

it("makes a sentence of a message", () => {
  expect(sentence("the folder is empty; give another")).toBe("The folder is empty; give another.");
  expect(sentence("Is it there?")).toBe("Is it there?");
});
