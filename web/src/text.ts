// How tokens become text and text becomes tokens again, for showing. The text of a prompt is exact, the looks of its
// tokens are not always pieces of it (a special token that the template added, a byte of a cut character), so the
// pieces are found by walking both at once. No characters are invented and none are lost.

import type { SceneToken } from "./renderers/renderer";
import type { TokenCard } from "./schema";

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

/** A token for a label: a lone space and a line break become visible, a leading space is left to the layout. */
export function readable(text: string): string {
  if (text === "") return "∅";
  const shown = text.replaceAll("\r", "").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  if (shown.trim() === "") return shown === "" ? "⏎" : shown.replaceAll(" ", "␣");
  return shown.trim();
}

/** As `readable`, with a leading space as a dot: where tokens stand side by side, it matters whose the space is. */
export function marked(text: string): string {
  return text.startsWith(" ") && text.trim() !== "" ? `·${readable(text)}` : readable(text);
}

/** For sentences about a token. */
export function quoted(text: string): string {
  return `“${readable(text)}”`;
}

export function look(token: TokenCard, kind: SceneToken["kind"]): SceneToken {
  return { label: readable(token.text), kind: token.special ? "special" : kind };
}
