import { describe, expect, it } from "vitest";
import type { TokenCard } from "../schema";
import { align, glyphs, look, marked, quoted, readable } from "./text";

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
  expect([" fox", " ?"].map(quoted)).toEqual(["“fox”", "the question mark “?”"]);
  expect([" fox", "fox", " "].map(marked)).toEqual(["·fox", "fox", "␣"]);
});

describe("a character that was cut into bytes", () => {
  const cut = (...bytes: string[]) => bytes.map((byte) => card(`<0x${byte}>`));

  it("is one glyph with its bytes", () => {
    const tokens = [card("caf"), ...cut("C3", "A9"), card(" "), ...cut("E6", "97", "A5", "E6", "9C", "AC")];
    expect(glyphs("café 日本", tokens).map(({ text, bytes }) => [text, bytes.join(" ")])).toEqual([
      ["caf", ""],
      ["é", "C3 A9"],
      [" ", ""],
      ["日", "E6 97 A5"],
      ["本", "E6 9C AC"],
    ]);
  });

  it("has labels that say which byte, and the character at its last", () => {
    const [first, last] = cut("C3", "A9");
    if (!first || !last) throw new Error("two tokens");
    expect(look(first, "prompt", "", 1).label).toBe("C3");
    expect(look(last, "prompt", "é", 2).label).toBe("é A9");
    expect(readable("<0xF0>")).toBe("byte F0");
  });
});
