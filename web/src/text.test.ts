import { describe, expect, it } from "vitest";
import type { TokenCard } from "./schema";
import { align, marked, readable } from "./text";

const card = (text: string, special = false): TokenCard => ({ id: 0, text, special });

describe("align", () => {
  it("gives each token its piece", () => {
    expect(align("a big fox", [card("a"), card(" big"), card(" fox")])).toEqual(["a", " big", " fox"]);
  });

  it("gives a token that is not part of the text nothing", () => {
    expect(align("Hi", [card("<|bos|>", true), card("Hi")])).toEqual(["", "Hi"]);
    expect(align("Hi", [card("Hi"), card("<|eot|>", true)])).toEqual(["Hi", ""]);
  });

  it("gives a character that was cut into bytes to the last of them", () => {
    const bytes = ["<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>"].map((text) => card(text));
    expect(align("a 🦊 b", [card("a"), card(" "), ...bytes, card(" b")])).toEqual(["a", " ", "", "", "", "🦊", " b"]);
    expect(align("🦊", bytes)).toEqual(["", "", "", "🦊"]);
  });

  it("loses no character where looks and text do not match at all", () => {
    expect(align("STRASSE 1", [card("straße"), card("x")]).join("")).toBe("STRASSE 1");
  });
});

it("makes spaces and line breaks visible", () => {
  expect([" fox", " ", "\n", "\n\n  ", ""].map(readable)).toEqual(["fox", "␣", "⏎", "⏎⏎", "∅"]);
  expect([" fox", "fox", " "].map(marked)).toEqual(["·fox", "fox", "␣"]);
});
