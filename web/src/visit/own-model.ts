// A model that a visitor brings to a page whose engine is in its worker: what it takes is said first; then it is kept in
// this browser's own storage, and the page begins again with it.

import { signal } from "@preact/signals";
import * as api from "./api";
import { bring, engineHere } from "./server";
import { problem } from "./store";

/** In bytes and tokens, as web/python/own_model.py says. */
interface Card {
  refused?: string;
  weights: number;
  kv: number;
  tokens: number;
  context: number;
  layers: number;
}

export interface Offer extends Card {
  files: File[];
  name: string;
  bytes: number;
}

export const offer = signal<Offer | null>(null);
export const copied = signal<number | null>(null); // the share that is kept; null: nothing is being kept

const LOOK = 300; // ms between two looks at how far the copy is
const OF_MODEL = /\.(gguf|safetensors|json|txt|jinja|model)$/i;

/** Whether files are a model's, and not a trace. */
export const isModel = (files: File[]): boolean => files.some(({ name }) => /\.(gguf|safetensors)$/i.test(name));

/** Has the engine say what a model takes. */
export async function offerModel(given: File[]): Promise<void> {
  const files = given.filter(({ name }) => OF_MODEL.test(name));
  const name = files.find(({ name }) => /\.(gguf|safetensors)$/i.test(name))?.name ?? "this file";
  if (!engineHere()) return refuse("This page's engine is a server, which was given its model when it was started.");
  if (!isModel(files)) return refuse(`${name} is no model; choose a GGUF file, or a folder of safetensors.`);
  const card = await told("offer", files);
  if (card?.refused !== undefined) return refuse(`${name} cannot run here: ${card.refused}`);
  if (card !== null) offer.value = { ...card, files, name, bytes: files.reduce((sum, { size }) => sum + size, 0) };
}

/** Keeps the offered model, and begins again with it. */
export async function accept(): Promise<void> {
  const wanted = offer.value;
  if (wanted === null || copied.value !== null) return;
  copied.value = 0;
  const timer = setInterval(() => {
    void api.status().then(({ done, total }) => (copied.value = total === 0 ? 0 : done / total));
  }, LOOK);
  const card = await told("keep", wanted.files).finally(() => clearInterval(timer));
  copied.value = null;
  offer.value = null;
  if (card?.refused === undefined) location.reload();
  else refuse(`${wanted.name} was not kept: ${card.refused}`);
}

/** Removes the visitor's model, and begins again with the page's own. */
export async function giveBack(): Promise<void> {
  await told("keep", []);
  location.reload();
}

export function chooseModel(): void {
  const input = document.createElement("input");
  input.type = "file";
  input.multiple = true;
  input.accept = ".gguf,.safetensors,.json,.txt,.jinja,.model";
  input.onchange = () => void offerModel([...(input.files ?? [])]);
  input.click();
}

/** The files of what is dropped, a folder's among them. */
export async function dropped({ items, files }: DataTransfer): Promise<File[]> {
  const entry = items[0]?.webkitGetAsEntry();
  if (!entry?.isDirectory) return [...files];
  const reader = (entry as FileSystemDirectoryEntry).createReader();
  const found: File[] = [];
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((done, fail) => reader.readEntries(done, fail));
    if (some.length === 0) return found;
    for (const one of some)
      if (one.isFile)
        found.push(await new Promise<File>((done, fail) => (one as FileSystemFileEntry).file(done, fail)));
  }
}

async function told(kind: "offer" | "keep", files: File[]): Promise<Card | null> {
  const answer = await bring(kind, files);
  return answer.status === 204 ? null : ((await answer.json()) as Card);
}

function refuse(message: string): void {
  offer.value = null;
  problem.value = { kind: "own", message };
}
