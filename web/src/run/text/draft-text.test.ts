import { expect, test } from "vitest";
import { beside, phase, result, verdict } from "./draft-text";
import { tokens } from "../samples";
import type { DraftStep, DraftsCard } from "../../schema/drafting";

const step = (position: number, drafts: number, kept: number, open = false): DraftStep => ({
  position,
  drafts: tokens(..."abcdef".slice(0, drafts)),
  kept,
  written: tokens(..."abcdef".slice(0, kept + 1)),
  open,
});
const each = [step(10, 0, 0), step(11, 3, 2), step(14, 2, 0), step(15, 4, 1, true)];
const card: DraftsCard = {
  free: false,
  steps: 31,
  tokens: 48,
  drafting: 9,
  drafted: 25,
  kept: 17,
  per_step: 48 / 31,
  cost: 35,
  plain_cost: 49,
  second_row: 1.25,
  each,
};

test("the sentence has the figures", () => {
  expect(result(card)).toBe("With drafts this text takes 31 steps instead of 48: 17 of 25 drafted tokens were kept.");
  expect(result({ ...card, steps: 48, kept: 0 })).toContain("as many steps, 48: 0 of 25");
  expect(result({ ...card, drafted: 1, kept: 1 })).toContain("1 of 1 drafted token was kept");
  expect(result({ ...card, steps: 48, drafted: 0, kept: 0 })).toContain("48 steps with drafts and without");
});

test("the costs are told, also where drafts do not pay", () => {
  expect(verdict(card)).toContain("1.40 times as fast");
  expect(verdict({ ...card, cost: 98 })).toContain("no gain: 0.50 times");
  expect(verdict({ ...card, drafted: 0 })).toContain("two rows costs 1.25 of one");
  expect(verdict({ ...card, drafted: 0, free: true })).toContain("repeats itself");
});

test("a step is at the stage as long as it wrote the newest token there", () => {
  const phases = (position: number): string => each.map((one) => phase(one, position)).join(" ");
  expect(phases(10)).toBe("now ahead ahead ahead");
  expect(phases(11)).toBe("behind now ahead ahead");
  expect(phases(13)).toBe("behind now ahead ahead");
  expect(phases(14)).toBe("behind behind now ahead");
});

test("the steps with drafts beside the shown one; one that is not decided has no step yet", () => {
  expect(beside(each, 10, 1)).toBe(1);
  expect(beside(each, 12, 1)).toBe(2);
  expect(beside(each, 14, 1)).toBe(-1);
  expect(beside(each, 14, -1)).toBe(1);
  expect(beside(each, 11, -1)).toBe(-1);
});
