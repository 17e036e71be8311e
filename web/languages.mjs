// The strings of the page, read out of its sources, and the catalogues that translate them.
//
//   node languages.mjs            says what is missing in a catalogue, or no longer in the page; the tests ask the same
//   node languages.mjs CODE       writes src/language/CODE.json anew: what it has, and an empty entry for what it lacks
//
// A catalogue has English strings as keys. {0}, {1} ... stand for what the page puts in: numbers, words, elements. A
// translation has each of them once, in any order. Texts of the engine's lesson come from Python and are read there.

import { readdirSync, readFileSync, writeFileSync, existsSync } from "node:fs";
import { execFileSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";
import { parseSync } from "vite";

const HERE = dirname(fileURLToPath(import.meta.url));
const SOURCES = join(HERE, "src");
/** The repository's folder; tests run in a copy of web/, below it. */
function rootAbove(folder) {
  return existsSync(join(folder, "pyproject.toml")) ? folder : rootAbove(dirname(folder));
}
const SPOKEN = ["src/tokenwright/explorer/learn", "web/course", "web/course/lessons"];
const CATALOGUES = join(SOURCES, "language");
const SHOWN = /^(title|aria-label|aria-valuetext|placeholder|alt|label|lead|hint|meaning|text|words|summary|of|name)$/;
const NAMED = /^(title|text|name|label|hint|meaning|words|said|is|here|short|what|why|note|says|tip|lead|line)$/;
const CODE = /gl\/(?!words)|icons|\.test\.|test-probe|worker\/|language\//; // programs and pictures
const DATA = /^(Stat|Figure|Told|Datum|Icon|input|Field|Badge|meta|Work|Bar)$/; // elements whose name is an identifier
const QUIET = /^(class|className|type|role|id|key|style|d|viewBox|href|rel|data-.*|keys|src|transform|autocomplete)$/;

const letters = (text) => /\p{L}{2}/u.test(text.replace(/\{\d+\}/g, ""));
const wordy = (text) => letters(text) && (/ /.test(text) || /^[A-Z][a-z]/.test(text) || /^[✓✗←→]/.test(text));

const plain = (text) => text.replace(/\s+/g, " ").trim();

/** JSX text as the compiler has it: lines are trimmed and joined by a space. */
function jsxText(raw) {
  const lines = raw.split("\n");
  return lines
    .map((line, i) => {
      let text = line.replace(/\t/g, " ");
      if (i > 0) text = text.trimStart();
      if (i < lines.length - 1) text = text.trimEnd();
      return text;
    })
    .filter((line) => line !== "")
    .join(" ");
}

function entities(text) {
  return text.replace(
    /&(amp|lt|gt|nbsp|quot);/g,
    (_, name) => ({ amp: "&", lt: "<", gt: ">", nbsp: "\u00a0", quot: '"' })[name],
  );
}

/** The display strings of one file: those found by their place, and all words that are written in it at all. */
function stringsOf(file) {
  const source = readFileSync(join(SOURCES, file), "utf8");
  const { program } = parseSync(file, source, { lang: file.endsWith("x") ? "tsx" : "ts" });
  const found = new Set();
  const all = new Set();
  const add = (text) => letters(text) && found.add(plain(text));
  function sequence(children) {
    let [key, holes] = ["", 0];
    for (const child of children) {
      if (child.type === "JSXText") key += entities(jsxText(child.value));
      else if (child.type === "JSXExpressionContainer" && child.expression.type === "Literal")
        key += child.expression.value;
      else if (child.type !== "JSXExpressionContainer" || child.expression.type !== "JSXEmptyExpression")
        key += `{${holes++}}`;
    }
    add(key);
  }
  function visit(node, shown) {
    if (node === null || typeof node !== "object") return;
    if (Array.isArray(node)) return node.forEach((one) => visit(one, shown));
    const into = (key, show) => visit(node[key], show);
    switch (node.type) {
      case "ImportDeclaration":
      case "ExportAllDeclaration":
      case "TSTypeAliasDeclaration":
      case "TSInterfaceDeclaration":
      case "TSTypeAnnotation":
      case "TSTypeParameterInstantiation":
        return;
      case "JSXElement":
      case "JSXFragment": {
        sequence(node.children);
        const own = node.openingElement?.name.name ?? "";
        for (const one of node.openingElement?.attributes ?? []) {
          const name = one.name?.name ?? "";
          if (QUIET.test(name)) visit(one.value ?? null, null);
          else visit(one.value ?? one, SHOWN.test(name) && !(name === "name" && DATA.test(own)));
        }
        return visit(node.children, true);
      }
      case "JSXText":
        return;
      case "JSXExpressionContainer":
      case "ParenthesizedExpression":
      case "TSAsExpression":
      case "TSSatisfiesExpression":
      case "TSNonNullExpression":
        return into("expression", shown);
      case "Property": {
        const name = node.key.name ?? node.key.value;
        if (file.startsWith("schema")) {
          if (name === "label" || name === "meaning") add(node.value.value ?? "");
          return into("value", null);
        }
        return into("value", typeof name === "string" && NAMED.test(name));
      }
      case "ConditionalExpression":
        into("test", false);
        into("consequent", shown);
        return into("alternate", shown);
      case "LogicalExpression":
        into("left", node.operator === "&&" ? false : shown);
        return into("right", shown);
      case "BinaryExpression":
        if (node.operator !== "+") return;
        into("left", shown);
        return into("right", shown);
      case "CallExpression":
        into("callee", false);
        if (node.callee.name === "plural" || node.callee.property?.name === "plural") {
          const [, one, many] = node.arguments;
          if (one?.type === "Literal") {
            add(`{0} ${one.value}`);
            add(`{0} ${many?.value ?? `${one.value}s`}`);
          }
          return into("arguments", false);
        }
        return visit(node.arguments, node.callee.name === "translated");
      case "TemplateLiteral": {
        const key = node.quasis
          .map((part, i) => part.value.cooked + (i < node.expressions.length ? `{${i}}` : ""))
          .join("");
        all.add(plain(key));
        if (shown !== null && (shown ? letters(key) : wordy(key))) add(key);
        return into("expressions", false);
      }
      case "Literal":
        if (typeof node.value !== "string") return;
        all.add(plain(node.value));
        if (shown !== null && (shown ? letters(node.value) : wordy(node.value))) add(node.value);
        return;
    }
    for (const key in node)
      if (!["type", "start", "end", "typeAnnotation", "range", "loc"].includes(key))
        into(key, shown === null ? null : false);
  }
  visit(program, false);
  return [found, all];
}

export function strings() {
  const files = readdirSync(SOURCES, { recursive: true }).map((name) => name.replaceAll("\\", "/"));
  const found = new Map();
  const all = new Set();
  for (const file of files.filter((name) => /\.tsx?$/.test(name) && !CODE.test(name)).sort()) {
    const [own, written] = stringsOf(file);
    for (const text of own) if (!found.has(text)) found.set(text, file);
    for (const text of written) all.add(text);
  }
  return { found, all };
}

/** Of Python's files: the strings that readers of the lesson and of the course see. */
function spoken() {
  const source = `import ast, json, pathlib, re
found = []
for place in map(pathlib.Path, ${JSON.stringify(SPOKEN)}):
    for file in sorted(place.glob("*.py")):
        tree, skip = ast.parse(file.read_text("utf-8")), set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                skip.add(node.body[0].value)
            if isinstance(node, ast.FormattedValue) and node.format_spec:
                skip.update(ast.walk(node.format_spec))
        for node in ast.walk(tree):
            if node in skip:
                continue
            if isinstance(node, ast.JoinedStr):
                skip.update(node.values)
                holes = iter(range(99))
                parts = (one.value if isinstance(one, ast.Constant) else f"{{{next(holes)}}}" for one in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
print(json.dumps(found))`;
  const said = execFileSync("python3", ["-c", source], { cwd: rootAbove(HERE), encoding: "utf8" });
  return JSON.parse(said)
    .filter((text) => !/^(def|class) /.test(text))
    .flatMap((text) => text.split("\n\n"))
    .map(plain);
}

/** Strings that are the same in all languages: code, formulas, prompts, names, and what no reader sees. */
const same = new Set(JSON.parse(readFileSync(join(HERE, "languages.same.json"), "utf8")));
const dull = (text) => same.has(text) || /^[a-z0-9]+(_[a-z0-9{}]+)+$|^\{\d\}[a-z_]*_[a-z_]*$/.test(text);

/** Every string that a catalogue must have; and all that it may have: words that only their use makes shown ones. */
export function needed() {
  const { found, all } = strings();
  const lesson = spoken();
  const wanted = ["“ ”", ...found.keys(), ...lesson.filter((text) => wordy(text))].filter((text) => !dull(text));
  return { wanted: new Set(wanted), allowed: new Set([...wanted, ...all, ...lesson]) };
}

export const codes = () =>
  readdirSync(CATALOGUES)
    .filter((name) => name.endsWith(".json"))
    .map((name) => name.slice(0, -5));

export const catalogue = (code) => JSON.parse(readFileSync(join(CATALOGUES, `${code}.json`), "utf8"));

const holes = (text) => (text.match(/\{\d+\}/g) ?? []).sort().join();

/** What is wrong with a catalogue, a line each. */
export function faults(own) {
  const { wanted, allowed } = needed();
  return [
    ...[...wanted].filter((text) => !own[text]).map((text) => `missing: ${text}`),
    ...Object.keys(own)
      .filter((text) => !allowed.has(text))
      .map((text) => `no longer in the page: ${text}`),
    ...Object.entries(own)
      .filter(([text, to]) => holes(text) !== holes(to))
      .map(([text]) => `other places than in English: ${text}`),
  ];
}

function write(code) {
  const place = join(CATALOGUES, `${code}.json`);
  const own = existsSync(place) ? catalogue(code) : {};
  const { wanted, allowed } = needed();
  const kept = Object.entries(own).filter(([text]) => allowed.has(text));
  const lacking = [...wanted].filter((text) => !(text in own)).map((text) => [text, ""]);
  writeFileSync(place, `${JSON.stringify(Object.fromEntries([...kept, ...lacking]), null, 2)}\n`);
  console.log(`${place}: ${kept.length} strings, and ${lacking.length} to be translated`);
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [code] = process.argv.slice(2);
  if (code) write(code);
  else for (const one of codes()) console.log(one, faults(catalogue(one)).join("\n") || "is complete");
}
