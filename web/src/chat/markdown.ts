// A small part of Markdown as a tree of values: paragraphs, headings, lists, quotes, fenced code, and in a line code,
// bold, emphasis and links. It makes no HTML: ui/Markdown.tsx makes elements of it whose texts are texts, so nothing that
// a model writes can become markup. It is read again at every token, so it takes time linear in the text.

export type Inline =
  | { kind: "text"; text: string }
  | { kind: "code"; text: string }
  | { kind: "strong" | "em"; inner: Inline[] }
  | { kind: "link"; href: string; inner: Inline[] };

export type Block =
  | { kind: "paragraph"; inner: Inline[] }
  | { kind: "heading"; level: number; inner: Inline[] }
  | { kind: "code"; language: string; text: string }
  | { kind: "list"; ordered: boolean; start: number; items: Block[][] }
  | { kind: "quote"; inner: Block[] }
  | { kind: "rule" };

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DEEPEST = 6; // of lists and quotes in each other; further ones are text

export function parse(text: string, depth = 0): Block[] {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks: Block[] = [];
  let paragraph: string[] = [];
  const flush = (): void => {
    if (paragraph.length > 0) blocks.push({ kind: "paragraph", inner: inline(paragraph.join("\n").trim()) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length;) {
    const line = lines[at] ?? "";
    const taken = line.trim() === "" ? null : special(lines, at, depth);
    if (line.trim() === "" || taken !== null) flush();
    else paragraph.push(line);
    if (taken === null) at++;
    else {
      blocks.push(taken.block);
      at = taken.next;
    }
  }
  flush();
  return blocks;
}

type Taken = { block: Block; next: number } | null;

function special(lines: string[], at: number, depth: number): Taken {
  const line = lines[at] ?? "";
  const heading = HEADING.exec(line);
  if (heading)
    return {
      block: { kind: "heading", level: heading[1]?.length ?? 1, inner: inline(heading[2] ?? "") },
      next: at + 1,
    };
  if (RULE.test(line)) return { block: { kind: "rule" }, next: at + 1 };
  return fenced(lines, at) ?? (depth < DEEPEST ? (quote(lines, at, depth) ?? list(lines, at, depth)) : null);
}

/** Code between fences; a fence that is not closed yet reaches to the end, as it does while it is written. */
function fenced(lines: string[], at: number): Taken {
  const fence = FENCE.exec(lines[at] ?? "");
  if (!fence) return null;
  const mark = fence[1] ?? "```";
  let end = at + 1;
  while (end < lines.length && !closes(lines[end] ?? "", mark)) end++;
  const text = lines.slice(at + 1, end).join("\n");
  return { block: { kind: "code", language: fence[2] ?? "", text }, next: end + 1 };
}

function closes(line: string, mark: string): boolean {
  const trimmed = line.trim();
  return trimmed.length >= mark.length && trimmed === (mark[0] ?? "`").repeat(trimmed.length);
}

function quote(lines: string[], at: number, depth: number): Taken {
  const inner: string[] = [];
  let end = at;
  for (; end < lines.length; end++) {
    const found = QUOTE.exec(lines[end] ?? "");
    if (!found) break;
    inner.push(found[1] ?? "");
  }
  return end === at ? null : { block: { kind: "quote", inner: parse(inner.join("\n"), depth + 1) }, next: end };
}

function list(lines: string[], at: number, depth: number): Taken {
  const first = ITEM.exec(lines[at] ?? "");
  if (!first) return null;
  const ordered = /\d/.test(first[2] ?? "");
  const base = (first[1] ?? "").length;
  const items: string[][] = [];
  let indent = 0;
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end] ?? "";
    const item = RULE.test(line) ? null : ITEM.exec(line);
    if (item && (item[1] ?? "").length < base + 2 && /\d/.test(item[2] ?? "") === ordered) {
      indent = (item[1] ?? "").length + (item[2] ?? "").length + Math.min(4, (item[3] ?? " ").length);
      items.push([item[4] ?? ""]);
    } else if (line.trim() === "" ? follows(lines, end, indent) : /^\s{2,}/.test(line))
      items.at(-1)?.push(line.slice(Math.min(indent, line.length - line.trimStart().length)));
    else break;
  }
  const start = ordered ? Number.parseInt(first[2] ?? "1", 10) : 1;
  const parsed = items.map((item) => parse(item.join("\n"), depth + 1));
  return { block: { kind: "list", ordered, start, items: parsed }, next: end };
}

/** Whether the list goes on after an empty line. */
function follows(lines: string[], at: number, indent: number): boolean {
  const next = lines[at + 1] ?? "";
  return ITEM.test(next) || (next.trim() !== "" && next.length - next.trimStart().length >= Math.min(2, indent));
}

// Code first, because nothing counts in it. Each alternative ends at a bounded distance or at its own mark.
const MARKS =
  /(?<!`)(`+)(?!`)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)|\*\*(?=\S)([\s\S]{0,2000}?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*]{0,2000}?[^\s*])\*(?![\w*])|(?<!\w)_(?=[^\s_])([^_]{0,2000}?[^\s_])_(?!\w)|\[([^\]\n]{1,500})\]\(([^)\s]{1,2000})\)/g;

export function inline(text: string, depth = 0): Inline[] {
  if (depth > DEEPEST) return [{ kind: "text", text }];
  const found: Inline[] = [];
  let at = 0;
  for (const match of text.matchAll(MARKS)) {
    const [whole, , code, strong, star, line, label, address] = match;
    if (match.index > at) found.push({ kind: "text", text: text.slice(at, match.index) });
    const em = star ?? line;
    const href = address === undefined ? null : safe(address);
    if (code !== undefined) found.push({ kind: "code", text: code.replace(/^ (?=.* $)|(?<=^ .*) $/g, "") });
    else if (strong !== undefined) found.push({ kind: "strong", inner: inline(strong, depth + 1) });
    else if (em !== undefined) found.push({ kind: "em", inner: inline(em, depth + 1) });
    else if (label !== undefined && href !== null) found.push({ kind: "link", href, inner: inline(label, depth + 1) });
    else found.push({ kind: "text", text: whole });
    at = match.index + whole.length;
  }
  if (at < text.length) found.push({ kind: "text", text: text.slice(at) });
  return found;
}

/** An address that leads to another page; null: it would run something, or belongs to this page. */
function safe(address: string): string | null {
  return /^(?:https?:\/\/|mailto:)[^\s<>"']+$/i.test(address) ? address : null;
}
