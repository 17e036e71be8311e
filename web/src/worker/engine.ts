// The engine in a worker of the page: Python and the kernels as WebAssembly, from files of the site. Between two messages
// of the page it lets the engine take turns. The answers are made by web/python/page_engine.py.

import type { Loading } from "../schema";
import type { Asked, Told } from "./client";
import { fuses } from "./fuses";

/** What scripts/site writes: the files, by their names in the folder, with their bytes. */
interface Files {
  pyodide: string; // a folder
  packages: string[]; // of Pyodide's own
  archives: { name: string; bytes: number }[]; // zip files of Python's
  kernels: { relaxed: { name: string; bytes: number }; exact: { name: string; bytes: number } };
}

/** The functions of web/python/page_engine.py. */
interface PageEngine {
  ask(key: number, method: string, path: string, body: string): void;
  open(key: number, path: string): void;
  say(key: number, text: string): void;
  leave(key: number): void;
  turn(): number | undefined; // seconds until the next one; none: a message must come first
}

interface PyProxy {
  toJs(): Uint8Array<ArrayBuffer>;
  destroy(): void;
}

interface Python {
  FS: { mkdirTree(path: string): void; writeFile(path: string, data: Uint8Array): void };
  loadPackage(names: string[], options: object): Promise<unknown>;
  unpackArchive(data: Uint8Array, kind: string, options: { extractDir: string }): void;
  pyimport(name: string): { begin(told: (...args: unknown[]) => void): PageEngine };
  runPython(code: string): unknown;
}

const LIBRARY = "/packages/tokenwright/backends/native/_native.so";
const worker = self as unknown as {
  onmessage: ((event: MessageEvent<Asked>) => void) | null;
  postMessage(message: Told, moved?: Transferable[]): void;
};
let engine: PageEngine | null = null;
let loading: Loading = { phase: "loading", done: 0, total: 0, message: "" };
let timer: ReturnType<typeof setTimeout> | undefined;
const again = new MessageChannel(); // sooner than any timer
again.port1.onmessage = turn;

function turn(): void {
  clearTimeout(timer);
  const rest = engine?.turn();
  if (rest === undefined || rest === null) return;
  if (rest <= 0) again.port2.postMessage(0);
  else timer = setTimeout(turn, rest * 1000);
}

/** What Python tells the page; bytes come as a view of its memory, which is copied. */
function told(kind: Told["kind"], key: number, first: unknown, second: unknown): void {
  let data = first;
  if (typeof first === "object" && first !== null) {
    data = (first as PyProxy).toJs().slice();
    (first as PyProxy).destroy();
  }
  if (kind === "answer") worker.postMessage({ kind, key, status: first as number, type: second as string });
  else if (kind === "part") worker.postMessage({ kind, key, data: data as string | Uint8Array<ArrayBuffer> });
  else if (kind === "message") {
    const message = typeof data === "string" ? data : (data as Uint8Array<ArrayBuffer>).buffer;
    worker.postMessage({ kind, key, data: message }, typeof message === "string" ? [] : [message]);
  } else if (kind === "closed") worker.postMessage({ kind, key, code: first as number });
  else worker.postMessage({ kind: "end", key });
}

/** Tells the page how far the engine is. */
function tellLoading(news: Partial<Loading>): void {
  loading = { ...loading, ...news };
  worker.postMessage({ kind: "loading", key: 0, loading });
}

worker.onmessage = ({ data }) => {
  if (data.kind === "load")
    load(data.folder).catch((error: unknown) => {
      const why = error instanceof Error ? error.message.trim().split("\n").at(-1) : String(error);
      tellLoading({ phase: "failed", message: `The engine cannot run in this browser: ${why}` });
    });
  else {
    if (data.kind === "ask") engine?.ask(data.key, data.method, data.path, data.body);
    else if (data.kind === "open") engine?.open(data.key, data.path);
    else if (data.kind === "say") engine?.say(data.key, data.text);
    else engine?.leave(data.key);
    turn();
  }
};

async function load(folder: string): Promise<void> {
  const files = (await (await fetched(`${folder}files.json`)).json()) as Files;
  const kernels = (await fuses()) ? files.kernels.relaxed : files.kernels.exact;
  tellLoading({ total: [...files.archives, kernels].reduce((sum, { bytes }) => sum + bytes, 0) });
  const [python, library, ...archives] = await Promise.all([
    started(folder, files),
    bytesOf(folder + kernels.name),
    ...files.archives.map(({ name }) => bytesOf(folder + name)),
  ]);
  for (const archive of archives) python.unpackArchive(archive, "zip", { extractDir: "/packages" });
  python.FS.writeFile(LIBRARY, library);
  python.runPython("import sys; sys.path.insert(0, '/packages'); sys.dont_write_bytecode = True");
  engine = python.pyimport("page_engine").begin(told as (...args: unknown[]) => void);
  tellLoading({ phase: "ready" });
}

async function started(folder: string, files: Files): Promise<Python> {
  const indexURL = folder + files.pyodide;
  const { loadPyodide } = (await import(/* @vite-ignore */ `${indexURL}pyodide.mjs`)) as {
    loadPyodide(options: object): Promise<Python>;
  };
  const python = await loadPyodide({ indexURL });
  await python.loadPackage(files.packages, { messageCallback: () => undefined });
  python.FS.mkdirTree("/packages");
  return python;
}

async function fetched(url: string): Promise<Response> {
  const found = await fetch(url);
  if (!found.ok) throw new Error(`${url} is missing (${found.status})`);
  return found;
}

/** A file's bytes; counts them as they come. */
async function bytesOf(url: string): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  const reader = (await fetched(url)).body!.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    parts.push(part.value);
    tellLoading({ done: loading.done + part.value.length });
  }
  return new Uint8Array(await new Blob(parts as BlobPart[]).arrayBuffer());
}
