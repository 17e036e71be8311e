// The engine in a worker of the page: Python and the kernels as WebAssembly, from files of the site. Between two messages
// of the page it lets the engine take turns. The answers are made by web/python/page_engine.py. On a GPU a call of Python
// waits for the device, so calls come one after another.

import type { Loading } from "../schema";
import type { Asked, Device, Told } from "./client";
import { Files, type Manifest } from "./files";
import { fuses } from "./fuses";
import * as own from "./own";

/** A function of Python; one that is called by `callPromising` may wait for what the browser promises. */
interface Call<Given extends unknown[], Made> {
  (...given: Given): Made;
  callPromising(...given: Given): Promise<Made>;
}

/** The functions of web/python/page_engine.py. */
interface PageEngine {
  ask: Call<[key: number, method: string, path: string, body: string], void>;
  open: Call<[key: number, path: string], void>;
  say: Call<[key: number, text: string], void>;
  leave: Call<[key: number], void>;
  turn: Call<[], number | undefined>; // seconds until the next one; none: a message must come first
  add: Call<[module: string], void>; // answers by its routes as well
}

interface PyProxy {
  toJs(): Uint8Array<ArrayBuffer>;
  destroy(): void;
}

interface Python {
  FS: {
    filesystems: { WORKERFS: object };
    mkdirTree(path: string): void;
    mount(system: object, options: { files: File[] }, path: string): void;
    unmount(path: string): void;
    writeFile(path: string, data: Uint8Array): void;
    unlink(path: string): void;
  };
  mountNativeFS(path: string, folder: FileSystemDirectoryHandle): Promise<{ syncfs(): Promise<void> }>;
  unpackArchive(data: Uint8Array, kind: string, options: { extractDir: string }): void;
  pyimport(name: "page_engine"): {
    begin: Call<[told: (...args: unknown[]) => void, own: string, device: Device], PageEngine>;
  };
  pyimport(name: "own_model"): {
    offered(folder: string, names: string[]): string;
    path_of(folder: string, names: string[]): string;
  };
  pyimport(name: "weight_planes"): { restore(packed: string, path: string): void };
  runPython(code: string): unknown;
}

const PACKAGES = "/packages";
const [OFFERED, OWN] = ["/offered", "/own"]; // where models lie that a visitor brings
const LIBRARY = `${PACKAGES}/tokenwright/backends/native/_native.so`;
const worker = self as unknown as {
  onmessage: ((event: MessageEvent<Asked>) => void) | null;
  postMessage(message: Told, moved?: Transferable[]): void;
};
let engine: PageEngine | null = null;
let python: Python | null = null;
let site: Files | null = null;
let course: Promise<void> | null = null; // once it was asked for
let kept: { syncfs(): Promise<void> } | null = null; // K and V of conversations
const answers = new Set<number>(); // the keys of answers that are being written
let loading: Loading = { phase: "loading", done: 0, total: 0, message: "" };
let timer: ReturnType<typeof setTimeout> | undefined;
const again = new MessageChannel(); // sooner than any timer
again.port1.onmessage = turn;
let device: Device = "cpu";
let calls: Promise<unknown> = Promise.resolve(); // on a GPU: the last one
let [turning, due] = [false, false];

/** Calls Python, on a GPU once the calls before it have ended. */
function call<Given extends unknown[], Made>(what: Call<Given, Made>, ...given: Given): Made | Promise<Made> {
  if (device === "cpu") return what(...given);
  const made = calls.then(() => what.callPromising(...given));
  calls = made.catch(() => undefined);
  return made;
}

async function turn(): Promise<void> {
  clearTimeout(timer);
  due = turning;
  if (engine === null || turning) return;
  turning = true;
  try {
    const rest = await call(engine.turn);
    if (due || (rest ?? 1) <= 0) again.port2.postMessage(0);
    else if (rest !== undefined && rest !== null) timer = setTimeout(turn, rest * 1000);
  } finally {
    turning = false;
  }
}

/** What Python tells the page; bytes come as a view of its memory, which is copied. */
function told(kind: Told["kind"] | "loaded", key: number, first: unknown, second: unknown): void {
  let data = first;
  if (typeof first === "object" && first !== null) {
    data = (first as PyProxy).toJs().slice();
    (first as PyProxy).destroy();
  }
  if (kind === "loaded") tellLoading({ done: first as number, total: second as number });
  else if (kind === "answer") worker.postMessage({ kind, key, status: first as number, type: second as string });
  else if (kind === "part") worker.postMessage({ kind, key, data: data as string | Uint8Array<ArrayBuffer> });
  else if (kind === "message") {
    const message = typeof data === "string" ? data : (data as Uint8Array<ArrayBuffer>).buffer;
    worker.postMessage({ kind, key, data: message }, typeof message === "string" ? [] : [message]);
  } else if (kind === "closed") worker.postMessage({ kind, key, code: first as number });
  else {
    worker.postMessage({ kind: "end", key });
    if (answers.delete(key)) void kept?.syncfs();
  }
}

/** Tells the page how far the engine is. */
function tellLoading(news: Partial<Loading>): void {
  loading = { ...loading, ...news };
  worker.postMessage({ kind: "loading", key: 0, loading });
}

