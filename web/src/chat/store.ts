// The state of the chat page and what a person can do there. One answer is written at a time; what arrives is put into the
// conversation a few times a second, and kept when it is complete.

import { batch, computed, signal } from "@preact/signals";
import { ApiError } from "../visit/api";
import type { ChatModel } from "../schema/chat";
import * as calls from "./calls";
import * as keep from "./keep";
import type { Options } from "./keep";
import type { Heard, Timings, Usage } from "./sse";
import { type Asked, type Conversation, type Turn, begin, change, grow, path, turnTo } from "./tree";

const ASK = 500; // ms between two looks at a server that is not ready
const SHOW = 40; // ms between two pictures of an answer that is being written

export const model = signal<ChatModel | null>(null);
export const waiting = signal("Looking for the server."); // why there is no model yet
export const needsKey = signal(false);
export const conversations = signal<Conversation[]>([]);
export const currentId = signal("");
export const options = signal<Options>(keep.USUAL);
export const writing = signal<{ conversation: string; turn: number; stop: AbortController } | null>(null);
export const unkept = signal(false); // whether the browser's storage refused a conversation
export const announcement = signal("");

export const current = computed(() => conversations.value.find(({ id }) => id === currentId.value) ?? null);
export const turns = computed<Turn[]>(() => (current.value === null ? [] : path(current.value)));

export async function start(): Promise<void> {
  batch(() => {
    conversations.value = keep.all();
    options.value = keep.options();
    currentId.value = location.hash.slice(1);
  });
  if (current.value === null) currentId.value = conversations.value[0]?.id ?? "";
  await connect();
}

/** Asks for the model until it is there, or until a key is needed. */
export async function connect(): Promise<void> {
  for (;;) {
    try {
      const found = await calls.model();
      batch(() => {
        model.value = found;
        needsKey.value = false;
      });
      return;
    } catch (error) {
      const kind = error instanceof ApiError ? error.kind : "";
      if (kind === "key") {
        needsKey.value = true;
        return;
      }
      waiting.value =
        kind === "loading" ? "The model is loading." : error instanceof Error ? error.message : String(error);
    }
    await new Promise((resolve) => setTimeout(resolve, ASK));
  }
}

export function useKey(key: string): void {
  keep.saveKey(key);
  needsKey.value = false;
  if (model.value === null) void connect();
}

export function setOptions(values: Partial<Options>): void {
  options.value = { ...options.value, ...values };
  keep.saveOptions(options.value);
}

export function fresh(): void {
  currentId.value = "";
  history.replaceState(null, "", location.pathname);
}

export function open(id: string): void {
  currentId.value = id;
  history.replaceState(null, "", `${location.pathname}#${id}`); // the document may have another base
}

export function remove(id: string): void {
  if (writing.value?.conversation === id) stop();
  keep.remove(id);
  conversations.value = conversations.value.filter((one) => one.id !== id);
  if (currentId.value === id) fresh();
}

export function stop(): void {
  writing.value?.stop.abort();
}

export function follow(turn: number, by: number): void {
  if (current.value) put(turnTo(current.value, turn, by), true);
}

/** Says something after the last turn, and has it answered. An empty text only asks to go on. */
export function say(text: string, pictures: string[] = []): void {
  if (writing.value !== null || model.value === null) return;
  const last = turns.value.at(-1)?.id ?? 0;
  const conversation = current.value ?? begin(identity(), options.value.system, Date.now());
  if (text === "" && pictures.length === 0) answer(conversation, last);
  else answer(...grow(conversation, last, "user", pictures.length ? { text, pictures } : { text }));
}

/** Says a message in other words: a branch beside it. */
export function edit(turn: Turn, text: string): void {
  if (writing.value !== null || current.value === null || text === "") return;
  const { pictures } = turn;
  answer(...grow(current.value, turn.parent, "user", pictures ? { text, pictures } : { text }));
}

/** Has another answer written, beside the one that is there. */
export function regenerate(turn: Turn): void {
  if (writing.value === null && current.value !== null) answer(current.value, turn.parent);
}

