// How tokens become text and text becomes tokens again, for showing. The text of a prompt is exact, the looks of its
// tokens are not always pieces of it (a special token that the template added, a byte of a cut character), so the
// pieces are found by walking both at once. No characters are invented and none are lost.

import { quote, verbatim } from "../language/language";
import type { SceneToken } from "../stage/renderers/renderer";
import type { TokenCard } from "../schema";

/** How far ahead a piece is looked for when characters before it came from tokens that are bytes. */
const REACH = 24;

/** The piece of `text` that each token stands for. Their concatenation is `text`, whatever the tokens look like. */
export function align(text: string, tokens: readonly TokenCard[]): string[] {
  const pieces = tokens.map(() => "");
  let at = 0; // in text
  let waiting: number | null = null; // the last token that has no piece yet: it gets what the next one leaves over
  tokens.forEach((token, i) => {
    const found = token.text === "" ? -1 : text.startsWith(token.text, at) ? at : -1;
    if (found === at) {
      pieces[i] = token.text;
      at += token.text.length;
      waiting = null;
      return;
    }
    const later = waiting === null || token.special || token.text === "" ? -1 : text.indexOf(token.text, at);
    if (later > at && later <= at + REACH) {
      pieces[waiting ?? i] = text.slice(at, later);
      pieces[i] = token.text;
      at = later + token.text.length;
      waiting = null;
      return;
    }
    if (!token.special) waiting = i;
  });
  if (at < text.length && tokens.length > 0) {
    const last = waiting ?? tokens.length - 1;
    pieces[last] += text.slice(at);
  }
  return ordered(text, pieces) ? pieces : whole(text, tokens.length);
}

function ordered(text: string, pieces: readonly string[]): boolean {
  return pieces.join("") === text;
}

function whole(text: string, count: number): string[] {
  return Array.from({ length: count }, (_, i) => (i === 0 ? text : ""));
}

const CUT = /<0x([0-9A-F]{2})>/g;
const BYTES = /^(?:<0x[0-9A-F]{2}>)+$/;

/** A token for a label: a part of a character as its bytes, a lone space and a line break become visible, a leading space is left to the layout. */
export function readable(text: string): string {
  if (text === "") return "∅";
  if (BYTES.test(text)) return `byte ${[...text.matchAll(CUT)].map((match) => match[1]).join(" ")}`;
  const shown = text.replaceAll("\r", "").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  if (shown.trim() === "") return shown === "" ? "⏎" : shown.replaceAll(" ", "␣");
  return shown.trim();
}

/** As `readable`, with a leading space as a dot: where tokens stand side by side, it matters whose the space is. */
export function marked(text: string): string {
  return verbatim(text.startsWith(" ") && text.trim() !== "" ? `·${readable(text)}` : readable(text));
}

/** For sentences about a token. A question mark alone would read as a doubt. */
export function quoted(text: string): string {
  return `${text.trim() === "?" ? "the question mark " : ""}${quote(verbatim(readable(text)))}`;
}

/** The bytes of a token that is a part of a character, as "C3 A9"; null for all others. */
export function bytesOf(token: TokenCard): string | null {
  if (token.special || !BYTES.test(token.text)) return null;
  return [...token.text.matchAll(CUT)].map((match) => match[1]).join(" ");
}

/** One chip of a prompt: a token; or a character that several tokens make, with their bytes. */
export interface Glyph {
  text: string;
  bytes: string[]; // of each token; empty where a token is more than a byte
  tokens: TokenCard[];
}

/** The tokens of a text, with those that are parts of one character put together. */
export function glyphs(text: string, tokens: readonly TokenCard[]): Glyph[] {
  const pieces = align(text, tokens);
  const found: Glyph[] = [];
  let run: Glyph[] = []; // characters in parts that stand side by side
  let letters = "";
  const close = () => {
    // Each has its letter, unless the bytes are no characters: then the last one has what there is.
    const single = [...letters];
    if (single.length === run.length) run.forEach((glyph, i) => (glyph.text = single[i] ?? ""));
    else if (run.length > 0) (run.at(-1) as Glyph).text = letters;
    [run, letters] = [[], ""];
  };
  tokens.forEach((token, i) => {
    const bytes = bytesOf(token);
    if (bytes === null) {
      close();
      found.push({ text: token.text, bytes: [], tokens: [token] });
      return;
    }
    const begins = !/^[89AB]/.test(bytes); // the later bytes of a character are 80 to BF
    if (begins || run.length === 0) {
      const glyph: Glyph = { text: "", bytes: [], tokens: [] };
      run.push(glyph);
      found.push(glyph);
    }
    const open = run.at(-1) as Glyph;
    open.tokens.push(token);
    open.bytes.push(bytes);
    letters += pieces[i] ?? "";
  });
  close();
  return found;
}

/** The name of a special token: the one before all texts is where they start, however a model spells it. */
export const nameOf = (text: string, position: number): string => (position === 0 ? "start" : text);

/** How the stage shows a token; `piece`: what it brought to the text, which for the last byte of a character is that. */
export function look(token: TokenCard, kind: SceneToken["kind"], piece: string, position: number): SceneToken {
  const bytes = bytesOf(token);
  const text = token.special ? nameOf(token.text, position) : token.text;
  const label = bytes === null ? readable(text) : `${piece.trim()} ${bytes}`.trim();
  return { label, kind: token.special && kind === "prompt" ? "special" : kind };
}