worker.onmessage = ({ data }) => {
  if (data.kind === "load")
    load(data.folder, data.device).catch((error: unknown) => {
      const why = error instanceof Error ? error.message.trim().split("\n").at(-1) : String(error);
      if (data.device === "cpu") void own.forget(); // if it was a visitor's model, the next visit has the page's own
      tellLoading({ phase: "failed", message: `The engine cannot run in this browser: ${why}` });
    });
  else if (data.kind === "offer" || data.kind === "keep") void take(data.kind, data.key, data.files);
  else if (data.kind === "ask" && data.path.startsWith("course"))
    void (course ??= opened()).then(
      () => (engine && call(engine.ask, data.key, data.method, data.path, data.body), turn()),
      () => {
        course = null;
        refuse(data.key, "The course is not in this browser yet, and could not be fetched.");
      },
    );
  else if (engine !== null) {
    if (data.kind === "ask" && data.path.startsWith("v1/")) answers.add(data.key);
    if (data.kind === "ask") void call(engine.ask, data.key, data.method, data.path, data.body);
    else if (data.kind === "open") void call(engine.open, data.key, data.path);
    else if (data.kind === "say") void call(engine.say, data.key, data.text);
    else void call(engine.leave, data.key);
    void turn();
  }
};

/** Adds the course, whose files no visit fetches before. */
async function opened(): Promise<void> {
  if (python === null || engine === null || site === null) throw new Error("there is no engine");
  python.unpackArchive(await site.bytes(site.manifest.course), "zip", { extractDir: PACKAGES });
  engine.add("course.answers");
}

function refuse(key: number, message: string): void {
  worker.postMessage({ kind: "answer", key, status: 503, type: "application/json" });
  worker.postMessage({ kind: "part", key, data: JSON.stringify({ error: { kind: "missing", message } }) });
  worker.postMessage({ kind: "end", key });
}

/** Answers what a model takes, or keeps it. */
async function take(kind: "offer" | "keep", key: number, files: File[]): Promise<void> {
  const type = "application/json";
  try {
    let found = "";
    if (kind === "offer" && python !== null) {
      mounted(python, OFFERED, files);
      found = python.pyimport("own_model").offered(OFFERED, files.map(({ name }) => name)); // prettier-ignore
      python.FS.unmount(OFFERED);
    } else if (files.length === 0) await own.forget();
    else {
      tellLoading({ done: 0, total: files.reduce((sum, { size }) => sum + size, 0) });
      await own.keep(files, (bytes) => tellLoading({ done: loading.done + bytes }));
    }
    worker.postMessage({ kind: "answer", key, status: found === "" ? 204 : 200, type });
    if (found !== "") worker.postMessage({ kind: "part", key, data: found });
  } catch (error) {
    const refused = `this browser keeps no such file: ${error instanceof Error ? error.message : String(error)}`;
    worker.postMessage({ kind: "answer", key, status: 200, type });
    worker.postMessage({ kind: "part", key, data: JSON.stringify({ refused }) });
  }
  worker.postMessage({ kind: "end", key });
}

function mounted({ FS }: Python, path: string, files: File[]): void {
  FS.mkdirTree(path);
  FS.mount(FS.filesystems.WORKERFS, { files }, path);
}

async function load(folder: string, wanted: Device): Promise<void> {
  const brings = await own.kept();
  const files = await Files.open(folder, (bytes) => tellLoading({ done: loading.done + bytes }));
  const { archives, kernels, model, programs, runtime } = files.manifest;
  const chosen = (await fuses()) ? kernels.relaxed : kernels.exact;
  const fetched = [
    ...archives,
    chosen,
    ...(brings.length === 0 ? [model] : []),
    ...programs,
    ...Object.values(runtime),
  ];
  tellLoading({ total: fetched.reduce((sum, { bytes }) => sum + bytes, 0) });
  const [begun, library, weights, ...packages] = await Promise.all([
    started(folder, files),
    files.bytes(chosen),
    brings.length === 0 ? files.bytes(model) : null,
    ...archives.map((archive) => files.bytes(archive)),
    files.keepPrograms(),
  ]);
  python = begun;
  for (const archive of packages)
    if (archive instanceof Uint8Array) python.unpackArchive(archive, "zip", { extractDir: PACKAGES });
  python.FS.writeFile(LIBRARY, library);
  python.runPython(`import sys; sys.path.insert(0, "${PACKAGES}"); sys.dont_write_bytecode = True`);
  if (weights !== null) {
    python.FS.writeFile("/weights", weights);
    python.pyimport("weight_planes").restore("/weights", `${PACKAGES}/${model.path}`);
    python.FS.unlink("/weights");
  }
  device = wanted;
  const storage = device === "cpu" ? await own.kv() : null; // a GPU's K and V are not the processor's to the bit
  if (storage !== null) kept = await python.mountNativeFS("/kept", storage).catch(() => null);
  const { begin } = python.pyimport("page_engine");
  engine = await call(begin, told as (...args: unknown[]) => void, brought(python, brings), device);
  site = files;
  tellLoading({ phase: "ready" });
  await files.forgetOthers();
}

/** The path of the model that a visitor brought; "": there is none. */
function brought(python: Python, brings: File[]): string {
  if (brings.length === 0) return "";
  mounted(python, OWN, brings);
  const names = brings.map(({ name }) => name);
  return python.pyimport("own_model").path_of(OWN, names);
}

/** Starts Python, whose own loader gets its files from ours. */
async function started(folder: string, files: Files): Promise<Python> {
  const indexURL = folder + files.manifest.pyodide;
  const network = self.fetch;
  self.fetch = (asked, init) => {
    const name = (asked instanceof Request ? asked.url : String(asked)).replace(indexURL, "");
    const file = (files.manifest.runtime as Partial<Manifest["runtime"]>)[name];
    const type = name.endsWith(".wasm") ? "application/wasm" : undefined;
    return file === undefined ? network(asked, init) : files.unpacked(file, type);
  };
  const { loadPyodide } = (await import(/* @vite-ignore */ `${indexURL}pyodide.mjs`)) as {
    loadPyodide(options: object): Promise<Python>;
  };
  const made = await loadPyodide({ indexURL });
  made.FS.mkdirTree(PACKAGES);
  return made;
}