/** The sampling that a model's files suggest. A small model writes nonsense by plain probabilities, which is what files
 * without a suggestion come to: then it is cooler, and the least probable tokens are left out. */
export function suggested({ temperature, top_k, top_p }: ChatModel): Pick<Asked, "temperature" | "top_k" | "top_p"> {
  const plain = temperature === 1 && top_k === 0 && top_p === 1;
  return plain ? { temperature: 0.7, top_k, top_p: 0.95 } : { temperature, top_k, top_p };
}

function asked(card: ChatModel): Asked {
  const usual = suggested(card);
  const { system, temperature, top_k, top_p, max_tokens, seed, stop: end } = options.value;
  return {
    model: card.name,
    system: card.template ? system : "",
    temperature: temperature ?? usual.temperature,
    top_k: top_k ?? usual.top_k,
    top_p: top_p ?? usual.top_p,
    max_tokens,
    seed: seed ?? crypto.getRandomValues(new Uint32Array(1))[0] ?? 0,
    stop: end === "" ? [] : [end],
  };
}

function answer(before: Conversation, parent: number): void {
  const card = model.value;
  if (card === null) return;
  const [conversation, turn] = grow(before, parent, "assistant", { state: "writing", asked: asked(card) });
  const abort = new AbortController();
  batch(() => {
    put({ ...conversation, changed: Date.now() }, true);
    open(conversation.id);
    writing.value = { conversation: conversation.id, turn, stop: abort };
    announcement.value = "The model is writing.";
  });
  void write(conversation, turn, card.template, abort.signal);
}

async function write(conversation: Conversation, turn: number, template: boolean, signal: AbortSignal): Promise<void> {
  const answer = new Answer((values) => update(conversation.id, turn, values));
  let end: Partial<Turn> = { state: "done" };
  try {
    await calls.answer(conversation, turn, template, signal, (chunk) => answer.hear(chunk));
  } catch (error) {
    if (signal.aborted) end = { state: "stopped" };
    else {
      end = { state: "failed", error: error instanceof Error ? error.message : String(error) };
      if (error instanceof ApiError && error.kind === "key") needsKey.value = true;
    }
  }
  batch(() => {
    update(conversation.id, turn, { ...answer.whole(), ...end }, true);
    writing.value = null;
    announcement.value =
      end.state === "done" ? "The answer is complete." : end.state === "stopped" ? "Stopped." : "It failed.";
  });
}

/** What has been heard of an answer, shown a few times a second. */
class Answer {
  private text = "";
  private thought = "";
  private finish = "";
  private usage: Usage | null = null;
  private timings: Timings | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly show: (values: Partial<Turn>) => void) {}

  hear(chunk: Heard): void {
    this.text += chunk.text;
    this.thought += chunk.thought;
    this.finish = chunk.finish ?? this.finish;
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    this.timer ??= setTimeout(() => {
      this.timer = undefined;
      this.show({ text: this.text, thought: this.thought });
    }, SHOW);
  }

  /** All of it. Nothing is shown later. */
  whole(): Partial<Turn> {
    clearTimeout(this.timer);
    const { text, thought, finish, usage, timings } = this;
    const facts =
      usage && timings
        ? {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            disk_tokens: usage.prompt_tokens_details.disk_tokens ?? 0,
            queue_ms: timings.queue_ms,
            prefill_ms: timings.prefill_ms,
            decode_ms: timings.decode_ms,
          }
        : null;
    return { text, thought, finish, facts };
  }
}

function update(id: string, turn: number, values: Partial<Turn>, keeps = false): void {
  const conversation = conversations.value.find((one) => one.id === id);
  if (conversation) put(change(conversation, turn, values), keeps);
}

function put(conversation: Conversation, keeps: boolean): void {
  const others = conversations.value.filter(({ id }) => id !== conversation.id);
  conversations.value = [conversation, ...others].sort((a, b) => b.changed - a.changed);
  if (keeps) unkept.value = !keep.save(conversation);
}

function identity(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
