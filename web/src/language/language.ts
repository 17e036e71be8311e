// The page in other languages. Its sources are English; a catalogue CODE.json beside this file has a translation for each
// string, {0} {1} ... in it for what the page puts in. Texts are translated where they are shown: the hook below does so
// with what elements are made of, `translated` with what is drawn. So English needs none of this, and what the engine
// says is translated too. `verbatim` and an element with translate="no" keep words of people and of the model as they are.

import { Fragment, options, type ComponentChildren } from "preact";

const URLS = import.meta.glob<string>("./*.json", { query: "?url", import: "default", eager: true });
const KEY = "tokenwright.language";

/** The codes of all languages of the page. */
export const LANGUAGES = ["en", ...Object.keys(URLS).map((name) => name.slice(2, -5))];

const known = (wanted: readonly (string | null)[]): string =>
  wanted.flatMap((one) => (one === null ? [] : [one, one.replace(/-.*/, "")])).find((one) => LANGUAGES.includes(one)) ??
  "en";

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // a page in a sandbox
  }
}

// A page that is one file can fetch nothing.
const alone = typeof document === "undefined" || (document.getElementById("trace")?.textContent ?? "") !== "";

/** The one that was chosen here, else the first of the browser's that there is. */
export const language: string = alone ? "en" : known([stored(), ...navigator.languages]);

export function choose(code: string): void {
  localStorage.setItem(KEY, code);
  location.reload();
}

interface Pattern {
  from: RegExp;
  longest: string; // part of the English text: a text without it needs no closer look
  letters: number;
  to: string;
}

const exact = new Map<string, string>();
const patterns: Pattern[] = [];
const found = new Map<string, string | null>();
const MOST = 5000; // texts that are remembered
/** What has no translation, for the tests. */
export const missed = new Set<string>();

const CONTENT = "\u2060"; // no width: what begins with it is the model's or a person's
const LONGEST = 999; // characters of a text of the page's own
const LOOKS = 400; // at parts of one text; those that commas part could be very many
const HOLE = /\{(\d+)\}/g;
const MARKS = 0xe000; // characters from here on stand for elements
const WEAK = 9; // letters below which a pattern might be met by chance

// Where two texts were put together: what is before, between and behind; whether both must be known, or the first.
const JOINTS: readonly (readonly [RegExp, boolean])[] = [
  [/^(.+?)(: ?)(.*)$/s, false],
  [/^(.+)(: ?)(.*)$/s, false],
  [/^(.+)( \()(.+)(\))$/s, false],
  [/^(.+)( )([\d.,]+)$/s, false],
  [/^()([\d.,]+ )(.+)$/s, true],
  [/^(.+)()(, .+)$/s, true],
  [/^(.+?)(, )(.+)$/s, true],
];
const CLAUSES: typeof JOINTS = [[/^(.+?)()(; .+)$/s, true]];

function learn(catalogue: Record<string, string>): void {
  for (const [english, own] of Object.entries(catalogue)) {
    if (!/\{\d+\}/.test(english)) {
      exact.set(english, own);
      continue;
    }
    const parts = english.split(/\{\d+\}/);
    const from = parts.map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("(.*?)");
    const longest = parts.reduce((a, b) => (b.length > a.length ? b : a));
    patterns.push({ from: new RegExp(`^${from}$`, "s"), longest, letters: parts.join("").length, to: own });
  }
  patterns.sort((a, b) => b.letters - a.letters);
}

const words = (text: string): boolean => /\p{L}{2}/u.test(text);

/** By a pattern. What stands in its places is translated too; that of a short pattern must be a number or known. */
function matched(text: string): string | null {
  for (const { from, longest, letters, to } of patterns) {
    if (!text.includes(longest)) continue;
    const holes = from.exec(text)?.slice(1);
    if (holes === undefined) continue;
    const own = holes.map((hole) => look(hole.trim()));
    if (letters < WEAK && holes.some((hole, i) => own[i] === null && /^\s*\p{L}/u.test(hole))) continue;
    return to.replace(HOLE, (_, place: string) => {
      const hole = holes[Number(place)] ?? "";
      return hole.replace(hole.trim(), () => own[Number(place)] ?? hole.trim());
    });
  }
  return joined(text);
}

/** By its two parts: before a colon, a bracket or a number, where one is known; or before a comma, where both are. */
function joined(text: string, joints = JOINTS): string | null {
  for (const [parts, both] of joints) {
    const [, before, joint, after, end = ""] = parts.exec(text) ?? [];
    if (before === undefined || joint === undefined || after === undefined) continue;
    const [left, right] = [before === "" ? "" : look(before), look(after)];
    if (both ? left !== null && right !== null : left !== null) return `${left}${joint}${right ?? after}${end}`;
  }
  return null;
}

/** Of a text without spaces around it; null: it has no translation. */
function look(given: string): string | null {
  const text = given.replace(/\s+/g, " ");
  if (text.length > LONGEST || !words(text) || /^(\u2060|[“„]\u2060[^“”]*[“”]$)/.test(text)) return null;
  const before = found.get(text);
  if (before !== undefined) return before;
  if (left-- <= 0) return null;
  let own = exact.get(text) ?? joined(text, CLAUSES) ?? matched(text);
  if (own === null && /^\p{Lu}.*\.$/su.test(text)) {
    // a message of the engine that the page made a sentence of
    const bare = text.charAt(0).toLowerCase() + text.slice(1, -1);
    own = exact.get(bare) ?? matched(bare);
    if (own !== null) own = `${own.charAt(0).toUpperCase()}${own.slice(1)}.`;
  }
  if (left > 0) remember(text, own);
  return own;
}

let left = 0; // looks

function remember(text: string, own: string | null): void {
  if (found.size > MOST) found.clear();
  found.set(text, own);
}

/** As `look`, of a whole text. */
function lookUp(text: string): string | null {
  left = LOOKS;
  const own = look(text);
  if (left <= 0) remember(text.replace(/\s+/g, " "), own);
  return own;
}

/** Text of the model or of a person, which is shown as it is. */
export const verbatim = (text: string): string => (language === "en" ? text : `${CONTENT}${text}`);

/** A text in the language of the page. */
export function translated(text: string): string {
  if (language === "en") return text;
  const bare = text.trim();
  const own = lookUp(bare);
  if (own === null && words(bare) && !bare.includes(CONTENT)) missed.add(bare);
  return own === null ? text : text.replace(bare, () => own);
}

/** A text that is drawn, or set by the page's program: translated, with the model's words in it. */
export const drawn = (text: string): string => translated(text).replaceAll(CONTENT, "");

/** A text in the quotation marks of the language. */
export function quote(text: string): string {
  const [open, close] = (exact.get("“ ”") ?? "“ ”").split(" ");
  return `${open}${text}${close}`;
}

type Child = ComponentChildren;

const spoken = (child: Child): child is string | number =>
  typeof child === "number" || (typeof child === "string" && !child.startsWith(CONTENT));

/** The children of an element: as one text, with elements, words of the model and what is left out as marks; else each by itself. */
function sequence(list: readonly Child[]): Child[] {
  const marks: Child[] = [];
  let text = "";
  for (const child of list) {
    if (spoken(child)) text += child;
    else {
      text += String.fromCharCode(MARKS + marks.length);
      marks.push(Array.isArray(child) ? sequence(child) : child);
    }
  }
  const own = lookUp(text.trim());
  if (own === null) {
    let next = 0;
    return list.map((child) =>
      !spoken(child) ? marks[next++] : typeof child === "string" ? translated(child) : child,
    );
  }
  const whole = text.replace(text.trim(), () => own);
  return whole
    .split(/([\ue000-\uf8ff])/)
    .filter((part) => part !== "")
    .map((part) => (/^[\ue000-\uf8ff]$/.test(part) ? marks[part.charCodeAt(0) - MARKS] : part));
}

const ATTRIBUTES = ["title", "aria-label", "aria-valuetext", "placeholder", "alt", "label"];
const VERBATIM = new Set(["code", "pre", "textarea", "script", "style"]);

function install(): void {
  const next = options.vnode;
  options.vnode = (vnode) => {
    const { type, props } = vnode as { type: unknown; props: Record<string, unknown> };
    if ((typeof type === "string" && props.translate !== false) || type === Fragment) {
      for (const name of ATTRIBUTES)
        if (typeof props[name] === "string") props[name] = translated(props[name] as string);
      const { children } = props;
      if (VERBATIM.has(type as string)) return next?.(vnode);
      if (typeof children === "string") props.children = translated(children);
      else if (Array.isArray(children)) props.children = sequence(children as Child[]);
    }
    next?.(vnode);
  };
}

/** Once the page may be drawn; where the catalogue cannot be had, in English. */
async function load(url: string): Promise<void> {
  try {
    learn((await (await fetch(url)).json()) as Record<string, string>);
    install();
    document.documentElement.lang = language;
    const { textInfo } = new Intl.Locale(language) as unknown as { textInfo?: { direction: string } };
    document.documentElement.dir = textInfo?.direction ?? "ltr";
  } catch {
    // the page is in English
  }
}

/** The catalogue that is to come; null: none is needed. */
export const loading: Promise<void> | null = language === "en" ? null : load(URLS[`./${language}.json`] as string);
